"""Ranks that find different images neither wait for each other for ever nor train another model."""

from __future__ import annotations

import os

import pytest
from kept_runs import EPOCH, Outcome, run

from forge_plugin_parallel import FSDP, PipelineParallel, TensorParallel
from forge_plugin_vision.features import Features
from forge_testing.processes import run_on_ranks

LAYOUTS = {
    "replicate2": {},
    "fsdp2": {"parallel": {"fsdp": FSDP()}, "micro_batch_size": 1},
    "fsdp2, prefetch": {"parallel": {"fsdp": FSDP(prefetch=2)}},
    "tp2": {"parallel": {"tp": TensorParallel(degree=2)}},
    "pp2": {"parallel": {"pp": PipelineParallel(degree=2)}, "micro_batch_size": 2},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By rank and layout: a run without features, then one whose first rank finds all images, and the second none."""
    folder = tmp_path_factory.mktemp("runs")

    def both(rank: int) -> dict[str, tuple[Outcome, Outcome]]:
        pairs = {}
        for name, settings in LAYOUTS.items():
            label = name.replace(", ", "-")
            plain = run(folder, f"{label}-plain", steps=EPOCH, **settings)
            # Each rank has a disk of its own. The first one's has what one process has made.
            os.environ["FORGE_CACHE"] = str(folder / "alone" if rank == 0 else folder / label)
            kept = run(folder, f"{label}-kept", features=Features(), steps=EPOCH, **settings)
            pairs[name] = (plain, kept)
        return pairs

    os.environ["FORGE_CACHE"] = str(folder / "alone")
    try:
        run(folder, "alone", features=Features(), steps=EPOCH)
        return run_on_ranks(2, both)
    finally:
        del os.environ["FORGE_CACHE"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_that_finds_all_images_trains_beside_one_that_finds_none(outcomes, name):
    for rank in outcomes:
        plain, kept = rank[name]
        assert plain.equals(kept)


def test_each_rank_looks_after_itself_where_nothing_is_gathered(outcomes):
    (_, first), (_, second) = (rank["replicate2"] for rank in outcomes)
    assert not any(first.tower_rows)
    assert all(second.tower_rows)


def test_ranks_that_gather_the_tower_run_it_together(outcomes):
    """And a rank that lacks nothing runs it on one row."""
    (_, first), (_, second) = (rank["fsdp2, prefetch"] for rank in outcomes)
    assert first.tower_rows == [[1]] * EPOCH
    assert [len(calls) for calls in second.tower_rows] == [1] * EPOCH
    assert all(0 < hits < 1 for hits in first.hits)
    assert first.hits == second.hits
