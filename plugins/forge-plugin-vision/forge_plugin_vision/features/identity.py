"""Digests by which features are found: of a tower, and of an image as the tower gets it.

Shapes: B rows, N images of a row at most, P patches of a row, V values of a patch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge_core.contracts.contexts import BuildContext
from forge_kit import torch_internals
from forge_plugin_vision import Grid, VisionEncoderComponent


def describe_tower(component: VisionEncoderComponent, context: BuildContext, taps: Sequence[int]) -> dict[str, Any]:
    """Returns what features depend on other than weights and image, as far as a job sets it; plain JSON."""
    type_ = context.type_of(component)
    return {
        "type": type_,
        # With the same keys, another version may compute other features
        "version": _version(type_.partition("/")[0]),
        "keys": repr(component),  # attrs writes all fields, with defaults
        "taps": list(taps),
        "dtype": str(context.dtype),
        # Kernels of another device or another torch round differently, and features would no longer be those that the
        # run itself computes.
        "device": context.device.type,
        "torch": torch.__version__,
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # a class in the user's own file
        return ""


def is_compiled(encoder: nn.Module) -> bool:
    """Whether blocks of the tower run compiled, which rounds in another way."""
    return torch_internals.is_compiled(encoder)


@torch.no_grad()
def digest_of_weights(encoder: nn.Module) -> str:
    """Returns the SHA-256 (hex) of a tower's parameters and buffers, the same under every layout.

    Collective over the ranks that share them: each gathers one tensor after the other.
    """
    digest = hashlib.sha256()
    tensors: Mapping[str, Tensor] = dict(encoder.named_parameters()) | dict(encoder.named_buffers())
    for name in sorted(tensors):  # one order on all ranks, as `full_tensor` is collective
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        # Bytes alone would not show where a tensor ends.
        digest.update(f"{name} {whole.dtype} {list(whole.shape)}".encode())
        digest.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class ImageKey(NamedTuple):
    """An image of a micro-batch, and the digest by which its features are found."""

    row: int
    start: int
    """Its first patch in the row."""
    stop: int
    key: str


def image_keys(patches: Tensor, grids: Tensor) -> list[ImageKey]:
    """Returns the images of a micro-batch, row by row.

    Args:
        patches: (B, P, V) uint8, in the host's memory.
        grids: (B, N, 3) int64, likewise.
    """
    keys, values = [], patches.contiguous().numpy()
    for row, own in enumerate(grids.tolist()):
        start = 0
        for frames, rows, columns in own:
            if stop := start + Grid(frames, rows, columns).patches:
                if stop > start:
                    # The grid as well: equal bytes in other rows and columns have other positions.
                    digest = hashlib.sha256(f"{frames} {rows} {columns} {values.shape[-1]} ".encode())
                    digest.update(values[row, start:stop].data)
                    keys.append(ImageKey(row, start, stop, digest.hexdigest()))
                start = stop
    return keys
