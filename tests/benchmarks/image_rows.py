"""Rows of one length, all random: an image, a question that is not learned, and an answer; or no image."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from forge_core.contracts.components import DatasetComponent
from forge_plugin_vision import GRIDS, IMAGE, PATCHES, SECONDS, Grid, image_input


@frozen(kw_only=True)
class ImageRows(DatasetComponent):
    vocab_size: int
    sequences: int
    answer: int
    """Learned tokens of a row."""

    def build(self, context):
        seen = image_input(context.job)
        return Rows(self, Grid(1, *seen.format.grid), seen.format.values, context.job.train.seq_len)


class Rows:
    held_out = bytes_per_token = None

    def __init__(self, component, grid, values, length):
        self.component, self.grid, self.values, self.length = component, grid, values, length

    def __len__(self):
        return self.component.sequences

    def __getitem__(self, index):
        generator = np.random.default_rng(index)
        tokens = generator.integers(0, self.component.vocab_size, self.length + 1)
        tokens[: self.grid.patches] = IMAGE
        labels = tokens[1:].copy()
        labels[: self.length - self.component.answer] = -100
        patches = generator.integers(0, 256, (self.grid.patches, self.values)).astype(np.uint8)
        entries = {PATCHES: patches, GRIDS: np.array([self.grid]), SECONDS: np.zeros(1, np.float32)}
        return {"input_ids": tokens[:-1], "labels": labels, **entries}


@frozen(kw_only=True)
class TextRows(DatasetComponent):
    """Rows as long, of which as much is learned, without an image."""

    vocab_size: int
    sequences: int
    answer: int

    def build(self, context):
        return PlainRows(self, context.job.train.seq_len)


class PlainRows:
    held_out = bytes_per_token = None

    def __init__(self, component, length):
        self.component, self.length = component, length

    def __len__(self):
        return self.component.sequences

    def __getitem__(self, index):
        tokens = np.random.default_rng(index).integers(0, self.component.vocab_size, self.length + 1)
        labels = tokens[1:].copy()
        labels[: self.length - self.component.answer] = -100
        return {"input_ids": tokens[:-1], "labels": labels}
