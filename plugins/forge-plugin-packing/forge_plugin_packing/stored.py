"""Caches packings as memory maps: computed once for a corpus and length."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.contracts.data import Documents, identity_of
from forge_kit.cache import CachedFolder, cached_folder, digest_of
from forge_plugin_packing.fitting import DocumentPieces, Packing, pack

FORMAT = 1
"""Part of the key: increase it when the same lengths are packed differently."""
GROUP = "packing"
FILES = ("starts.npy", "lengths.npy", "bounds.npy")
"""The arrays of a `Packing`."""


def stored_packing(documents: Documents, seq_len: int) -> CachedFolder:
    """Returns the cached folder with the packing of these documents (see `pack`).

    The key is the identity of the documents, or, if they have none, the SHA-256 of all ends, which each rank computes
    at each start: about a second for a hundred million documents.
    """
    identity = identity_of(documents)
    if not identity:
        identity = hashlib.sha256(np.ascontiguousarray(documents.ends(), "<i8").data).hexdigest()

    def make(folder: Path) -> dict[str, Any]:
        ends = np.asarray(documents.ends())
        (starts, lengths), bounds = pack(ends, seq_len)
        for name, array in zip(FILES, (starts, lengths, bounds), strict=True):
            np.save(folder / name, array)
        return {"documents": len(ends), "positions": int(lengths.sum(dtype=np.int64))}

    return cached_folder(GROUP, digest_of(FORMAT, identity, seq_len), make)


def open_packing(folder: Path) -> Packing:
    """Memory-map the packing in a folder of `stored_packing`."""
    starts, lengths, bounds = (np.load(folder / name, mmap_mode="r") for name in FILES)
    return Packing(DocumentPieces(starts, lengths), bounds)
