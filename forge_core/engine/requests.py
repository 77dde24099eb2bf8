"""Requests to a run in training, by signals, hooks and the non-finite policy, and how ranks agree on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forge_core.contracts.contexts import Requests
from forge_core.launch.stop_requests import requests_to_stop
from forge_core.parallel.mesh import any_rank, gather_objects

if TYPE_CHECKING:
    from forge_core.checkpoint.saving import Saver
    from forge_core.checkpoint.state import Progress
    from forge_core.engine.build import Run
    from forge_core.job import TrainSection


@contextmanager
def stop_on_signals(requests: Requests) -> Iterator[None]:
    """While this context lasts, SIGINT, SIGTERM, SIGUSR1 and the launcher set `requests.stop`. Without effect outside
    the main thread."""

    def ask(reason: str) -> None:
        # Nothing else happens here: a signal comes at any point of a step, perhaps in the middle of a collective, and
        # on each rank at another. The ranks end together, where they agree.
        requests.stop = requests.stop or reason

    with requests_to_stop(ask):
        yield


class NonFinitePolicy:
    """Asks for the end of the run after too many skipped steps in a row (`train.non_finite`)."""

    def __init__(self, train: TrainSection, progress: Progress, requests: Requests) -> None:
        self._limit = 1 if train.non_finite == "stop" else train.non_finite_limit
        self._progress = progress
        self._requests = requests

    def follow(self, record: Mapping[str, Any]) -> None:
        """Count a step whose numbers have arrived on the host, which may be two steps after the update."""
        progress = self._progress
        progress.skipped += bool(record.get("skipped"))
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if record.get("skipped") else 0
        if progress.skipped_in_a_row >= self._limit and not self._requests.non_finite:
            row = f"{self._limit} step{'s' if self._limit > 1 else ''} in a row"
            self._requests.non_finite = f"loss or gradients were not finite for {row}, up to step {record['step']}"


class Agreement:
    """The one point of a step at which ranks agree on what was asked of any of them.

    Signals and hooks ask each rank at its own time. A rank that acted on that at once would leave the others waiting in
    their next collective; so a request that comes later, during an evaluation say, waits for the next step.
    """

    def __init__(self, run: Run, requests: Requests, saver: Saver) -> None:
        self._beacon = run.hooks.beacon
        self._alone = run.context.layout.world_size == 1
        self._requests = requests
        self._saver = saver
        self._agreed_to_end = False

    @property
    def ends_run(self) -> bool:
        """Whether all ranks have agreed to end; a process alone need not ask."""
        return self._requests.ends_run if self._alone else self._agreed_to_end

    def reach(self) -> bool:
        """Agree on whether to end, and return whether to save. Collective.

        Here ranks also learn that a checkpoint that is written in the background is there, once it is on every rank.

        Raises:
            CheckpointError: writing it failed, and `checkpoint.on_failure` does not let that pass.
        """
        self._beacon.enter("agreement of the ranks")
        requests = self._requests
        asked = [bool(requests.stop), requests.checkpoint, bool(requests.non_finite), self._saver.writing]
        stop, checkpoint, non_finite, writing = asked if self._alone else any_rank(asked)
        if stop:
            requests.stop = agreed_reason(requests.stop)
        if non_finite:
            requests.non_finite = agreed_reason(requests.non_finite)
        self._agreed_to_end = stop or non_finite
        if not writing:
            self._saver.settle()
        return checkpoint


def agreed_reason(own: str) -> str:
    """The reason of this rank for what was asked, or else that of the first rank that has one. Collective."""
    reasons = gather_objects(own)
    return own or next((f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason), "")
