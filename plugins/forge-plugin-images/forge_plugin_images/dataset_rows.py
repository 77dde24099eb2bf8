"""From a dataset's keys to its rows: the index, the split, and the documents that are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_images.dataset import ChosenDocuments, ImageRows, Tolerance
from forge_plugin_images.index import entries_of, stored_index
from forge_plugin_images.rows import Needs, RowFormat

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_kit.data.cache import CachedFolder
    from forge_plugin_images.documents import ImageDocuments
    from forge_plugin_images.file_dataset import FileDataset
    from forge_plugin_images.source import DocumentDataset


def image_rows(keys: FileDataset, context: BuildContext, documents: ImageDocuments) -> ImageRows:
    """Returns the training rows, with the held-out ones.

    Raises:
        JobError: a record does not match the job, or documents are broken or too long and must not be left out.
    """
    measured = MeasuredDocuments.of(keys, context, documents)
    is_held_out = _held_out(keys, documents)
    return measured.part(~is_held_out, measured.part(is_held_out) if is_held_out.any() else None)


def all_rows(keys: DocumentDataset, context: BuildContext, documents: ImageDocuments) -> ImageRows:
    """Returns rows of all documents; raises as `image_rows`."""
    return MeasuredDocuments.of(keys, context, documents).part(np.ones(len(documents), bool))


def row_format(context: BuildContext, documents: ImageDocuments) -> RowFormat:
    """Returns the shape of the rows of a job."""
    return RowFormat(
        length=context.job.train.seq_len,
        patches=documents.seen.patches_per_sequence,
        images=documents.seen.images_per_sequence,
        values=documents.seen.format.values,
        filler=documents.tokenizer.end_of_text,
        keeps_apart=context.job.data.packing.isolates,
    )


@frozen
class MeasuredDocuments:
    """Documents, with all that makes rows of a part of them."""

    documents: ImageDocuments
    index: CachedFolder
    rows: RowFormat
    tolerance: Tolerance

    @classmethod
    def of(cls, keys: DocumentDataset, context: BuildContext, documents: ImageDocuments) -> MeasuredDocuments:
        """Measure documents, or read their measurements from the cache; raises as `image_rows`."""
        index, rows = stored_index(documents, keys.skips_unreadable), row_format(context, documents)
        entries = entries_of(index.path)
        # Broken documents have entries of 0, so the check of room does not see them.
        _check_broken(keys, entries)
        if keys.too_long == "stop":
            _check_room(documents, entries, rows.room)
        return cls(documents, index, rows, Tolerance(keys.skips_unreadable, keys.max_unreadable, len(entries)))

    def part(self, wanted: np.ndarray, held_out: ImageRows | None = None) -> ImageRows:
        """Returns rows of the wanted documents, (documents,) bool."""
        selection = _select(entries_of(self.index.path), wanted, self.rows.room)
        return ImageRows(self.documents, self.index, selection, self.rows, self.tolerance, held_out)


def _select(entries: np.ndarray, wanted: np.ndarray, room: Needs) -> ChosenDocuments:
    """Returns the wanted documents (documents,) bool that can be learned from."""
    fits, learned, broken = _fits(entries, room), entries["labels"] > 0, entries["broken"]
    return ChosenDocuments(
        numbers=np.flatnonzero(wanted & fits & learned & ~broken),
        unlearned=int((wanted & ~learned & ~broken).sum()),
        too_long=int((wanted & ~fits).sum()),
        cut=int((wanted & entries["cut"]).sum()),
        broken=int((wanted & broken).sum()),
    )


def _fits(entries: np.ndarray, room: Needs) -> np.ndarray:
    return np.all([entries[name] <= most for name, most in room._asdict().items()], axis=0)


def _check_broken(keys: DocumentDataset, entries: np.ndarray) -> None:
    if (broken := int(entries["broken"].sum())) > keys.max_unreadable * len(entries):
        message = f"{broken} of {len(entries)} documents have images or videos that cannot be read"
        hint = "repair them (they are named in the log), or allow more"
        raise JobError([Problem("max_unreadable", f"{keys.max_unreadable}, but {message}; {hint}")])


def _check_room(documents: ImageDocuments, entries: np.ndarray, room: Needs) -> None:
    """Raise for documents that no row has room for; names the first, and what would be enough."""
    too_long = np.flatnonzero(~_fits(entries, room))
    if not len(too_long):
        return
    number = int(too_long[0])
    needs = ", ".join(
        f"{entries[name][number]} {name} (a row has {most}, the most needed is {entries[name].max()})"
        for name, most in room._asdict().items()
        if entries[name].max() > most
    )
    message = f"{len(too_long)} of {len(entries)} documents do not fit into a row"
    place = documents.record(number).place
    hint = f'{_remedy(entries, room)}, or set too_long to "cut" or "skip"'
    raise JobError([Problem("too_long", f"{message}; {place} has {needs}; {hint}")])


def _remedy(entries: np.ndarray, room: Needs) -> str:
    keys = {
        "positions": "train.seq_len",
        "patches": "model.vision.patches_per_sequence",
        "images": "model.vision.images_per_sequence",
    }
    return "raise " + " and ".join(keys[name] for name, most in room._asdict().items() if entries[name].max() > most)


def _held_out(keys: FileDataset, documents: ImageDocuments) -> np.ndarray:
    """Returns (documents,) bool."""
    # By number alone where that is enough: each record costs a read of its file.
    split, count = keys.split_of_documents(), len(documents)
    if not split.names:
        return np.array([split.holds_out(number) for number in range(count)], bool)
    held_out = np.array([split.holds_out(number, documents.record(number)) for number in range(count)], bool)
    # A list of which no name matches is a mistake: training would include what should be held out
    if not held_out.any():
        example = documents.record(0).place
        message = f"none of the {len(split.names)} names in {keys.held_out_list!r} is there; they look like {example!r}"
        raise JobError([Problem("held_out_list", message)])
    return held_out
