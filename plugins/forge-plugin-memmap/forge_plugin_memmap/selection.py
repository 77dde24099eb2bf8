"""Holding out every n-th document of others. D: documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge_core.contracts.data import Documents, identity_of
from forge_core.contracts.errors import JobError
from forge_kit.data.budgets import Verifiable
from forge_kit.data.cache import cached_folder, digest_of
from forge_kit.data.origins import HasOrigins, Origin
from forge_plugin_memmap.index import FORMAT, GROUP, map_file
from forge_plugin_memmap.manifest import HELD_OUT, SPLITS, TRAIN
from forge_plugin_memmap.shards import BLOCK


def split_documents(documents: Documents, every: int, identity: Any) -> SelectedDocuments:
    """Returns the documents without every n-th, starting with the first; these are its `held_out`.

    Args:
        documents: all documents.
        every: n.
        identity: identity of the documents, as plain JSON, which determines where they end.

    Raises:
        JobError: it is not known where documents end, or there is only one.
    """
    # The first document is held out, so none would be left to train on
    if len(documents.ends()) < 2:
        raise JobError(f"held_out_every = {every}, but there is a single document, which cannot be split")

    def make(folder: Path) -> Mapping[str, Any]:
        with ExitStack() as stack:
            files = {
                name: stack.enter_context((folder / name).open("wb")) for split in SPLITS for name in _names(split)
            }
            for parts in _parts(documents.ends(), every):
                for name, numbers in parts.items():
                    files[name].write(numbers.astype("<i8").tobytes())
        return {}

    folder = cached_folder(GROUP, digest_of("split", FORMAT, every, identity), make).path
    return SelectedDocuments(documents, folder, TRAIN, every, SelectedDocuments(documents, folder, HELD_OUT, every))


class SelectedDocuments:
    """Some documents of others, put one after the other; see `forge_core.contracts.data.Documents`.

    A run is a stretch of tokens that lie together in the others.
    """

    bytes_per_token: float | None = None
    """It is not known for documents one by one."""

    def __init__(
        self, documents: Documents, folder: Path, split: str, every: int, held_out: Documents | None = None
    ) -> None:
        """Select a split.

        Args:
            documents: all of them.
            folder: the files of both splits.
            split: which of the two this is.
            every: n, where every n-th document is held out.
            held_out: the other split.
        """
        self.held_out: Documents | None = held_out
        self.end_of_text = documents.end_of_text
        self._source = documents, folder, split, every
        self._documents = documents
        # Mapped, so that all processes of a machine share the pages
        self._starts, self._run_ends, self._ends = (map_file(folder / name) for name in _names(split))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Reads the tokens of each run from all documents; most reads are of one run."""
        return _joined([self._documents.tokens(*run) for run in self._runs(start, stop)], np.int64)

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        """Returns the masks of the runs, joined; None if the documents have none."""
        masks = [self._documents.learned(*run) for run in self._runs(start, stop)]
        known = [mask for mask in masks if mask is not None]
        return _joined(known, np.bool_) if len(known) == len(masks) else None

    def where(self, start: int, stop: int) -> str:
        """Returns the places in the original files, of each run."""
        return " and ".join(self._documents.where(*run) for run in self._runs(start, stop))

    def identity(self) -> str:
        """See `HasIdentity`. Where the files of the splits are does not matter."""
        documents, _, split, every = self._source
        return digest_of(identity_of(documents), split, every)

    def ends(self) -> np.ndarray:
        """Returns the ends of the selected documents in the selection, (D,) int64, mapped."""
        return self._ends

    def origins(self, numbers: np.ndarray) -> Sequence[Origin | None]:
        """See `forge_kit.data.origins.HasOrigins`: by the numbers of these documents among all."""
        if not isinstance(self._documents, HasOrigins):
            return [None] * len(numbers)
        _, _, split, every = self._source
        # Of every n documents the first is held out, and n - 1 follow it
        whole = numbers * every if split == HELD_OUT else numbers + numbers // (every - 1) + 1
        return self._documents.origins(whole)

    def verify(self) -> None:
        """See `forge_kit.data.budgets.Verifiable`: all documents of both splits."""
        if isinstance(self._documents, Verifiable):
            self._documents.verify()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy maps the files itself
        return SelectedDocuments, (*self._source, self.held_out)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where tokens [start, stop) lie in the others."""
        stop = min(stop, len(self))
        # The first run that ends after `start`
        number = int(np.searchsorted(self._run_ends, start, side="right"))
        while start < stop:
            before, end = int(self._run_ends[number - 1]) if number else 0, int(self._run_ends[number])
            place, count = int(self._starts[number]) + start - before, min(stop, end) - start
            yield place, place + count
            number, start = number + 1, start + count


def _names(split: str) -> tuple[str, str, str]:
    """Files: where runs start in the source, where they end in the selection, where its documents end."""
    return f"{split}.starts", f"{split}.run_ends", f"{split}.ends"


class _Passed(NamedTuple):
    """Tokens before the next block: of the source, and of each split."""

    source: int = 0
    train: int = 0
    held_out: int = 0


def _parts(ends: np.ndarray, every: int) -> Iterator[dict[str, np.ndarray]]:
    """The contents of each file, block by block."""
    passed = _Passed()
    for first in range(0, len(ends), BLOCK):
        block = np.asarray(ends[first : first + BLOCK])
        numbers = np.arange(first, first + len(block))
        starts = np.concatenate([[passed.source], block[:-1]])
        apart = numbers % every == 0
        train = passed.train + np.cumsum(np.where(apart, 0, block - starts))
        held_out = passed.held_out + np.cumsum(np.where(apart, block - starts, 0))
        # A run of training documents lies between two held-out ones, each of which has a number divisible by n.
        run_starts = starts[numbers % every == 1]
        run_ends = train[~apart & ((numbers % every == every - 1) | (numbers == len(ends) - 1))]
        yield dict(zip(_names(TRAIN), (run_starts, run_ends, train[~apart]), strict=True))
        yield dict(zip(_names(HELD_OUT), (starts[apart], held_out[apart], held_out[apart]), strict=True))
        passed = _Passed(int(block[-1]), int(train[-1]), int(held_out[-1]))


def _joined(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    # One run needs no copy
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, dtype)])
