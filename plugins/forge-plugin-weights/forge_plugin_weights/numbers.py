"""Whether what the files hold are numbers to compute with: no integers, no 8-bit numbers without scales, no NaN."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from forge_core.contracts.errors import JobError
from forge_plugin_weights.files import BLOCK, Place
from forge_plugin_weights.matching import listed
from forge_plugin_weights.reading import Piece
from forge_plugin_weights.tables import fits_any

WEIGHTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights; 8 and 4 bits are read as one of them, by their scales."""


def check_dtypes(places: Mapping[str, Place], used: Iterable[str], folder: Path) -> None:
    """Check the dtypes of the tensors that a model uses.

    Raises:
        JobError: some have integers, or 8-bit numbers without scales; names them.
    """
    dtypes = {name: places[name].dtype for name in used if name in places and places[name].dtype not in WEIGHTS}
    if dtypes:
        kinds = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()}))
        hint = "config.json has no quantization_config with scales for them; convert the weights to bfloat16 first"
        raise JobError(f"{folder}: {listed(sorted(dtypes))}: {kinds} values are no weights by themselves, and {hint}")


class FiniteCheck:
    """Looks for NaN and infinite numbers in tensors while their files are read for another purpose."""

    def __init__(self, places: Mapping[str, Place], unbounded: Collection[str] = ()) -> None:
        """Look at the tensors of `places`, of which those that fit a pattern of `unbounded` may be infinite."""
        # Without tensors that are computed: their bytes in the file are other numbers.
        self._places = {name: place for name, place in places.items() if place.as_stored and place.dtype in WEIGHTS}
        self._not_finite: set[str] = set()
        self._unbounded = unbounded

    def pieces(self, path: Path) -> Iterator[Piece]:
        """Yields the blocks of a file's tensors, in order."""
        there = [(place.start, name) for name, place in self._places.items() if place.file == path]
        for start, name in sorted(there):
            end = start + self._places[name].size
            yield from (Piece(at, min(BLOCK, end - at), name) for at in range(start, end, BLOCK))

    def look(self, piece: Piece, memory: memoryview) -> None:
        """Look at a block; what lies between tensors has no key."""
        if piece.key is not None:
            block = torch.frombuffer(memory, dtype=self._places[piece.key].dtype)
            # NaN is both bounds; isfinite makes tensors as large as the block, and takes 20 times as long
            bounds = [float(bound) for bound in torch.aminmax(block)]
            may_be_infinite = not any(map(math.isnan, bounds)) and fits_any(piece.key, self._unbounded)
            if not (all(map(math.isfinite, bounds)) or may_be_infinite):
                self._not_finite.add(piece.key)

    def finish(self, used: Iterable[str], folder: Path) -> None:
        """Report what was found, once all files have been read.

        Raises:
            JobError: tensors that the model uses have numbers that are not finite; names them.
        """
        # Tensors that an import leaves out may hold anything.
        if names := sorted(self._not_finite & set(used)):
            message = f"{listed(names)}: values are NaN or infinite"
            raise JobError(f"{folder}: {message}; the training that wrote them had diverged, or the files are damaged")
