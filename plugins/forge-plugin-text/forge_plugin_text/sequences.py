"""Sequences of token files, read through memory maps: memory does not grow with the corpus.

S: tokens of a sequence. N: tokens of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_core.errors import JobError
from forge_core.protocols import IGNORED_LABEL
from forge_plugin_text.cache import CachedFolder
from forge_plugin_text.tokens import HELD_OUT, TRAIN, token_file

if TYPE_CHECKING:
    from forge_core.protocols import Dataset
    from forge_plugin_text.corpus import Corpus


class Tokens:
    """The N ids of a token file. Slices come as new int64 arrays; a pickled copy maps the file itself."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, dtype
        self._map = np.memmap(path, dtype, mode="r")

    def __len__(self) -> int:
        return len(self._map)

    def __getitem__(self, span: slice) -> np.ndarray:
        return np.array(self._map[span], dtype=np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokens, (self._path, self._dtype)


class HeldOutSequences:
    """All tokens of the held-out documents, each the label of exactly one position, in order.

    Sequence i has labels [iS, iS + S); its inputs are the tokens one before them, where an end-of-text stands before
    the first. The last sequence is filled up with end-of-text as inputs and ignored labels.
    """

    def __init__(self, tokens: Tokens, seq_len: int, end_of_text: int, bytes_per_token: float) -> None:
        self._tokens, self._seq_len, self._end_of_text = tokens, seq_len, end_of_text
        self.held_out: Dataset | None = None
        self.bytes_per_token: float | None = bytes_per_token

    def __len__(self) -> int:
        return -(-len(self._tokens) // self._seq_len)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        start = _checked(index, len(self)) * self._seq_len
        targets = self._tokens[start : start + self._seq_len]
        labels = np.full(self._seq_len, IGNORED_LABEL)
        labels[: len(targets)] = targets
        input_ids = np.full(self._seq_len, self._end_of_text)
        input_ids[1 : len(targets)] = targets[:-1]
        if start:
            input_ids[:1] = self._tokens[start - 1 : start]
        return {"input_ids": input_ids, "labels": labels}


class TrainingSequences:
    """Sequence i covers tokens [iS, iS + S]: S inputs, and S labels one further on.

    Every token is an input exactly once, but for the last ones, 1 to S of them, which no whole sequence has room for.
    """

    def __init__(self, tokens: Tokens, seq_len: int, held_out: HeldOutSequences | None) -> None:
        self._tokens, self._seq_len = tokens, seq_len
        self.held_out: Dataset | None = held_out
        self.bytes_per_token = held_out.bytes_per_token if held_out else None

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        start = _checked(index, len(self)) * self._seq_len
        window = self._tokens[start : start + self._seq_len + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}


def open_sequences(stored: CachedFolder, corpus: Corpus, seq_len: int, end_of_text: int) -> TrainingSequences:
    """The sequences of both splits.

    Raises:
        JobError: the training split is too short for one sequence, or nothing is held out although the job asks for it.
    """
    info = stored.info
    if info[TRAIN]["tokens"] <= seq_len:
        split = f"the training split of {corpus}"
        seen = f"{split} has {info[TRAIN]['tokens']} tokens in {info[TRAIN]['documents']} documents"
        raise JobError(f"{seen}, fewer than train.seq_len + 1 = {seq_len + 1}; add text or shorten train.seq_len")
    held_out = None
    if corpus.split.holds_out_any:
        if not info[HELD_OUT]["tokens"]:
            raise JobError(f"{corpus}: none of the documents to hold out is there or has text; choose others")
        bytes_per_token = info[HELD_OUT]["bytes"] / info[HELD_OUT]["tokens"]
        tokens = Tokens(token_file(stored.path, HELD_OUT), info["dtype"])
        held_out = HeldOutSequences(tokens, seq_len, end_of_text, bytes_per_token)
    return TrainingSequences(Tokens(token_file(stored.path, TRAIN), info["dtype"]), seq_len, held_out)


def _checked(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise IndexError(f"sequence {index} of {length}")
    return index
