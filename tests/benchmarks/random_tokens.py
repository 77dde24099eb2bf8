"""A data source of random tokens, for measurements: no cost of reading."""

from __future__ import annotations

from attrs import frozen

from forge_core.contracts.components import DatasetComponent


@frozen(kw_only=True)
class RandomTokens(DatasetComponent):
    """Uniformly random sequences."""

    vocab_size: int
    sequences: int = 32

    def build(self, context):
        import numpy as np

        shape = (self.sequences, context.job.train.seq_len + 1)
        return Rows(np.random.default_rng(1234).integers(0, self.vocab_size, shape))


class Rows:
    """See `forge_core.contracts.data.Dataset`."""

    held_out = None
    bytes_per_token = None

    def __init__(self, tokens) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int):
        row = self._tokens[index]
        return {"input_ids": row[:-1], "labels": row[1:]}
