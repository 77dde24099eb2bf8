"""Which documents a step removed or changed, and the records of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import orjson
from attrs import frozen
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

ORIGIN = "origin"
"""Key of the place where a document was first read: `file`, and `byte` of its line, decompressed, or its `row`."""
REASON = "filter_reason"
"""Key of a document's metadata in which datatrove's filters leave their reason."""
CHANGED = "changed"
"""Folder, next to the one of removed documents, of records of those from which a step has cut ranges."""
RANGES = "removed_ranges"
"""Key of a document's metadata in which a step leaves what it cut out: begin and end in characters."""


class Records:
    """A file of records of one step in one rank, which is open for writing."""

    def __init__(self, file: BinaryIO, stage: str, step: str) -> None:
        self._file = file
        self._head = {"stage": stage, "step": step}

    def add(self, id_: str, origin: Mapping[str, Any], reason: str = "", **more: Any) -> None:
        """Writes a line about a document.

        Args:
            id_: its id.
            origin: where it was read.
            reason: datatrove's, such as `gopher_short_doc`, of a removed one.
            more: further facts; empty ones are left out.
        """
        # 0 is a number of a cluster, and stays
        facts = {key: value for key, value in more.items() if value not in ("", None)}
        why = {"reason": reason} if reason else {}
        line = {"id": id_, **self._head, **why, "origin": origin, **facts}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


@frozen
class Removals:
    """Where a step of the pipeline records what it removes: `removed/00003-1-gopher_quality.jsonl`."""

    folder: str
    stage: str
    number: int
    """Place of the step in the table, from 1; 0: reading."""
    step: str

    @contextmanager
    def opened(self, rank: int, folder: str = "") -> Iterator[Records]:
        """The records of a rank, which replace what an earlier process has written and not finished.

        Args:
            rank: of the task.
            folder: a name next to the folder of removed documents, for records of others.
        """
        place = Path(self.folder).with_name(folder) if folder else Path(self.folder)
        place.mkdir(parents=True, exist_ok=True)
        with (place / f"{rank:05}-{self.number}-{self.step}.jsonl").open("wb") as file:
            yield Records(file, self.stage, self.step)


class _Reasons:
    """Takes the place of a filter's writer of removed documents, without which it does not note its reason."""

    def __enter__(self) -> _Reasons:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def write(self, document: Document, rank: int = 0) -> None:
        """Does nothing: `Accounted` records what does not come out of the step."""


class Accounted(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """A step of datatrove, with a record of documents that go in and do not come out, and counts of changed ones.

    Steps take documents in order and yield the objects that they keep, so a document was removed if the next one
    comes out first. Writers of removed documents are not used: some steps write documents to them that they keep,
    others have none.

    Args:
        step: of datatrove, one that removes or changes documents.
        removals: where to record.
        keys: metadata of a removed document that the record has, too.
        reason: of steps that give none; by default, their own name.
    """

    type = "filter"

    def __init__(self, step: PipelineStep, removals: Removals, keys: Iterable[str] = (), reason: str = "") -> None:
        super().__init__()
        self.step = step
        self.removals = removals
        self.keys = tuple(keys)
        self.reason = reason or removals.step
        self.name = removals.step
        if hasattr(step, "exclusion_writer"):
            step.exclusion_writer = _Reasons()

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yields what the step keeps."""
        # Documents that went in and have not come out, with their texts before the step
        waiting: deque[tuple[Document, str]] = deque()
        with self.removals.opened(rank) as removed, self._changes(rank) as changed:
            for document in self.step.run(_noted(data, waiting), rank, world_size):
                # By identity: ids and texts of two documents may be equal
                while waiting[0][0] is not document:
                    self._remove(*waiting.popleft(), removed)
                _, before = waiting.popleft()
                self.stat_update("documents", "kept")
                if before != document.text:
                    self.stat_update("changed")
                    self.stat_update("characters removed", value=len(before) - len(document.text))
                document.metadata.pop(REASON, None)
                if changed and (ranges := document.metadata.pop(RANGES, None)):
                    changed.add(document.id, document.metadata[ORIGIN], **{RANGES: ranges})
                yield document
            # The step has ended, so nothing more comes out
            for document, before in waiting:
                self._remove(document, before, removed)

    def _changes(self, rank: int) -> AbstractContextManager[Records | None]:
        # Only of steps that leave ranges in documents; texts before and after would be as large as the documents
        return self.removals.opened(rank, CHANGED) if getattr(self.step, "leaves_ranges", False) else nullcontext()

    def _remove(self, document: Document, before: str, removed: Records) -> None:
        metadata = document.metadata
        reason = metadata.get(REASON) or self.reason
        self.stat_update("documents", "removed", f"reason: {reason}")
        self.stat_update("characters removed", value=len(before))
        facts = {key: metadata[key] for key in self.keys if key in metadata}
        removed.add(document.id, metadata[ORIGIN], reason, characters=len(before), **facts)


def _noted(data: DocumentsPipeline, waiting: deque[tuple[Document, str]]) -> Iterator[Document]:
    for document in data:
        waiting.append((document, document.text))
        yield document
