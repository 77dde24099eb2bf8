"""Batches and sequences whose size changes within the run: one curve under every layout and number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import frozen

from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.contexts import BuildContext
from forge_core.engine.trainer import Summary, Trainer
from forge_core.losses import CrossEntropy
from forge_plugin_moe import MoE, SoftmaxTopK
from forge_plugin_schedules import LengthSchedule, Piecewise
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, curves, job_problems, layouts, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, Training, same_curve
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import refuses

STEPS, SEQ_LEN = 4, 16
DOUBLED = Piecewise(batch_sizes=(4, 8), start_tokens=(2 * 4 * SEQ_LEN,))
ATTENTION = GroupedQueryAttention(heads=4, kv_heads=2)
LAYOUTS = {
    **{name: layouts.LAYOUTS[name] for name in ("replicate2", "fsdp2", "tp2", "cp2", "traced")},
    # A schedule with two micro-batches, and then one with four
    "pp2": LayoutCase(ranks=2, parallel={"pp": {"degree": 2}}, micro_batch_size=2),
    "fsdp2_pp2": LayoutCase(ranks=4, parallel={"fsdp": {}, "pp": {"degree": 2}}, micro_batch_size=1),
}


@frozen(kw_only=True)
class Whole(CrossEntropy):
    """A loss that is not of the next token."""

    predicts_next_token: ClassVar[bool] = False


class Lanes:
    """A stream of nothing."""

    is_packed, held_out, bytes_per_token, lanes = True, None, None, 4

    def read(self, lane: int, position: Any) -> Any:
        return iter(())


@frozen(kw_only=True)
class Streamed(DatasetComponent):
    """A source of lanes."""

    def build(self, context: BuildContext) -> Lanes:
        return Lanes()


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


def component(kind: str, name: str, **keys: Any) -> Any:
    return installed().load(kind, name)(**keys)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"parallel": {"taps": component("parallel", "taps", points=("layers.*.mlp_out",))}},
            "parallel.taps: counts rows in batches of one size; leave train.batch_schedule out, or this stage",
        ),
        (
            {"hooks": {"calibration": component("hook", "calibration")}},
            "hooks.calibration: times steps of one size; leave train.batch_schedule out, or this hook",
        ),
        (
            {
                "parallel": {"cp": component("parallel", "cp", degree=2)},
                "hooks": {"longer": LengthSchedule(lengths=(2, 16), start_tokens=(64,))},
            },
            "hooks.longer.lengths.0: with sequences of 2, parallel.cp: degree",
        ),
        (
            {"loss": Whole(), "hooks": {"longer": LengthSchedule(lengths=(8, 16), start_tokens=(64,))}},
            "hooks.longer: cuts rows into pieces, and the loss is one of whole rows",
        ),
    ],
)
def test_what_needs_equal_batches_or_whole_rows_is_refused(
    tmp_path: Path, changes: Mapping[str, Any], problem: str
) -> None:
    problems = job_problems(job(tmp_path, changes), ranks=2 if "cp" in changes.get("parallel", {}) else 1)
    assert any(each.startswith(problem) for each in problems), problems


def test_a_stream_needs_batches_of_one_size(tmp_path: Path) -> None:
    """Its lanes are rows of every batch."""
    with refuses("data.sources.0", "is a stream, whose lanes need batches of one size"):
        trained(tmp_path, {"data": {"sources": (Streamed(),)}})


def test_a_pipeline_is_checked_for_the_smallest_batch(tmp_path: Path) -> None:
    """Its schedule would take the later ones."""
    changes = {"parallel": {"pp": installed().load("parallel", "pp")(degree=2)}, "micro_batch_size": 4}
    [problem] = job_problems(job(tmp_path, changes), ranks=2)
    assert problem.startswith(
        "parallel.pp.schedule: 1f1b needs a micro-batch for each of the 2 stages, and there are 1"
    )
