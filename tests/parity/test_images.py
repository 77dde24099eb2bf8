"""One curve: every fusion trains under every layout like one process, and checkpoints move between them."""

from __future__ import annotations

import attrs
import pytest
from images import FUSIONS, IMAGE_ROWS, row

from forge_plugin_float8 import Float8
from forge_plugin_parallel import FSDP
from forge_testing.curves import Difference, train
from forge_testing.processes import run_on_ranks

STEPS = 3


@pytest.mark.parametrize(
    "layout",
    [pytest.param(row, id=f"{row.name}, {row.fusion}", marks=[pytest.mark.thorough] if row.thorough else [])
     for row in IMAGE_ROWS],
)  # fmt: skip
def test_a_layout_trains_like_one_process(tmp_path, layout):
    expected = train(layout.job(str(tmp_path), parallel=False, steps=STEPS))
    ranks = run_on_ranks(layout.ranks, lambda rank: train(layout.job(str(tmp_path), steps=STEPS)))
    difference = Difference.between(ranks[0], expected)
    assert difference.initial == 0
    assert max(difference.loss, difference.norm, difference.gradient, difference.evaluation) < 1e-11, difference
    assert difference.weights < 1e-9, difference
    for other in ranks[1:]:
        assert (other.losses, other.norms, other.evaluation) == (
            ranks[0].losses,
            ranks[0].norms,
            ranks[0].evaluation,
        ), "every rank reports the global numbers"


@pytest.mark.parametrize("fusion", FUSIONS)
def test_float8_under_fsdp_is_float8_of_one_process(tmp_path, fusion):
    stages = {"float8": Float8(recipe="rowwise_with_gw_hp")}  # which does not depend on which tokens go together
    alone = row("one process", 1, fusion, stages, "").job(str(tmp_path), precision="fp32", steps=STEPS)
    sharded = row("fsdp2", 2, fusion, {**stages, "fsdp": FSDP()}, "", micro_batch_size=2)
    losses = train(alone).losses
    assert losses[0] != train(attrs.evolve(alone, parallel={})).losses[0], "float8 rounds"
    [found, _] = run_on_ranks(2, lambda rank: train(sharded.job(str(tmp_path), precision="fp32", steps=STEPS)).losses)
    assert found[0] == pytest.approx(losses[0], rel=1e-6)
    assert found == pytest.approx(losses, rel=0.02), "later, the last bit of float32 decides between two of float8"


def test_every_fusion_and_every_pair_of_stages_is_in_the_table():
    assert {row.fusion for row in IMAGE_ROWS} == {"joint", "bidirectional", "cross_attention", "mot", "moma"}
    pairs = {frozenset(row.stages) for row in IMAGE_ROWS if len(row.stages) == 2}
    for pair in (
        ("fsdp", "tp"),
        ("fsdp", "pp"),
        ("fsdp", "cp"),
        ("tp", "pp"),
        ("tp", "cp"),
        ("pp", "cp"),
        ("fsdp", "ep"),
    ):
        assert frozenset(pair) in pairs
