"""A file described by a format, with one look at it."""

from __future__ import annotations

import os
import stat

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.formats.auto import Auto
from forge_plugin_memmap.formats.kind import HEAD, Candidate, Surroundings, TokenFormat
from forge_plugin_memmap.remote import is_remote, read_range
from forge_plugin_memmap.shards import Shard, stamp_of

_EMPTY = "leave it out, or provide its data"


def read_shard(path: str, format: TokenFormat | None = None, surroundings: Surroundings | None = None) -> Shard:
    """Returns the shard in a file, which is opened once.

    Args:
        path: the file.
        format: its format; by default, that which recognises it.
        surroundings: the files beside it; by default, they are listed.

    Raises:
        JobError: it cannot be read, is not of the format, has no tokens, or its size does not fit.
    """
    surroundings = surroundings or Surroundings()
    try:
        if is_remote(path):
            return _described(_remote_candidate(path, surroundings), format)
        with open(path, "rb", buffering=0) as file:
            # Of the open file and not of the path, which may lead to another file by now
            status = os.fstat(file.fileno())
            # Before the header is read: that it is missing would be the less useful message
            if stat.S_ISREG(status.st_mode) and not status.st_size:
                raise JobError(f"{path} has no tokens; {_EMPTY}")
            head = file.read(HEAD)
        return _described(Candidate(path, head, stamp_of(status), surroundings), format)
    except OSError as error:
        # Another file than the one that was asked for may be the cause
        raise JobError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from error


def _remote_candidate(path: str, surroundings: Surroundings) -> Candidate:
    stamp = surroundings.listing.stamp(path)
    if not stamp[0]:
        raise JobError(f"{path} has no tokens; {_EMPTY}")
    return Candidate(path, read_range(path, 0, min(HEAD, stamp[0])), stamp, surroundings)


def _described(candidate: Candidate, format: TokenFormat | None) -> Shard:
    shard = (format or Auto()).resolve(candidate).shard(candidate)
    if not shard.tokens and shard.packed is None:
        raise JobError(f"{candidate.path} has no tokens; {_EMPTY}")
    return shard
