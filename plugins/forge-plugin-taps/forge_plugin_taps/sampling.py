"""Sampled positions: a function of seed, step and row, so that every layout samples the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def chosen_positions(seed: int, step: int, rows: Sequence[int], length: int, count: int) -> np.ndarray:
    """Returns `count` of the `length` positions of each row of a global batch, ascending: (rows, count) int64.

    Every set of positions is equally likely.
    """
    if count >= length:
        return np.tile(np.arange(length), (len(rows), 1))
    # Own numbers and not numpy's, whose `choice` may draw others in its next version.
    keys = np.array([_key(seed, step, row) for row in rows], dtype=np.uint64)
    numbers = _mixed(keys[:, None] + np.arange(length, dtype=np.uint64)[None] * np.uint64(0x9E3779B97F4A7C15))
    # The positions of the smallest of independent numbers are a set drawn without replacement
    return np.sort(np.argsort(numbers, axis=1, kind="stable")[:, :count], axis=1)


def _key(seed: int, step: int, row: int) -> int:
    # Not `hash`, which Python seeds differently in each process
    digest = hashlib.blake2b(f"{seed}:taps:{step}:{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mixed(x: np.ndarray) -> np.ndarray:
    """Splitmix64's finaliser (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
