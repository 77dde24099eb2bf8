"""GGUF, the format of llama.cpp: the metadata of a file, and where its tensors lie.

Tensors are read where they lie, as in safetensors files. Computed are numbers of 8 bits with their scales
(Q8_0), and queries and keys of the architecture `llama`, whose rows have another order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor

from forge_core.contracts.errors import JobError
from forge_plugin_weights.files import Place
from forge_plugin_weights.kinds import Shape
from forge_plugin_weights.matching import listed

SUFFIX = ".gguf"
INSTALL = 'pip install "forge-plugin-weights[gguf]"'
DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Q8_0 = "Q8_0"
BLOCK_NUMBERS, BLOCK_BYTES = 32, 34
"""Of Q8_0: a scale in float16, and 32 numbers of 8 bits."""
REQUANTISE = "make one of them with: llama-quantize --allow-requantize {file} OUT.gguf F16"
KINDS: Mapping[int, str] = {0: "F32", 1: "F16", 8: Q8_0, 30: "BF16"}
"""Types of tensors by their numbers in files."""
MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32
"""Bytes at a multiple of which each tensor begins, unless the metadata has another number."""
NUMBERS: Mapping[int, str] = {
    **dict(enumerate("BbHhIif?")),
    **dict(enumerate("Qqd", 10)),
}
"""Types of values by their numbers in files, as `struct` names them."""
TEXT, ARRAY = 8, 9
DAMAGED = (
    ValueError,
    LookupError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
    ZeroDivisionError,
    struct.error,
)
"""Errors for a header that is truncated, or that is none."""


def is_gguf(path: Path) -> bool:
    """Whether a path is of a GGUF file, by its name."""
    return path.suffix.lower() == SUFFIX


def library(path: Path) -> Any:
    """Returns the package `gguf`; raises a `JobError` where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise JobError(f"{path}: GGUF files need the package gguf: {INSTALL}") from None
    return gguf


@frozen
class Eights(Place):
    """A tensor in Q8_0, which is read in float32, where the products with its scales are exact."""

    as_stored: ClassVar[bool] = False

    raw: Place = field(kw_only=True)
    name: str = field(kw_only=True)

    def read(self) -> Tensor:
        """Returns the tensor: each number times the scale of its block."""
        blocks = self.raw.read()
        scales = blocks[:, :2].contiguous().view(torch.float16).float()
        values = blocks[:, 2:].contiguous().view(torch.int8).float() * scales
        return demand_finite(values.view(self.shape), self.file, self.name)


@frozen
class PairedRows(Place):
    """Queries or keys whose rows are in pairs, as llama.cpp rotates neighbours; read with pairs half a head apart."""

    as_stored: ClassVar[bool] = False

    raw: Place = field(kw_only=True)
    name: str = field(kw_only=True)
    heads: int = field(kw_only=True)

    def read(self) -> Tensor:
        """Returns the tensor in the order of rows that Forge and `transformers` have."""
        stored = self.raw.read()
        pairs = stored.view(self.heads, -1, 2, *stored.shape[1:])
        return demand_finite(pairs.transpose(1, 2).reshape(self.shape), self.file, self.name)


@frozen
class Gains(Place):
    """Gains of a norm, which llama.cpp stores as it multiplies by them; read less 1, as Gemma's files hold them."""

    as_stored: ClassVar[bool] = False

    raw: Place = field(kw_only=True)
    name: str = field(kw_only=True)

    def read(self) -> Tensor:
        """Returns the gains less 1."""
        return demand_finite(self.raw.read().float() - 1, self.file, self.name)


def slice_of(stack: Place, number: int) -> Place:
    """Returns the place of one tensor of a stack, such as a matrix of an expert."""
    inner = stack.shape[1:]
    if not isinstance(stack, Eights):
        return Place(stack.file, stack.start + number * math.prod(inner) * stack.dtype.itemsize, stack.dtype, inner)
    blocks = math.prod(inner) // BLOCK_NUMBERS
    start = stack.start + number * blocks * BLOCK_BYTES
    raw = Place(stack.file, start, torch.uint8, (blocks, BLOCK_BYTES))
    return Eights(stack.file, start, stack.dtype, inner, raw=raw, name=stack.name)


def demand_finite(values: Tensor, file: Path, name: str) -> Tensor:
    """Returns a computed tensor, which `FiniteCheck` does not see; raises a `JobError` for NaN or infinite numbers."""
    if values.numel() and not all(math.isfinite(bound) for bound in torch.aminmax(values)):
        raise JobError(f"{file}: {name}: values are NaN or infinite; the file is damaged")
    return values


