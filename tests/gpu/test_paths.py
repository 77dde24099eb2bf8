"""Paths of the code that only GPUs take, as far as a CPU can follow them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core import Trainer
from forge_core.engine.reporting import Tracker
from forge_core.vocab_parallel import combine_mean
from forge_plugin_transformer.document_backends import DocumentChoice
from forge_plugin_transformer.modules import rotary
from forge_plugin_transformer.modules.attention_core import torch_attention
from forge_testing.pretend import NAME, on_device, reset_waits, waits
from gpu.bench import Bench
from gpu.runs import decoder, experts, load, merged, steps_of


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(torch.device("cpu"), True, tmp_path)


def test_packed_documents_are_told_apart_by_a_mask_without_a_wait(bench: Bench) -> None:
    train = {"global_batch_size": 2, "micro_batch_size": 2, "precision": "fp32", "device": NAME}
    assert on_device(packed_steps, bench, decoder(bench, train=train, optimizer={"type": "adamw"})) == {}


def packed_steps(bench: Bench, tables: dict[str, Any]) -> dict[Any, int]:
    with steps_of(load(bench, tables)) as made:
        entries = {"document_ids": torch.arange(64) // 16, "positions": torch.arange(64)}
        on_device = {name: entry.expand(2, -1).to(NAME) for name, entry in entries.items()}
        batches = [batch | on_device for batch in made.loader.next_step()]
        reset_waits()
        for step in range(2):
            made.stepper.gradients(batches, step)
        return dict(waits())


def test_the_plan_tells_of_waits_for_bounds_and_for_rows(bench: Bench) -> None:
    assert "the host waits" in DocumentChoice("varlen", "the fastest").reason
    assert DocumentChoice("mask", "the fastest").reason == "the fastest"
    plain = decoder(bench, model={"ffn": experts(8, 2, 64)}, train={"global_batch_size": 2, "device": NAME})
    of_plain, of_capped = on_device(
        choices_of_experts, bench, [plain, merged(plain, {"model": {"ffn": {"capacity_factor": 1.0}}})]
    )
    assert not any("waits" in why for why in of_plain)
    assert any("the host waits in every layer" in why for why in of_capped)


def choices_of_experts(bench: Bench, jobs: list[dict[str, Any]]) -> list[list[str]]:
    found = []
    for tables in jobs:
        with steps_of(load(bench, tables)) as made:
            found.append([why for what, _, why in made.run.outline.backend_choices if what == "experts"])
    return found


def test_a_device_without_statistics_of_memory_trains_and_names_no_peak(bench: Bench) -> None:
    train = {"device": NAME, "dry_run": "always", "steps": 1, "global_batch_size": 2, "precision": "fp32"}
    said, line = on_device(without_statistics, bench, decoder(bench, train=train))
    assert "went forward and backward" in said
    assert "peak" not in said + line


def without_statistics(bench: Bench, tables: dict[str, Any]) -> tuple[str, str]:
    said: list[str] = []
    del torch.get_device_module(NAME).memory_stats
    summary = Trainer(load(bench, tables), echo=said.append).run()
    return next(text for text in said if text.startswith("dry run: ")), (summary.folder / "metrics.jsonl").read_text()


def test_metrics_of_two_devices_make_one_line() -> None:
    """The gradient norm of offloaded parameters is on the host, the loss on the device."""
    assert on_device(one_line) == {"loss": 0.0, "grad_norm": 1.0}


def one_line() -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    tracker = Tracker(lines.append)
    tracker.put({}, {"loss": torch.zeros((), device=NAME), "grad_norm": torch.ones(())})
    assert waits() == {}
    tracker.flush()
    return lines[0]


def test_angles_of_positions_are_sent_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(rotary.torch, "tensor", lambda *a, make=torch.tensor, **k: sent.append(a) or make(*a, **k))
    encoding = rotary.Rotary([1.0, 0.123], amplitude=1.0, length=4, dtype=torch.float32)
    for _ in range(3):
        encoding(4, torch.arange(4)[None])
    assert len(sent) == 1


def test_the_mean_logit_sends_no_number_to_the_device() -> None:
    class Sends(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.ops.aten.lift_fresh.default, "a tensor is made of a number on the host"
            return func(*args, **(kwargs or {}))

    with Sends():
        mean, size = combine_mean(torch.ones(3), 4, None)
    assert mean.tolist() == [0.25] * 3
    assert size == 4


@pytest.fixture
def workspace_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("workspace_variable")
def test_deterministic_runs_set_what_cublas_needs_for_it(bench: Bench) -> None:
    with steps_of(load(bench, decoder(bench, train={"global_batch_size": 2, "deterministic": True}))):
        pass
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_attention_in_float32_on_cuda_has_a_key_for_every_query_head() -> None:
    """Else no kernel but the matrix of all pairs of positions takes it."""
    heads = {}

    class Look(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                heads[args[0].dtype] = args[1].shape[1]
                return args[0]
            return func(*args, **(kwargs or {}))

    for dtype in (torch.float32, torch.bfloat16):
        with FakeTensorMode(), torch.no_grad(), Look():
            q, k, v = (torch.empty(1, 8, count, 16, dtype=dtype, device="cuda") for count in (4, 2, 2))
            torch_attention(q, k, v, None)
    assert heads == {torch.float32: 4, torch.bfloat16: 2}
