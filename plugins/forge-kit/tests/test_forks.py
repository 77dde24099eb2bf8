"""The garbage collector around forks."""

from __future__ import annotations

import gc

import pytest

from forge_kit.tools.forks import collect_own_garbage, collector_paused
from forge_testing.processes import exit_code_of_fork


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_as_before_where_nothing_was_forked(enabled):
    def is_as_before():
        (gc.enable if enabled else gc.disable)()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled

    assert exit_code_of_fork(is_as_before, timeout=60) == 0


def test_a_fork_collects_its_own_garbage_and_no_other():
    class Ring:
        alive = 0

        def __init__(self):
            Ring.alive += 1
            self.itself = self

        def __del__(self):
            Ring.alive -= 1

    def collects():
        gc.disable()
        Ring()
        collect_own_garbage()
        Ring()
        gc.collect()
        assert gc.isenabled()
        assert Ring.alive == 1

    assert exit_code_of_fork(collects, timeout=60) == 0