@frozen
class GgufFile:
    """A file that was opened."""

    path: Path
    metadata: Mapping[str, Any]
    places: Mapping[str, Place]
    """By the names of GGUF."""

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the metadata, and check that the bytes of all tensors are there.

        Raises:
            JobError: `gguf` is not installed, or the file cannot be read, is damaged, or is one of several parts.
        """
        gguf = library(path)
        try:
            with path.open("rb") as file:
                metadata, tensors = _Header(file, path.stat().st_size).read()
        except OSError as error:
            raise JobError(f"{path} cannot be read: {error.strerror or error}") from error
        except DAMAGED as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise JobError(f"{path} is no GGUF file, or is truncated: {reason}") from error
        if metadata.get("split.count", 1) not in (0, 1):
            hint = f"make one file of them with: llama-gguf-split --merge {path} OUT.gguf"
            raise JobError(f"{path} is one of {metadata['split.count']} parts; {hint}")
        others = {name: tensor.kind for name, tensor in tensors.items() if tensor.kind not in KINDS}
        if others:
            known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
            kinds = ", ".join(sorted({known.get(kind, str(kind)) for kind in others.values()}))
            hint = f"{', '.join(KINDS.values())} are; {REQUANTISE.format(file=path)}"
            raise JobError(f"{path}: tensors of type {kinds} are not read ({listed(sorted(others))}): {hint}")
        places = {name: _place(path, name, tensor) for name, tensor in tensors.items()}
        size = path.stat().st_size
        for name, place in places.items():
            stored = place.raw if isinstance(place, Eights) else place
            if stored.start + stored.size > size:
                end = f"{name} ends at byte {stored.start + stored.size} of {size}"
                raise JobError(f"{path} is truncated: {end}; download it again")
        return cls(path, metadata, places)


@frozen
class _Tensor:
    """A tensor as the header describes it."""

    kind: int
    shape: Shape
    start: int


class _Header:
    """Reads the header of a file: the package's own reader takes 8 s for the tokenizer of Llama 3, and this one 0.3 s.

    Numbers are little-endian; a text is its length in 8 bytes, and its bytes.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        """Returns the metadata and the tensors; raises one of `DAMAGED`."""
        magic, version = self._take(4), self._number("I")
        if magic != MAGIC:
            raise ValueError(f"it begins with {magic!r}, and not with {MAGIC!r}")
        if version not in VERSIONS:
            order = ", or its numbers are in big-endian order" if version % (1 << 16) == 0 else ""
            raise ValueError(f"its version is {version}{order}; {VERSIONS[0]} and {VERSIONS[-1]} are read")
        count, keys = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = self._text()
            if name in metadata:
                raise ValueError(f"the key {name} is there twice")
            metadata[name] = self._value(self._number("I"))
        described = {}
        for _ in range(count):
            name, dimensions = self._text(), self._number("I")
            shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))  # the fastest first in the file
            if name in described:
                raise ValueError(f"the tensor {name} is there twice")
            described[name] = shape, self._number("I"), self._number("Q")
        alignment = metadata.get("general.alignment", ALIGNMENT)
        first = -(-self._file.tell() // alignment) * alignment
        return metadata, {name: _Tensor(kind, shape, first + at) for name, (shape, kind, at) in described.items()}

    def _take(self, size: int) -> bytes:
        # Before it is read: the length of a damaged file may be any number
        if size > self._left:
            raise ValueError(f"a part of the header would have {size} bytes, and {self._left} are left")
        self._left -= size
        return self._file.read(size)

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _text(self) -> str:
        return self._take(self._number("Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind == ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner in (TEXT, ARRAY):
                return [self._value(inner) for _ in range(count)]
            code = NUMBERS[inner]
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))
        if kind == TEXT:
            return self._text()
        value = self._number(NUMBERS[kind])
        return shortest(value) if NUMBERS[kind] == "f" else value


def shortest(value: float) -> float:
    """Returns a number of float32 with the fewest digits, as `config.json` has it: 1e-06, and not 9.99999997e-07."""
    import numpy

    return float(str(numpy.float32(value)))


def _place(path: Path, name: str, tensor: _Tensor) -> Place:
    kind, shape = KINDS[tensor.kind], tensor.shape
    if kind != Q8_0:
        return Place(path, tensor.start, DTYPES[kind], shape)
    blocks = (math.prod(shape) // BLOCK_NUMBERS, BLOCK_BYTES)
    raw = Place(path, tensor.start, torch.uint8, blocks)
    return Eights(path, tensor.start, torch.float32, shape, raw=raw, name=name)
