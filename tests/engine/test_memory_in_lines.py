"""Peak memory in the lines of metrics."""

from __future__ import annotations

import json
import resource

import torch

from forge_core.engine import loop, reporting
from forge_core.engine.trainer import Trainer
from forge_core.metrics.console import describe
from forge_testing import tiny_job
from forge_testing.processes import run_on_ranks


def test_lines_have_the_resident_set(make_job, train, lines):
    records = lines(train(make_job(steps=3)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    figures = [record["peak_memory_gb"] for record in records]
    assert figures == sorted(figures)
    assert 0.05 < figures[0] <= figures[-1] <= peak


def test_lines_have_the_figure_of_the_rank_with_the_most_in_the_step_before(tmp_path, catalog, monkeypatch):
    def on_rank(rank):
        calls = iter(range(100))
        monkeypatch.setattr(loop, "peak_memory", lambda device: {"peak_memory_gb": 10.0 * (rank == 1) + next(calls)})
        job = tiny_job(str(tmp_path), catalog, steps=3, parallel={}, micro_batch_size=2)
        Trainer(job, catalog=catalog, echo=lambda text: None).run()

    run_on_ranks(2, on_rank)
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    figures = [record["peak_memory_gb"] for record in records if "loss" in record]
    assert figures == [10.0, 11.0, 12.0]  # agreed on before the first step, and at the end of the first two


def test_of_a_gpu_peaks_are_read_and_start_again(monkeypatch):
    stats, resets = {"allocated_bytes.all.peak": 61_200_000_000, "reserved_bytes.all.peak": 70_000_000_000}, []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    device = torch.device("cuda", 0)
    peaks = reporting.peak_memory(device)
    assert peaks == {"peak_memory_gb": 61.2, "peak_reserved_gb": 70.0}
    assert resets == [device]
    record = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens_per_second": 1.0, "peak_memory_gb": 61.2}
    assert "61.2 GB" in describe({**record, **peaks})
    assert "GB" not in describe(record), "a resident set is mostly torch and the data"
