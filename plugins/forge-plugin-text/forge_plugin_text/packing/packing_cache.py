"""Caches packings as memory maps: computed once for a corpus and length."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.contracts.data import Documents, identity_of
from forge_kit.data.cache import CachedFolder, cached_folder, digest_of
from forge_plugin_text.packing.fitting import DocumentPieces, Packing, packed_blocks

FORMAT = 2
"""Part of the key: increase it when the same lengths are packed differently."""
GROUP = "packing"
FILES = {"starts": "<i8", "lengths": "<i4", "bounds": "<i8"}
"""The arrays of a `Packing`, one file of plain numbers each, and their types."""
BLOCK = 1 << 23
"""Documents that are packed at a time: they take 0.5 GB of memory."""


def stored_packing(documents: Documents, seq_len: int) -> CachedFolder:
    """Returns the cached folder with the packing of these documents (see `packed_blocks`).

    The key is the identity of the documents, or, if they have none, the SHA-256 of all ends, which each rank computes
    at each start: about a second for a hundred million documents.
    """
    identity = identity_of(documents)
    if not identity:
        identity = hashlib.sha256(np.ascontiguousarray(documents.ends(), "<i8").data).hexdigest()

    def make(folder: Path) -> dict[str, Any]:
        return _write(folder, documents.ends(), seq_len)

    return cached_folder(GROUP, digest_of(FORMAT, identity, seq_len), make)


def _write(folder: Path, ends: np.ndarray, seq_len: int) -> dict[str, Any]:
    pieces = positions = 0
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("wb")) for name in FILES}
        files["bounds"].write(np.zeros(1, FILES["bounds"]).data)
        for (starts, lengths), bounds in packed_blocks(ends, seq_len, BLOCK):
            # A block counts its own pieces from 0, which is where the block before it ended
            arrays = {"starts": starts, "lengths": lengths, "bounds": bounds[1:] + pieces}
            for name, array in arrays.items():
                files[name].write(np.ascontiguousarray(array, FILES[name]).data)
            pieces += len(lengths)
            positions += int(lengths.sum(dtype=np.int64))
    return {"documents": len(ends), "positions": positions}


def open_packing(folder: Path) -> Packing:
    """Memory-map the packing in a folder of `stored_packing`."""
    starts, lengths, bounds = (_mapped(folder / name, dtype) for name, dtype in FILES.items())
    return Packing(DocumentPieces(starts, lengths), bounds)


def _mapped(path: Path, dtype: str) -> np.ndarray:
    # An empty file, of documents without a label, cannot be mapped
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
