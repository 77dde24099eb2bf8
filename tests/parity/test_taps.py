"""Taps see under a layout what they see in one process: each point and gradient, in float64.

A choice of `tests/benchmarks/taps_parity.py`, which has the whole table.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from attrs import evolve

from forge_plugin_compile import Compile

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from taps_parity import CASES, FULL, differences, run_together

FLOAT64 = 1e-12
COMPILED = "ac full, aot_eager"
PIPELINE = evolve(CASES["pp2 1f1b"], layers=2)
SHORT = {name: evolve(CASES[name], layers=2) for name in ("tp2+sp", "cp2 ring, packed")}
SHORT |= {name: evolve(CASES[name], layers=2) for name in ("fsdp2/ep2 x tp2", "tp2 x pp2", "fsdp2 x cp2")}
# With whole batches, as one process has them, so that all bits can be equal.
SHORT[COMPILED] = evolve(CASES[COMPILED], layers=2, micro_batch_size=0)
SHORT["pp2 1f1b, ac"] = evolve(PIPELINE, stages={**PIPELINE.stages, "activation_checkpointing": FULL})
# The graphs that `COMPILED` divides into forward and backward, undivided: that takes two thirds of the time.
SHORT["pp2 1f1b, eager"] = evolve(PIPELINE, stages={**PIPELINE.stages, "compile": Compile(backend="eager")})


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """What each layout has stored, and each in one process."""
    folder = tmp_path_factory.mktemp("stores")
    cases = dict(SHORT)
    cases |= {str(case.kind): case.reference for case in SHORT.values()}
    cases["without taps"] = evolve(SHORT[COMPILED], tapped=False)
    return run_together(cases, folder)


@pytest.mark.parametrize("name", SHORT)
def test_a_layout_stores_what_one_process_stores(stores, name):
    worst, wrong = differences(stores[name], stores[str(SHORT[name].kind)])
    assert wrong == []
    assert len(worst) > 20
    assert max(worst.values()) < FLOAT64, worst


def test_compiled_blocks_store_the_same_to_the_bit(stores):
    worst, _ = differences(stores[COMPILED], stores[str(SHORT[COMPILED].kind)])
    assert set(worst.values()) == {0}


def test_the_curve_is_that_without_taps_to_the_bit(stores):
    assert stores[COMPILED].losses == stores["without taps"].losses


def test_sampled_and_other_steps_have_a_graph_each_for_all_layers(stores):
    assert stores[COMPILED].graphs == [stores["without taps"].graphs[0] + 1]
