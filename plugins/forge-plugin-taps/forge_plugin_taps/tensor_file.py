"""A safetensors file that several processes write together."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names that the format has for dtypes."""


@frozen
class TensorFile:
    """A file of one tensor or several, of known shapes, so that rows can be written in any order, by any process."""

    path: Path
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

    @property
    def header(self) -> bytes:
        """Everything before the first tensor, padded to 8 bytes."""
        entries, begin = {}, 0
        for name, (dtype, shape) in self.shapes.items():
            end = begin + dtype.itemsize * math.prod(shape)
            entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        # Readers map the file into memory, where the first tensor must be aligned for its dtype
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def write_header(self) -> None:
        """Write the header at the start of the file, by one process; rows may have been written before it."""
        self._write([(0, self.header)])

    def write_rows(self, name: str, rows: Tensor, values: Tensor) -> None:
        """Write some rows of a tensor.

        Args:
            name: of the tensor.
            rows: (m,) their numbers.
            values: (m, …) on the CPU.
        """
        if not len(rows):
            return
        # Every process computes the header, and so the same offsets, from the shapes alone.
        begin, data = len(self.header) + self._offset(name), values.contiguous()
        size = data[0].nbytes
        # By bytes: numpy has no bfloat16
        octets: memoryview = data.view(-1).view(torch.uint8).numpy().data
        # Neighbours in one call: without context parallel a rank has all rows of its sequences.
        starts = np.flatnonzero(np.diff(rows.numpy(), prepend=-2) != 1)
        stops = [*starts[1:], len(rows)]
        pairs = zip(starts.tolist(), stops, strict=True)
        self._write([(begin + int(rows[start]) * size, octets[start * size : stop * size]) for start, stop in pairs])

    def _offset(self, name: str) -> int:
        offset = 0
        for other, (dtype, shape) in self.shapes.items():
            if other == name:
                return offset
            offset += dtype.itemsize * math.prod(shape)
        raise KeyError(name)

    def _write(self, parts: Sequence[tuple[int, bytes | memoryview]]) -> None:
        # Without O_TRUNC: other processes may have written their rows
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            for offset, data in parts:
                done = 0
                while done < len(data):  # a disk that is nearly full may take a part
                    done += os.pwrite(descriptor, data[done:], offset + done)
        finally:
            os.close(descriptor)
