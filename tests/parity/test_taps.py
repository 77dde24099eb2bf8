"""Taps see under a layout what they see in one process: each point and gradient, in float64.

A choice of `tests/benchmarks/taps_parity.py`, which has the whole table.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from attrs import evolve

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from taps_parity import CASES, differences, run_together

FLOAT64 = 1e-12
SHORT = {name: evolve(CASES[name], layers=2) for name in (
    "aot_eager",
    "tp2+sp",
    "cp2 ring, packed",
    "pp2 1f1b, ac, aot_eager",
    "fsdp2/ep2 x tp2",
    "tp2 x pp2",
    "fsdp2 x cp2",
)}  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """What each layout has stored, and each in one process."""
    folder = tmp_path_factory.mktemp("stores")
    cases = dict(SHORT)
    cases |= {str(case.kind): case.reference for case in SHORT.values()}
    cases["without taps"] = evolve(SHORT["aot_eager"], tapped=False)
    return run_together(cases, folder)


@pytest.mark.parametrize("name", SHORT)
def test_a_layout_stores_what_one_process_stores(stores, name):
    worst, wrong = differences(stores[name], stores[str(SHORT[name].kind)])
    assert wrong == []
    assert len(worst) > 20
    assert max(worst.values()) < FLOAT64, worst


def test_compiled_blocks_store_the_same_to_the_bit(stores):
    worst, _ = differences(stores["aot_eager"], stores[str(SHORT["aot_eager"].kind)])
    assert set(worst.values()) == {0}


def test_the_curve_is_that_without_taps_to_the_bit(stores):
    assert stores["aot_eager"].losses == stores["without taps"].losses


def test_sampled_and_other_steps_have_a_graph_each_for_all_layers(stores):
    assert stores["aot_eager"].graphs == [stores["without taps"].graphs[0] + 1]
