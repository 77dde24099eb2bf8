"""What documents need beside what a row has room for: see `forge_kit.data.budgets`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from forge_kit.data.budgets import Budget, Budgets
from forge_plugin_images.dataset_rows import row_format
from forge_plugin_images.index import entries_of, stored_index

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_images.file_dataset import FileDataset

KEYS = {
    "positions": "train.seq_len",
    "patches": "model.vision.patches_per_sequence",
    "images": "model.vision.images_per_sequence",
}
OUTCOMES = {
    "stop": 'the run stops before its first step (too_long = "stop")',
    "cut": 'what does not fit is cut off (too_long = "cut")',
    "skip": 'they are left out (too_long = "skip")',
}


def image_budgets(keys: FileDataset, context: BuildContext) -> Budgets:
    """Measure the documents of a dataset, or read their measurements from the cache.

    Raises:
        JobError: a record does not match the job, or images are broken and this is not allowed.
    """
    documents = keys.documents_of(context, keys.records())
    # Measured uncut: with `too_long = "cut"`, training keeps only the part of a document that fits.
    documents = evolve(documents, room=None)
    entries = entries_of(stored_index(documents, keys.skips_unreadable).path)
    room = row_format(context, documents).room._asdict()
    # A document counts once, whichever of the three kinds of room it exceeds.
    over = np.any([entries[name] > most for name, most in room.items()], axis=0)
    budgets = [
        Budget(
            name=name,
            key=KEYS[name],
            room=most,
            largest=int(entries[name].max(initial=0)),
            over=int((entries[name] > most).sum()),
        )
        for name, most in room.items()
    ]
    return Budgets(
        documents=len(entries),
        over=int(over.sum()),
        budgets=budgets,
        outcome=OUTCOMES[keys.too_long],
        first=documents.record(int(over.argmax())).place if over.any() else "",
        is_refused=bool(over.any()) and keys.too_long == "stop",
    )
