"""Rows of one length, all random: a clip, an image, a question that is not learned, and an answer."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from forge_core.contracts.components import DatasetComponent
from forge_plugin_vision import GRIDS, IMAGE, PATCHES, SECONDS, VIDEO, image_input

MARKS = 8
"""Ids from here to the end of the vocabulary stand for images and the like, and are no text."""


@frozen(kw_only=True)
class ClipRows(DatasetComponent):
    vocab_size: int
    sequences: int
    answer: int
    """Learned tokens of a row."""
    clip: tuple[int, int, int]
    """Entries of the time axis, rows and columns of patches; the image has the size of one entry."""
    seconds: float

    def build(self, context):
        return Rows(self, image_input(context.job), context.job.train.seq_len)


class Rows:
    held_out = bytes_per_token = None

    def __init__(self, component, seen, length):
        self.component, self.seen, self.length = component, seen, length

    def __len__(self):
        return self.component.sequences

    def __getitem__(self, index):
        component, form = self.component, self.seen.format
        row = row_of(component, index, self.length, form.values, form.multiple)
        padded = np.zeros((self.seen.patches_per_sequence, form.values), np.uint8)
        padded[: len(row[PATCHES])] = row[PATCHES]
        return {**row, PATCHES: padded}


def row_of(component, index, length, values, merge):
    """Returns a row as a batch has it, without padding of patches; the last position has no label."""
    generator = np.random.default_rng(index)
    ids = generator.integers(0, component.vocab_size - MARKS, length)
    frames, rows, columns = component.clip
    grids, start = np.array([component.clip, (1, rows, columns)]), 2
    for id_, count in ((VIDEO, frames), (IMAGE, 1)):
        features = count * rows * columns // merge**2
        ids[start : start + features] = id_
        start += features + 2
    labels = np.append(ids[1:], -100)
    labels[: length - component.answer - 1] = -100
    patches = generator.integers(0, 256, ((frames + 1) * rows * columns, values)).astype(np.uint8)
    seconds = np.array([component.seconds, 0], np.float32)
    return {"input_ids": ids, "labels": labels, PATCHES: patches, GRIDS: grids, SECONDS: seconds}
