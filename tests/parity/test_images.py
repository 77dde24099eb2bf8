"""One curve: every fusion trains under every layout like one process, and checkpoints move between them."""

from __future__ import annotations

import pytest
from images import IMAGE_ROWS

from forge_testing.curves import Difference, train
from forge_testing.processes import run_on_ranks

STEPS = 3


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=f"{row.name}, {row.fusion}", marks=[pytest.mark.thorough] if row.thorough else [])
     for row in IMAGE_ROWS],
)  # fmt: skip
def test_a_layout_trains_like_one_process(tmp_path, row):
    expected = train(row.job(str(tmp_path), parallel=False, steps=STEPS))
    ranks = run_on_ranks(row.ranks, lambda rank: train(row.job(str(tmp_path), steps=STEPS)))
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


def test_every_fusion_and_every_pair_of_stages_is_in_the_table():
    assert {row.fusion for row in IMAGE_ROWS} == {"joint", "cross_attention", "mot", "moma"}
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
