"""Cached token files of a dataset that is read as a whole, or of its held-out part."""

from __future__ import annotations

import logging
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from attrs import frozen

from forge_core import report_progress
from forge_core.contracts.errors import ForgeError, JobError
from forge_kit.data.cache import CachedFolder, Progress, Verify, cached_folder, digest_of
from forge_kit.data.token_file import TokenFile, TokenFileWriter
from forge_kit.tools.forks import collect_own_garbage, collector_paused
from forge_plugin_huggingface.counts import RowCounts
from forge_plugin_huggingface.encoding import Encoded, Encoder, LeftOut, text_of
from forge_plugin_huggingface.part import SplitPart
from forge_plugin_huggingface.rows import SourceRow, TableRows, stream_rows
from forge_plugin_huggingface.source import DatasetSource, DescribedSource

if TYPE_CHECKING:
    from forge_core.contracts.data import Documents

logger = logging.getLogger(__name__)

FORMAT = 1
"""Part of the key: increase it when the same inputs result in other files."""
STEM = "tokens"
COUNTS = "row_counts"
"""Entry of the cache's manifest: the fields of `RowCounts`. Earlier versions wrote `counts`, without end-of-text."""
BATCH_ROWS = 256
"""Rows that are encoded at once."""
BATCHES_AHEAD = 4
"""Batches queued for each process."""

Batch = list[tuple[str, Encoded | LeftOut]]
"""Location and document of each row, or why it has none."""


class EncodedRows(TokenFile):
    """The documents of rows, with what became of the rows."""

    def __init__(self, stem: Path, held_out: Documents | None, identity: str, counts: RowCounts | None) -> None:
        """Map the files; see `TokenFile`. Caches of earlier versions have no counts."""
        super().__init__(stem, held_out, identity)
        self.counts = counts

    def describe(self) -> str:
        """See `HasDescription`; empty where the counts are not known."""
        return "" if self.counts is None else self.counts.describe()

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedRows, (self._stem, self.held_out, self._identity, self.counts)


@frozen
class DocumentSource:
    """A source and the encoder of its rows."""

    data: DescribedSource
    path: str
    encoder: Encoder
    vocab_size: int
    end_of_text: int
    processes: int = 1
    verify: Verify = "sizes"

    def documents(self, part: SplitPart, held_out: Documents | None = None) -> EncodedRows:
        """Returns the documents of a part, encoding them if the cache does not have them."""
        return self._opened(self._cached(part, "table", self._encode_table), held_out)

    def first_documents(self, part: SplitPart) -> EncodedRows:
        """Like `documents`, but reads a stream up to the part's limit. Rows are numbered file by file."""
        return self._opened(self._cached(part, "stream", self._encode_stream), None)

    def _opened(self, stored: CachedFolder, held_out: Documents | None) -> EncodedRows:
        counts = RowCounts(**stored.info[COUNTS]) if COUNTS in stored.info else None
        return EncodedRows(stored.path / STEM, held_out, stored.identity(STEM), counts)

    def _cached(self, part: SplitPart, how: str, encode: Callable[[SplitPart, int], Iterator[Batch]]) -> CachedFolder:
        fingerprint = self.data.fingerprints[part.split]
        key = digest_of("huggingface", FORMAT, how, fingerprint, part.key(), self.encoder.key())

        def make(folder: Path) -> Mapping[str, Any]:
            logger.info("tokenising %s", _name(self.path, part))
            return self._write(folder, encode, part)

        return cached_folder("tokens", key, make, self.verify, resumable=True, sums=True)

    def _write(
        self, folder: Path, encode: Callable[[SplitPart, int], Iterator[Batch]], part: SplitPart
    ) -> Mapping[str, Any]:
        """Encode a part into `folder`, continuing after an interrupted process. Returns the counts."""
        has_mask, progress = self.encoder.has_mask, Progress(folder)
        resume = progress.state.get(STEM)
        # A process of an earlier version may have left a state without counts
        counts, is_counted = RowCounts(**progress.state.get(COUNTS, {})), COUNTS in progress.state or resume is None
        rows: int = progress.state.get("rows", 0)
        # A chat's template may write the end-of-text after each turn.
        options = {"learned": has_mask, "may_contain_end": has_mask}
        with TokenFileWriter(folder / STEM, self.vocab_size, self.end_of_text, **options, resume=resume) as writer:
            for batch in encode(part, rows):
                for place, encoded in batch:
                    counts.add(encoded)
                    if isinstance(encoded, Encoded):
                        _add(writer, place, encoded)
                rows += len(batch)
                report_progress(f"{rows:,} rows tokenised")  # other ranks wait for this one
                if progress.is_due:
                    # Synced first: the state must not count rows that the disk does not have
                    progress.save({"rows": rows, STEM: writer.sync(), COUNTS: attrs.asdict(counts)})
        progress.finish()
        header = writer.header()
        if not header.documents:
            raise JobError(f"{_name(self.path, part)}: none of {rows} rows has {self.encoder.learns}{counts.reason()}")
        facts = {"documents": header.documents, "left_out": rows - header.documents, "tokens": header.tokens}
        return {**facts, COUNTS: attrs.asdict(counts)} if is_counted else facts

    def _encode_table(self, part: SplitPart, start: int) -> Iterator[Batch]:
        rows = TableRows(self.data.source.table(part.split), self.encoder.columns, _name(self.path, part))
        numbers = islice(part.numbers(len(rows)), start, None)
        return in_order(partial(self._read_and_encode, rows), _batched(numbers, BATCH_ROWS), self.processes)

    def _read_and_encode(self, rows: TableRows, numbers: Sequence[int]) -> Batch:
        return self._encode(rows.take(numbers))

    def _encode_stream(self, part: SplitPart, start: int) -> Iterator[Batch]:
        rows = stream_rows(self.data.source.stream(part.split), self.encoder.columns, _name(self.path, part))
        chosen = (row for file in range(rows.files) for _, row in rows.read(file, wanted=part.has))
        # In this process: rows of a stream arrive in order from one reader
        return map(self._encode, _batched(islice(chosen, start, part.limit or None), BATCH_ROWS))

    def _encode(self, rows: Sequence[SourceRow]) -> Batch:
        return list(zip((row.place for row in rows), self.encoder.encode(rows), strict=True))


