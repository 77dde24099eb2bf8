"""The ranks' rendezvous, as one rank sees it when others fail or are not there."""

from __future__ import annotations

import pytest

from forge_core.launch.failure_report import EndedElsewhere, FailureReport
from forge_core.launch.rendezvous import RanksMissing, Rendezvous
from forge_core.launch.world import World
from forge_testing.refusals import naming

from .test_other_launchers import free_port


def rendezvous(rank, start_timeout_s):
    return Rendezvous(World(rank=rank, size=2, port=free_port()), start_timeout_s, hang_timeout_s=0)


@pytest.mark.parametrize("wait", [Rendezvous.meet, lambda store: store.wait_for("job", [1])])
def test_a_rank_that_waits_for_another_learns_that_the_run_has_ended(wait):
    store = rendezvous(0, 5)
    store.end(FailureReport(rank=1, code=7, text="the flux is out of bounds"))
    with pytest.raises(EndedElsewhere, match=naming("rank 1")) as caught:
        wait(store)
    assert caught.value.exit_code == 7


def test_a_rank_that_cannot_reach_the_first_names_its_address():
    with pytest.raises(RanksMissing, match=naming("rank 1", "127.0.0.1", "launch.start_timeout_s = 0 s")):
        rendezvous(1, 0)
