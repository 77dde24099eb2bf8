"""A process that is one rank of several, from its start to its exit code."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from forge_core.contracts.errors import ExitCode
from forge_core.launch import failure_report as last_words
from forge_core.launch.failure_report import LastWords, echo_of, words_for
from forge_core.launch.rank_log import RankLog
from forge_core.launch.stop_requests import open_for_process
from forge_core.launch.world import CONTROL, World

UNKNOWN_TIMEOUT_S = 120.0
"""How long a rank whose job cannot even be read tries to tell the others."""


class RankProcess:
    """This process as a rank: its log, its requests to stop, its last words."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.log = RankLog(world.rank)
        self._said = False
        descriptor = os.environ.get(CONTROL)
        self._launcher = socket.socket(fileno=int(descriptor)) if descriptor is not None else None

    def run(self, work: Callable[[RankLog], int]) -> NoReturn:
        """Do the work of this rank and end the process with the exit code that it gives. If it fails, the other ranks
        hear of it, and the first that fails tells why."""
        open_for_process(self._stop_before_training, self._launcher)
        last_words.speak_through(self._say)
        try:
            code = work(self.log)
        except BaseException as error:
            words = self._end_run(words_for(self.world.rank, error))
            self._write(error)
            self._say(words)
            self._exit(words.code)
        _take_leave()
        self._exit(code)

    def _end_run(self, words: LastWords) -> LastWords:
        """Tell the other ranks; gives this rank's words, as an echo if another one came first."""
        if words.echo:
            return words
        with suppress(Exception):  # whoever serves the store has gone
            meeting = _meeting() or self._join()
            first: LastWords = meeting.end(words) if meeting is not None else words
            return words if first.rank == words.rank else echo_of(first, self.world.rank)
        return words

    def _join(self) -> Any:
        """Our launcher sees by itself that a rank fails, so for that its ranks need not join the others."""
        if self._launcher is not None:
            return None
        from forge_core.launch.rendezvous import meet

        return meet(self.world, UNKNOWN_TIMEOUT_S, 0.0)

    def _write(self, error: BaseException) -> None:
        self.log.write(last_words.describe(self.world.rank, error))

    def _say(self, words: LastWords) -> None:
        """To our launcher, which chooses among the ranks; without it to the terminal, unless another rank was first.
        Only once: what is said later follows from it."""
        if self._said:
            return
        self._said = True
        if self._launcher is not None:
            last_words.send(self._launcher, words)
        elif not words.echo:
            print(words.text, file=self.log.terminal, flush=True)

    def _stop_before_training(self, reason: str) -> None:
        """A request to stop while nothing has been trained: there is nothing to save, and no need to go on."""
        text = f"forge-run: rank {self.world.rank} was asked to stop ({reason}) before training began"
        words = LastWords(rank=self.world.rank, code=ExitCode.STOPPED, text=text, time=time.monotonic())
        meeting = _meeting()
        if meeting is not None:
            with suppress(Exception):
                words = meeting.end(words)
        self.log.write(text)
        if meeting is not None and self._launcher is None:  # which would ask the others itself
            meeting.leave()
        os._exit(words.code)

    def _exit(self, code: int) -> NoReturn:
        """At once. Other ranks may be gone, and what torch does when the interpreter ends might wait for them. And a
        thread of gloo that lets go of a tensor then would abort the process."""
        meeting = _meeting()
        if meeting is not None:
            meeting.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take_leave() -> None:
    """What an interpreter does for Python code before it ends."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _meeting() -> Any:
    """The meeting of this process, if it has joined one; without the import of torch if it has not."""
    module = sys.modules.get("forge_core.launch.rendezvous")
    return module.current_meeting() if module else None
