"""A run that goes through many layouts, each continuing with the checkpoint of the one before, is one run."""

from __future__ import annotations

from resharding import (
    FSDP2,
    FSDP2_PP2,
    FSDP2_TP2,
    FSDP4,
    HSDP,
    ONE,
    PP2,
    PP2_ZBV,
    TP2,
    TP2_CP2,
    TP4,
    compare,
    outcome,
    train,
)

CHAIN = [ONE, FSDP4, ONE, TP2, FSDP2, PP2, FSDP2_TP2, PP2_ZBV, FSDP2_PP2, TP4, HSDP, TP2_CP2, ONE]


def test_a_run_goes_on_exactly_under_every_layout(tmp_path):
    for number, layout in enumerate(CHAIN, 1):
        train(tmp_path / "chain", layout, number)
    train(tmp_path / "one", ONE, len(CHAIN))
    difference = compare(outcome(tmp_path / "chain"), outcome(tmp_path / "one"))
    assert difference.numbers < 1e-9, difference
    assert difference.state < 1e-9, difference
