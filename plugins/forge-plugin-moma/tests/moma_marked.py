"""A transformer and data with positions that are no token, without a vision tower."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import field, frozen

from forge_core.contracts.components import DatasetComponent, ModelComponent

VOCABULARY = 32


@frozen(kw_only=True)
class Marked(ModelComponent):
    """A language model in which an id below 0 has the embedding of the token whose number is its position."""

    language: ModelComponent

    def build(self, context: Any) -> Any:
        model: Any = context.build(self.language)
        model.__class__ = type(type(model).__name__, (_Marked, type(model)), {})
        return model


class _Marked:
    def embed(self, batch: Any) -> Any:
        ids = batch["input_ids"]
        positions = batch.get("positions", torch.arange(ids.shape[1], device=ids.device).expand_as(ids))
        return super().embed({**batch, "input_ids": ids.where(ids >= 0, positions % VOCABULARY)})  # type: ignore[misc]


@frozen(kw_only=True)
class Mixed(DatasetComponent):
    """Random tokens, with images (-1) and videos (-2) of random lengths in between; every third row is text."""

    sequences: int = 64
    held_out: int = field(default=5)

    def build(self, context: Any) -> Any:
        length = context.job.train.seq_len
        return Rows(length, 0, self.sequences, Rows(length, self.sequences, self.held_out, None))


class Rows:
    bytes_per_token = None

    def __init__(self, length: int, start: int, count: int, held_out: Rows | None) -> None:
        self._length, self._start, self._count, self.held_out = length, start, count, held_out

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(self._start + index)
        tokens = generator.integers(0, VOCABULARY, self._length + 1)
        for mark in () if (self._start + index) % 3 == 0 else (-1, -2, -1):
            start, length = generator.integers(0, self._length), generator.integers(1, 5)
            tokens[start : start + length] = mark
        return {"input_ids": tokens[:-1], "labels": np.where(tokens[1:] < 0, -100, tokens[1:])}
