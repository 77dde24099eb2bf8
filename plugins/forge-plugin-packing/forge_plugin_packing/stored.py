"""Packings in the cache, as memory maps: made once for a corpus and length, and there at once from then on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from forge_kit.cache import CachedFolder, cached_folder, digest_of
from forge_plugin_packing.fitting import Packing, Pieces, pack

FORMAT = 1
"""Part of the key: raise it when the same lengths are packed otherwise."""
GROUP = "packing"
FILES = ("starts.npy", "lengths.npy", "bounds.npy")
"""The arrays of a `Packing`."""


def stored_packing(ends: np.ndarray, seq_len: int) -> CachedFolder:
    """The folder that holds how these documents are packed (see `pack`), from the cache."""
    digest = hashlib.sha256(np.ascontiguousarray(ends, "<i8").data).hexdigest()

    def make(folder: Path) -> dict[str, Any]:
        (starts, lengths), bounds = pack(np.asarray(ends), seq_len)
        for name, array in zip(FILES, (starts, lengths, bounds), strict=True):
            np.save(folder / name, array)
        return {"documents": len(ends), "positions": int(lengths.sum(dtype=np.int64))}

    return cached_folder(GROUP, digest_of(FORMAT, digest, seq_len), make)


def open_packing(folder: Path) -> Packing:
    """What `stored_packing` keeps in a folder, mapped."""
    starts, lengths, bounds = (np.load(folder / name, mmap_mode="r") for name in FILES)
    return Packing(Pieces(starts, lengths), bounds)
