"""`replace_rows`: a step on other rows than those that were drawn."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from forge_core import ForgeError, Trainer, TrainingHook
from forge_core.data.loader import TrainLoader
from forge_core.engine.step import Stepper
from forge_kit.nn.batches import replace_rows
from forge_testing import Numbers, SplittableModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.laws import Case, layout_law
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming


class Doubled(TrainingHook):
    """Rows whose tokens are twice those that were drawn, with the fewer labels the later the step."""

    def on_step_begin(self, context: Any) -> None:
        rows = []
        for batch in context.batches:
            labels = (2 * batch["labels"] % 32).where(batch["labels"] >= 0, -100)
            labels[:, : context.step] = -100
            rows.append({"input_ids": 2 * batch["input_ids"] % 32, "labels": labels})
        replace_rows(context, rows)


def losses(folder: Any, changes: Any, *hooks: TrainingHook) -> list[float]:
    settings: dict[str, Any] = {"model": SplittableModel(), "precision": "fp64", "global_batch_size": 8, "seq_len": 16}
    job = tiny_job(str(folder), installed(), **{**settings, **changes})
    summary = Trainer(job, hooks=hooks, catalog=installed(), echo=lambda line: None).run()
    lines = map(json.loads, (summary.folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def same(ranks: list[list[float]], alone: list[float]) -> None:
    assert ranks[0] == pytest.approx(alone, rel=1e-12)


test_layouts = layout_law(
    Case(
        "replaced rows",
        observe=lambda folder, changes: losses(folder, changes, Doubled()),
        compare=same,
        layouts=("fsdp2", "tp2", "pp2"),
    )
)


def test_the_loss_is_that_of_the_rows_which_were_given(build, tmp_path):
    """And the next step's data are those that follow: only the first step's loss is known without training."""
    [first, *_] = losses(tmp_path / "replaced", {}, Doubled())
    assert first != losses(tmp_path / "drawn", {})[0]
    job = tiny_job(
        str(tmp_path), installed(), model=SplittableModel(), precision="fp64", global_batch_size=8, seq_len=16
    )
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    batches = loader.next_step()
    loader.close()
    for batch in batches:
        batch["labels"] = (2 * batch["labels"] % 32).where(batch["labels"] >= 0, -100)
        batch["labels"][:, :1] = -100
        batch["input_ids"] = 2 * batch["input_ids"] % 32
    _, sums = Stepper(run).gradients(batches, 0)
    assert first == pytest.approx((sums["loss_sum"] / sums["count"]).item(), rel=1e-12)


class Wrong(TrainingHook):
    def __init__(self, change: Any) -> None:
        self.change = change

    def on_step_begin(self, context: Any) -> None:
        replace_rows(context, self.change([dict(batch) for batch in context.batches]))


def shorter(batches: Any) -> Any:
    return [{name: entry[:, :8] for name, entry in batch.items() if entry.ndim == 2} for batch in batches]


def fewer(batches: Any) -> Any:
    return batches[:-1]


def apart(batches: Any) -> Any:
    """Other rows on each rank, where `tp` ranks share them."""
    return [{**batch, "input_ids": batch["input_ids"] + torch.distributed.get_rank()} for batch in batches]


@pytest.mark.parametrize("change", [shorter, fewer])
def test_rows_that_do_not_fit_are_refused(tmp_path, change):
    with pytest.raises(ForgeError, match=naming("replace_rows", "rank 0", "(2, 16)")):
        losses(tmp_path, {"micro_batch_size": 2}, Wrong(change))


def test_ranks_that_share_rows_must_give_the_same_ones(tmp_path, catalog):
    def train(rank: int) -> str:
        from forge_plugin_parallel import TensorParallel

        changes = {"parallel": {"tp": TensorParallel(degree=2)}, "data": {"sources": (Numbers(),)}}
        try:
            losses(tmp_path, changes, Wrong(apart))
        except ForgeError as error:
            return str(error)
        return ""

    for message in run_on_ranks(2, train):
        assert "replace_rows: rank 1" in message
