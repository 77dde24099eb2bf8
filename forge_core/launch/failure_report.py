"""What a rank that fails has to say: over the socket to our launcher, and over the store to the other ranks."""

from __future__ import annotations

import json
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from attrs import asdict, frozen

from forge_core.contracts.errors import ExitCode, ForgeError, JobError

LONGEST = 60_000
"""Characters of a text that are passed on, the last ones: what a socket takes in one piece."""


@frozen(kw_only=True)
class LastWords:
    """Why a rank ends before the run does."""

    rank: int
    code: int
    text: str
    """For a person, complete: a traceback, or an error of ours in words."""
    time: float
    """On the monotonic clock of its machine."""
    echo: bool = False
    """Whether the rank ends only because another one does."""

    @property
    def bad_job(self) -> bool:
        return self.code == ExitCode.BAD_JOB

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> LastWords:
        return cls(**json.loads(text))


class EndedElsewhere(ForgeError):
    """Another rank has ended the run."""

    def __init__(self, words: LastWords) -> None:
        super().__init__(f"rank {words.rank} has ended the run")
        self.words = words


def words_for(rank: int, error: BaseException) -> LastWords:
    """The last words of a rank that fails with `error`."""
    if isinstance(error, EndedElsewhere):
        return echo_of(error.words, rank)
    now = time.monotonic()
    code = error.exit_code if isinstance(error, ForgeError) else ExitCode.FAILED
    return LastWords(rank=rank, code=int(code), text=describe(rank, error)[-LONGEST:], time=now)


def echo_of(words: LastWords, rank: int) -> LastWords:
    """The last words of a rank that ends because another one did."""
    text = f"forge-run: rank {rank}: rank {words.rank} has ended the run"
    return LastWords(rank=rank, code=words.code, text=text, time=time.monotonic(), echo=True)


def describe(rank: int, error: BaseException) -> str:
    """An error of ours in words, any other one as a traceback."""
    if isinstance(error, JobError):
        return str(error)
    if isinstance(error, ForgeError):
        return f"forge-run: rank {rank}: {error}"
    return f"forge-run: rank {rank} failed:\n{''.join(traceback.format_exception(error)).rstrip()}"


def speak(words: LastWords) -> None:
    """Say them where a person, or our launcher, hears them."""
    _speaker(words)


def speak_through(speaker: Callable[[LastWords], object]) -> None:
    """From now on, this process's last words go there; to standard error otherwise."""
    global _speaker
    _speaker = speaker


def _print(words: LastWords) -> None:
    if not words.echo:
        print(words.text, file=sys.stderr, flush=True)


_speaker: Callable[[LastWords], object] = _print


def send(launcher: socket.socket, words: LastWords) -> None:
    """To our launcher."""
    with suppress(OSError):  # it is dead
        launcher.sendall(words.to_json().encode() + b"\n")


def receive(rank: socket.socket) -> LastWords | None:
    """From a rank; None if it has said nothing."""
    rank.setblocking(False)
    parts = []
    with suppress(OSError):
        while part := rank.recv(1 << 16):
            parts.append(part)
    line, whole, _ = b"".join(parts).partition(b"\n")
    return LastWords.from_json(line) if whole else None
