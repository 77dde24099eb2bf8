"""One curve: every layout trains like one process. What is compared, and how closely, is in `curves.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layouts import (
    ALL_ROWS,
    FSDP_ALL_REDUCE,
    FSDP_SCATTER,
    NORM,
    ROWS,
    SUM,
    TIE,
    TP_COMPLETION,
    TP_SCATTER,
    TP_SUM,
    Row,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from forge_testing.curves import Curve, Difference, Training, train
from forge_testing.processes import run_on_ranks

FLOAT64 = 1e-9
WEIGHTS = 1e-7
FLOAT32 = 1e-5
SABOTAGED = list({(row.reduction, row.ranks): row for row in ROWS if "compile" not in row.stages}.values())
"""One row for each reduction and number of ranks. Compiled rows make the sums of others, and would be compiled a second
time."""
STEPS = 2
"""In float64; the table makes five. One more may be made without a reduction."""


class OwnPart:
    """In place of a reduce-scatter: each rank keeps its part of its own gradient."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def without(reduction: str, model: nn.Module) -> AbstractContextManager:
    """Within this context, one of the reductions of a model's layout is missing."""
    if reduction == FSDP_SCATTER:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(OwnPart())
        return nullcontext()
    if reduction == FSDP_ALL_REDUCE:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return mock.patch(f"{FSDPParamGroup.__module__}.FSDPParamGroup._all_reduce_process_group", alone)
    patches = {
        SUM: ("forge_core.parallel.stages.ReplicateStage.complete_gradients", lambda self, model: None),
        TP_COMPLETION: (
            "forge_plugin_parallel.tp_stage.TensorParallelStage.complete_gradients",
            lambda self, model: None,
        ),
        TIE: ("forge_plugin_parallel.pp_stage.PipelineParallelStage.complete_gradients", lambda self, model: None),
        NORM: ("forge_core.engine.step.mesh.pipeline_group", lambda mesh: None),
        TP_SUM: ("forge_plugin_parallel.collectives._summed", lambda x, group: x),
        TP_SCATTER: (
            "forge_plugin_parallel.collectives._scattered",
            lambda x, dim, group: x.chunk(group.size(), dim)[group.rank()].contiguous(),
        ),
    }
    return mock.patch(*patches[reduction])


Trained = tuple[Curve, float]
"""A curve, and the norm of the step after it: on ranks, without one of the layout's reductions."""


@pytest.fixture(scope="module")
def takes_out(request) -> bool:
    """Whether the session has tests of missing reductions."""
    items = [item for item in request.session.items if not item.get_closest_marker("skip")]
    return any(item.name.startswith("test_a_row_fails") for item in items)


@pytest.fixture(scope="module")
def curves(request, alone, takes_out, tmp_path_factory) -> Callable[[Row], list[Trained]]:
    """What each rank of a row computes. Those rows of the session that take equally many ranks are run by the same
    processes."""
    folder = str(tmp_path_factory.mktemp("runs"))
    items = [item for item in request.session.items if not item.get_closest_marker("skip")]
    cases = [item.callspec.params for item in items if hasattr(item, "callspec")]
    names = {case["row"].name for case in cases if isinstance(case.get("row"), Row)}
    found: dict[str, list[Trained]] = {}

    def both(row: Row, rank: int) -> Trained:
        with Training.of(row.on_rank(rank).job(folder, steps=STEPS + 1)) as training:
            curve = training.curve(STEPS)
            if not takes_out or row not in SABOTAGED:
                return curve, math.nan
            with without(row.reduction, training.run.model):
                return curve, training.norm(STEPS)

    def run(row: Row) -> list[Trained]:
        rows = [other for other in ROWS if other.ranks == row.ranks and (takes_out or other.name in names)]
        if row.name not in found:
            for other in rows:
                alone(other)  # here, so that ranks inherit what the models import
            ranks = run_on_ranks(row.ranks, lambda rank: [both(other, rank) for other in rows])
            found.update(zip([other.name for other in rows], map(list, zip(*ranks, strict=True)), strict=True))
        return found[row.name]

    return run


@pytest.fixture(scope="module")
def alone(takes_out, tmp_path_factory) -> Callable[[Row], Trained]:
    """The same job in one process."""
    folder = str(tmp_path_factory.mktemp("alone"))
    found: dict[tuple[object, ...], Trained] = {}

    def run(row: Row) -> Trained:
        key = (row.layers, row.ignored, row.tied, row.chunked, row.packed)
        key += (row.router, row.shared_gate, row.mtp, row.biases)
        if key not in found:
            with Training.of(row.job(folder, parallel=False, steps=STEPS + 1)) as training:
                found[key] = training.curve(STEPS), training.norm(STEPS) if takes_out else math.nan
        return found[key]

    return run


def test_rows_that_run_every_time_have_every_pair_of_the_table():
    ordinary = set().union(*(row.pairs for row in ALL_ROWS if not row.thorough))
    assert [row.name for row in ALL_ROWS if row.pairs - ordinary] == []


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.thorough] if row.thorough else []) for row in ROWS]
)
def test_a_layout_trains_like_one_process(curves, alone, row):
    ranks = [curve for curve, _ in curves(row)]
    difference = Difference.between(ranks[0], alone(row)[0])
    assert difference.initial == 0
    assert max(difference.loss, difference.norm, difference.gradient, difference.evaluation) < FLOAT64, difference
    assert difference.weights < WEIGHTS, difference
    for other in ranks[1:]:
        assert (other.losses, other.norms, other.evaluation) == (
            ranks[0].losses,
            ranks[0].norms,
            ranks[0].evaluation,
        ), "every rank reports the global numbers"


@pytest.mark.thorough
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in SABOTAGED])
def test_a_row_fails_without_one_of_its_reductions(curves, alone, row):
    """The norm is a function of all gradients, and the first test compares it: that it differs is enough."""
    (_, wrong), (_, right) = curves(row)[0], alone(row)
    assert abs(wrong - right) > 100 * FLOAT64, f"right without {row.reduction}"


def test_in_float32_losses_stay_together_for_five_steps(tmp_path):
    """One row of each kind here; `table.py` runs them all, for twenty steps."""
    rows = [row for row in ROWS if row.name in ("replicate2", "fsdp2", "tp2+sp", "cp2, ring", "pp2, 1f1b")]
    found = run_on_ranks(
        2,
        lambda rank: [train(r.job(str(tmp_path), precision="fp32", steps=5)).losses for r in rows],
    )
    for row, losses in zip(rows, found[0], strict=True):
        expected = train(row.job(str(tmp_path), parallel=False, precision="fp32", steps=5)).losses
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < FLOAT32, row.name
