"""How long a rank may stand still in its phase: as the run itself has shown, where work takes as long each time."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

from forge_core.contracts.phase import Phase
from forge_core.launch import watchdog
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.launch.world import World
from forge_testing.refusals import lacks

LEAST_S, LOOKED_S = 1.0, 1.5


class TwoRanks:
    """The connection of rank 0 of two; the other one has always stood still for long."""

    world, hang_timeout_s, heartbeat_s, silence_s = World(rank=0, size=2), 1000.0, 0.05, 1000.0

    def __init__(self):
        self.beats, self.report, self.found = {}, None, threading.Event()

    def set(self, topic, value):
        other = {"number": value["number"], "host": "gpu02", "count": 9, "step": 6, "phase": "data", "waits": True}
        self.beats = {0: value, 1: other | {"idle_s": 99.0, "left_s": -1.0, "detail": ""}}

    def get(self, topic, ranks):
        return {rank: self.beats[rank] for rank in ranks}

    def ending(self):
        return None

    def end(self, report):
        self.report = report
        self.found.set()
        return report


@pytest.fixture
def rank(monkeypatch):
    """A rank that has made six steps, and its connection."""
    monkeypatch.setattr(watchdog, "LEAST_S", LEAST_S)
    monkeypatch.setattr(watchdog, "SILENCE_S", 0.1)
    monkeypatch.setattr(watchdog.Watchdog, "_end", lambda self, report, patience_s: self._stopped.set())
    beacon, rendezvous = ProgressBeacon(), TwoRanks()
    for step in range(1, 7):
        for phase in (Phase.DATA, Phase.FORWARD_BACKWARD, Phase.OPTIMIZER):
            beacon.enter(phase, step)
    watching = watchdog.Watchdog(rendezvous, beacon, lambda report: None, factor=10.0)
    yield beacon, rendezvous
    watching.stop()


def wait_until(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def test_a_phase_that_only_computes_is_ended_after_many_times_its_longest(rank):
    beacon, rendezvous = rank
    beacon.enter(Phase.FORWARD_BACKWARD, 7)
    assert rendezvous.found.wait(30)
    assert not lacks(rendezvous.report.text, "launch.hang_factor", Phase.FORWARD_BACKWARD)
    assert rendezvous.report.hang


def test_a_phase_that_took_long_before_may_take_longer_yet(rank):
    beacon, rendezvous = rank
    beacon.enter(Phase.FORWARD_BACKWARD, 7)
    # By the watch's own time, which passes more slowly on a busy machine.
    wait_until(lambda: rendezvous.beats[0]["idle_s"] >= LEAST_S / 5)
    beacon.enter(Phase.OPTIMIZER)
    wait_until(lambda: rendezvous.beats[0]["phase"] == Phase.OPTIMIZER)
    beacon.enter(Phase.FORWARD_BACKWARD, 8)
    assert not rendezvous.found.wait(LOOKED_S)


@pytest.mark.parametrize("phase", [Phase.DATA, Phase.SAVE, Phase.EVALUATION, Phase.HOOK])
def test_phases_that_read_write_or_do_what_a_hook_does_may_take_long_in_any_step(rank, phase):
    beacon, rendezvous = rank
    for step in range(7, 13):
        beacon.enter(Phase.OPTIMIZER, step)
        beacon.enter(phase, step)
    assert not rendezvous.found.wait(LOOKED_S)


def test_the_first_occurrences_of_a_phase_may_take_as_long_as_they_like(rank):
    beacon, rendezvous = rank
    for step in range(7, 10):
        beacon.enter(Phase.AGREEMENT, step)
    assert not rendezvous.found.wait(LOOKED_S)


def test_a_compilation_in_any_step_is_no_hang_and_teaches_nothing(rank):
    beacon, rendezvous = rank
    compiling = []

    def slow(graph, inputs):
        compiling.append(watchdog.compiles(sys._getframe()))
        time.sleep(LOOKED_S)
        return lambda *given: (compiling.append(watchdog.compiles(sys._getframe())), graph(*given))[1]

    beacon.enter(Phase.FORWARD_BACKWARD, 7)
    torch.compile(lambda x: x + 1, backend=slow)(torch.ones(3))
    assert not rendezvous.found.is_set()
    assert compiling == [True, False], "while it compiles, and not while what was compiled runs"
    beacon.enter(Phase.FORWARD_BACKWARD, 8)
    assert rendezvous.found.wait(30)