def texts(source: DatasetSource, path: str, part: SplitPart, fields: Sequence[str], as_stream: bool) -> Iterator[str]:
    """Yields the texts of a part, each once: the fields of a row one after the other."""
    dataset = source.stream(part.split) if as_stream else source.table(part.split)
    rows = stream_rows(dataset, fields, _name(path, part))
    chosen = (row for file in range(rows.files) for _, row in rows.read(file, wanted=part.has))
    return (text for row in chosen if (text := "".join(text_of(row, field) for field in fields)))


def _add(writer: TokenFileWriter, place: str, document: Encoded) -> None:
    ids, learned, text_bytes, is_cut = document
    writer.add(place, ids, learned=learned, text_bytes=text_bytes, is_last=not is_cut)
    if is_cut:
        # By itself, the end is not learned: a document that goes on does not end here
        writer.add(place, (), learned=np.zeros(0, dtype=bool))


def in_order(work: Callable[[Any], Any], tasks: Iterator[Any], processes: int) -> Iterator[Any]:
    """Yields `work(task)` for each task, in order; `processes` work a few tasks ahead of the reader."""
    if processes == 1:
        yield from map(work, tasks)
        return
    fork = multiprocessing.get_context("fork")  # `work` is inherited, and need not be picklable
    with ProcessPoolExecutor(processes, fork, _set_work, (work,)) as pool:
        try:
            with collector_paused():
                pool.submit(int)  # the first task forks
            ahead = deque(pool.submit(_do_work, task) for task in islice(tasks, processes * BATCHES_AHEAD))
            while ahead:
                result = ahead.popleft().result()
                ahead.extend(pool.submit(_do_work, task) for task in islice(tasks, 1))
                yield result
        except BrokenProcessPool as error:
            fix = "start again, with fewer processes if memory ran out"
            raise ForgeError(f"a process that tokenises was killed, or ended unexpectedly; {fix}") from error


_work: Callable[[Any], Any]
"""The `work` of `in_order`, in each worker process."""


def _set_work(work: Callable[[Any], Any]) -> None:
    global _work
    collect_own_garbage()
    _work = work


def _do_work(task: Any) -> Any:
    return _work(task)


def _batched(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batch := list(islice(items, size)):
        yield batch


def _name(path: str, part: SplitPart) -> str:
    return f"{path!r}, split {part.split!r}"
