"""Finds what cannot be decoded before a run meets it: `forge-run check --decode`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from attrs import define, frozen

from forge_core.contracts.errors import ForgeError, JobError, Problem
from forge_kit.data.budgets import sources_to_read

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.job import Job
    from forge_core.plugins.catalog import Catalog

CHUNK = 16
"""Documents that a worker gets at once."""
AHEAD = 2
"""Chunks that wait for each worker, which bounds the memory of the command."""
REPORT_S = 5.0
"""Seconds between two lines of progress."""


class DecodableDocuments(Protocol):
    """Documents that consist of encoded files; it can be pickled to worker processes."""

    def __len__(self) -> int: ...

    def damage(self, number: int) -> Sequence[str]:
        """Decode all of a document, one file at a time; returns where and why each of them cannot be read."""


@frozen(kw_only=True)
class Decodable:
    """What a source has to decode, and what training does with documents that cannot be read."""

    documents: DecodableDocuments
    key: str
    """The source's key that sets what happens to damaged documents."""
    allowed: float
    """Share of the documents that may be damaged; 0: none."""


@runtime_checkable
class HasDecodable(Protocol):
    """A dataset component whose documents have encoded files."""

    def decodable(self, context: BuildContext) -> Decodable | None:
        """Returns them; None: they can only be read in order, as in a stream.

        Args:
            context: as for `build`, with the tokenizer.

        Raises:
            JobError: the source cannot be opened.
        """


@define
class Damage:
    """Of a source."""

    documents: int = 0
    """That were decoded."""
    damaged: int = 0
    """Documents of which something cannot be read."""

    def problem(self, decodable: Decodable) -> Problem | None:
        """Returns why training would refuse the source; None: it would not."""
        if self.damaged <= decodable.allowed * self.documents:
            return None
        message = f"{self.damaged:,} of {self.documents:,} documents cannot be read"
        allowed = f"; {decodable.allowed:.2%} may be left out" if decodable.allowed else ""
        return Problem(decodable.key, f"{message}{allowed}; repair those listed above, or allow more to be left out")


def decode_sources(
    job: Job,
    catalog: Catalog,
    workers: int,
    *,
    name_damage: Callable[[str, str], None],
    progress: Callable[[str], None],
) -> Iterator[tuple[str, Damage | None]]:
    """Yields the name of each source that has files to decode, when it is decoded; None: it is a stream.

    Args:
        job: the job.
        catalog: for its components.
        workers: processes that decode; 0: this one.
        name_damage: called with the source and the message of each file that cannot be read, in order.
        progress: called with a line every few seconds.

    Raises:
        JobError: a source cannot be opened, or more of its documents are damaged than training allows. All sources are
            decoded before.
    """
    problems = []
    for number, (name, source, context) in enumerate(sources_to_read(job, catalog)):
        if not isinstance(source, HasDecodable):
            continue
        try:
            decodable = source.decodable(context)
        except JobError as error:
            raise JobError(problem.below(f"data.sources.{number}") for problem in error.problems) from error
        if decodable is None:
            yield name, None
            continue
        damage, last = Damage(), time.monotonic()
        for messages in damage_of(decodable.documents, workers):
            damage.documents += 1
            damage.damaged += bool(messages)
            for message in messages:
                name_damage(name, message)
            if time.monotonic() - last > REPORT_S:
                last = time.monotonic()
                progress(f"source {name}: {damage.documents:,} of {len(decodable.documents):,} documents decoded")
        problem = damage.problem(decodable)
        problems += [] if problem is None else [problem.below(f"data.sources.{number}")]
        yield name, damage
    if problems:
        raise JobError(problems)


def damage_of(documents: DecodableDocuments, workers: int) -> Iterator[Sequence[str]]:
    """Yields the messages that `damage` returns for each document, in order.

    Raises:
        ForgeError: a worker process ended.
    """
    if not workers:
        yield from (documents.damage(number) for number in range(len(documents)))
        return
    waiting: deque[Future[list[Sequence[str]]]] = deque()
    # Spawned: libraries that decode have threads, which a fork would copy in mid-flight.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _start, (documents,)) as pool:
        try:
            for start in range(0, len(documents), CHUNK):
                numbers = range(start, min(start + CHUNK, len(documents)))
                waiting.append(pool.submit(_damage, numbers))
                # The oldest first: messages come in the order of the documents
                if len(waiting) > AHEAD * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            hint = "a decoder crashed, or memory ran out: try fewer --workers"
            raise ForgeError(f"a worker process ended unexpectedly; {hint}") from error
        except BaseException:
            # Without waiting: after Ctrl-C, chunks that have begun may take minutes
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def default_workers() -> int:
    """Returns the cores that this process may use; 0 for one, which needs no other process."""
    cores = len(os.sched_getaffinity(0))
    return 0 if cores == 1 else cores


# --- in a worker process -----------------------------------------------------------------------------------------


# A global of the process: documents are sent once, and not with each chunk
class _Worker:
    documents: ClassVar[DecodableDocuments]


def _start(documents: DecodableDocuments) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles it
    _Worker.documents = documents


def _damage(numbers: range) -> list[Sequence[str]]:
    return [_Worker.documents.damage(number) for number in numbers]
