"""Batches and sequences whose size changes within the run: one curve under every layout and number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from forge_core.engine.trainer import Summary, Trainer
from forge_plugin_moe import MoE, SoftmaxTopK
from forge_plugin_schedules import LengthSchedule, Piecewise
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, curves, job_problems, layouts, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, Training, same_curve
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase
from forge_testing.processes import run_on_ranks

STEPS, SEQ_LEN = 4, 16
DOUBLED = Piecewise(batch_sizes=(4, 8), start_tokens=(2 * 4 * SEQ_LEN,))
ATTENTION = GroupedQueryAttention(heads=4, kv_heads=2)
LAYOUTS = {
    **{name: layouts.LAYOUTS[name] for name in ("replicate2", "fsdp2", "tp2", "cp2", "traced")},
    # A schedule with two micro-batches, and then one with four
    "pp2": LayoutCase(ranks=2, parallel={"pp": {"degree": 2}}, micro_batch_size=2),
    "fsdp2_pp2": LayoutCase(ranks=4, parallel={"fsdp": {}, "pp": {"degree": 2}}, micro_batch_size=1),
}
MODELS = {
    "dense": Transformer(vocab_size=32, dim=16, layers=2, attention=ATTENTION),
    # Its balance loss is a mean over the sequences of a step, and so has to know how many these are
    "experts": Transformer(
        vocab_size=32,
        dim=16,
        layers=2,
        attention=ATTENTION,
        ffn=MoE(experts=4, hidden=16, router=SoftmaxTopK(top_k=2, sequence_balance=0.1)),
    ),
}


def job(folder: Path, changes: Mapping[str, Any], model: str = "dense") -> Any:
    settings: dict[str, Any] = {"steps": STEPS, "precision": "fp64", "global_batch_size": 8, "seq_len": SEQ_LEN}
    data = {"sources": (Numbers(ignored=3),)}
    settings |= {"model": MODELS[model], "data": data, "batch_schedule": DOUBLED}
    return tiny_job(str(folder), installed(), **{**settings, **changes})


def observe(model: str) -> Any:
    def train(folder: Path, changes: Mapping[str, Any]) -> Curve:
        return curves.train(job(folder, changes, model), installed())

    return train


def test_pieces_are_sequences_of_their_own(tmp_path: Path) -> None:
    """The first loss is that of each piece by itself: nothing sees the piece before it."""
    first, *_ = lengthened("dense")(tmp_path, {})
    with Training.of(job(tmp_path / "alone", {}), installed()) as training:
        [batch] = training.loader.next_step()
        pieces = [
            {name: batch[name][row : row + 1, start : start + 8] for name in ("input_ids", "labels")}
            for row in range(4)
            for start in (0, 8)
        ]
        output = training.run.executor.evaluate(pieces)
        whole = training.run.executor.evaluate([batch])
    assert first == pytest.approx((output.loss_sum / output.count).item(), rel=1e-12)
    assert abs(first / (whole.loss_sum / whole.count).item() - 1) > 1e-6


def trained(folder: Path, changes: Mapping[str, Any], model: str = "dense") -> Summary:
    return Trainer(job(folder, changes, model), catalog=installed(), echo=lambda text: None).run()


def lines(summary: Summary) -> list[dict[str, float]]:
    """The lines of steps."""
    every = map(json.loads, (summary.folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in every if "loss" in line]


def losses(summary: Summary) -> list[float]:
    return [line["loss"] for line in lines(summary)]


def lengthened(model: str) -> Any:
    """Numbers of the steps of a run whose sequences have 8 positions in two steps, and then 16."""

    def train(folder: Path, changes: Mapping[str, Any]) -> list[float]:
        hooks = {"longer": LengthSchedule(lengths=(8, 16), start_tokens=(2 * 4 * SEQ_LEN,))}
        summary = trained(folder, {**changes, "hooks": hooks}, model)
        names = ["loss", "grad_norm", *(["moe/sequence_balance"] if model == "experts" else [])]
        return [line[name] for line in lines(summary) for name in names]

    return train


def same_numbers(ranks: Sequence[list[float]], alone: list[float]) -> None:
    assert ranks[0] == pytest.approx(alone, rel=1e-11)


test_layouts = layout_law(
    Case("dense", observe=observe("dense"), compare=same_curve, layouts=LAYOUTS),
    Case("experts", observe=observe("experts"), compare=same_curve, layouts=("fsdp2_ep2",)),
    Case("longer", observe=lengthened("dense"), compare=same_numbers, layouts=LAYOUTS),
    Case("longer_experts", observe=lengthened("experts"), compare=same_numbers, layouts=("fsdp2_ep2",)),
)


def test_a_balance_is_a_mean_over_the_sequences_of_its_step(tmp_path: Path) -> None:
    """The first step is that of a run whose batches all have this size."""
    ours = lines(trained(tmp_path / "ours", {"steps": 1}, "experts"))[0]
    plain = {"steps": 1, "batch_schedule": None, "global_batch_size": 4}
    theirs = lines(trained(tmp_path / "plain", plain, "experts"))[0]
    names = ["loss", "grad_norm", "moe/sequence_balance", "tokens"]
    assert [ours[name] for name in names] == [theirs[name] for name in names]


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_run_goes_on_on_more_ranks_within_and_after_the_first_size(tmp_path: Path, stop_after: int) -> None:
    whole = trained(tmp_path / "whole", {})
    part = tmp_path / "part"
    trained(part, {"stop_after": stop_after})
    changes = {"parallel": {"fsdp": installed().load("parallel", "fsdp")()}}
    after, _ = run_on_ranks(2, lambda rank: losses(trained(part, changes)))
    assert after == pytest.approx(losses(whole), rel=1e-12)


def test_a_pipeline_is_checked_for_the_smallest_batch(tmp_path: Path) -> None:
    """Its schedule would take the later ones."""
    changes = {"parallel": {"pp": installed().load("parallel", "pp")(degree=2)}, "micro_batch_size": 4}
    [problem] = job_problems(job(tmp_path, changes), ranks=2)
    assert problem.startswith(
        "parallel.pp.schedule: 1f1b needs a micro-batch for each of the 2 stages, and there are 1"
    )
