"""Weights that files hold as 8-bit numbers with scales, as DeepSeek-V3's and Devstral 2's: read as wide ones.

The matrix `X.weight` (float8) has a matrix `X.weight_scale_inv` beside it with the factor of each block of
`weight_block_size`; the last blocks may be partial (DeepSeek-V3, arXiv 2412.19437,
section 3.3.2). Where `weight_block_size` is null, a matrix has a single factor. Numbers of 4 bits, as in gpt-oss, are
the subject of `forge_plugin_weights.mxfp4`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor

from forge_core.contracts.errors import JobError
from forge_plugin_weights.files import Place
from forge_plugin_weights.kinds import Config, Field, Flat, Unsupported
from forge_plugin_weights.mxfp4 import unpacked_places

QUANTISATION = "quantization_config"
SCALE = "_scale_inv"
"""End of the name of a tensor of scales, after the name of its matrix."""
OF_INPUTS = ".activation_scale"
"""End of the name of a number by which the inputs of a matrix are rounded, in place of `.weight`."""
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
KNOWN: Mapping[str, Collection[Any]] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic", "static"),
    "fmt": ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"),  # the latter in MiniMax's files
    "scale_fmt": ("float", "ue8m0"),
}
"""Values of keys of a `quantization_config`; those that say how activations are rounded mean nothing here."""
HARMLESS = ("weight_block_size", "modules_to_not_convert", "ignored_layers", "dequantize")
"""Further keys: the files show which tensors have scales."""


@frozen
class Quantisation(Field):
    """How the files hold weights: plain, or in blocks of 8-bit or 4-bit numbers. An export is plain."""

    @property
    def keys(self) -> Collection[str]:
        """The key of any architecture whose files may hold quantised weights."""
        return (QUANTISATION,)

    def read(self, config: Config) -> Flat:
        """Checks that the method is known. No key of `[model]` follows: the files show what has scales."""
        if not is_packed(config):
            block_size(config)  # raises for other methods
        return {}


def is_packed(config: Config) -> bool:
    """Returns whether stacks are in MXFP4.

    Raises:
        Unsupported: they are, with a key that Forge does not know.
    """
    settings = _settings(config)
    if settings.get("quant_method") != "mxfp4":
        return False
    for key, value in settings.items():
        if key not in ("quant_method", *HARMLESS):
            raise Unsupported(f"{QUANTISATION}: {key} = {value!r} of mxfp4 is not known to Forge")
    return True


def block_size(config: Config) -> Sequence[int] | None:
    """Returns rows and columns of the blocks that have a scale each; none of both where a whole matrix has one.

    None if the weights are plain.

    Raises:
        Unsupported: they are quantised in another way; names it.
    """
    settings = _settings(config)
    if not settings:
        return None
    for key, value in settings.items():
        if key in KNOWN and value in KNOWN[key]:
            continue
        if key not in HARMLESS:
            hint = "the methods mxfp4 and fp8 are known; convert the weights to bfloat16 first"
            raise Unsupported(f"{QUANTISATION}: {key} = {value!r} is not supported; {hint}")
    if "quant_method" not in settings:
        raise Unsupported(f"{QUANTISATION}: no quant_method; fp8 and mxfp4 are known")
    size = settings.get("weight_block_size", "missing")
    if size is None:
        return ()
    if not isinstance(size, list | tuple) or not _is_block(size):
        raise Unsupported(
            f"{QUANTISATION}: weight_block_size = {size!r}; fp8 with two numbers, such as [128, 128], or null works"
        )
    return tuple(size)


def _settings(config: Config) -> Mapping[str, Any]:
    settings = config.get(QUANTISATION) or {}
    if not isinstance(settings, Mapping):
        raise Unsupported(f"{QUANTISATION} = {settings!r}, which is no table")
    return settings


def _is_block(size: Sequence[Any]) -> bool:
    return len(size) == 2 and all(isinstance(side, int) and side > 0 for side in size)


@frozen
class BlockScaled(Place):
    """A matrix of 8-bit numbers, which is read as one of `dtype`, each number times the scale of its block."""

    as_stored: ClassVar[bool] = False

    narrow: Place = field(kw_only=True)
    scales: Place = field(kw_only=True)
    block: Sequence[int] = field(kw_only=True)
    """Rows and columns; empty: the whole matrix is one, and `scales` a single number of any shape."""

    def read(self) -> Tensor:
        """Returns the matrix: products in float32, rounded once, as DeepSeek's own conversion computes them."""
        narrow, scales = self.narrow.read(), self.scales.read().float()
        wide = torch.empty(self.shape, dtype=self.dtype)
        rows, columns = self.block or self.shape
        scales = scales.reshape(-(-len(wide) // rows), -1)
        # A row of blocks at a time, so that float32 is needed for that much only.
        for scale, start in zip(scales, range(0, len(wide), rows), strict=True):
            factors = scale.repeat_interleave(columns)[: wide.shape[1]]  # the last block may be partial
            wide[start : start + rows] = narrow[start : start + rows].float() * factors
        return wide


def wide_places(places: Mapping[str, Place], config: Config) -> dict[str, Place]:
    """Returns the tensors of a folder, those with scales as what they stand for, in the configuration's dtype.

    Raises:
        JobError: a tensor of 8-bit or 4-bit numbers has no scales, or scales of another shape.
    """
    # The dtype that transformers would compute in; bfloat16 where the configuration names none.
    dtype = WIDE.get(str(config.get("dtype", config.get("torch_dtype"))), torch.bfloat16)
    try:
        if is_packed(config):
            return unpacked_places(places, dtype)
        block = block_size(config)
    except Unsupported:  # named with everything else that is wrong with the configuration
        return dict(places)
    if block is None:
        return dict(places)
    wide: dict[str, Place] = {}
    for name, place in places.items():
        if place.dtype in NARROW:
            scales = _scales(name, place, places, block)
            wide[name] = BlockScaled(
                place.file, place.start, dtype, place.shape, narrow=place, scales=scales, block=block
            )
        elif not _is_scale(name, places):
            wide[name] = place
    return wide


def _is_scale(name: str, places: Mapping[str, Place]) -> bool:
    """Returns whether a tensor belongs to a matrix, with which it is read: by itself it would be an unknown one."""
    if name.endswith(OF_INPUTS):
        matrix = places.get(f"{name.removesuffix(OF_INPUTS)}.weight")
        return matrix is not None and matrix.dtype in NARROW
    return name.endswith(SCALE) and name.removesuffix(SCALE) in places


def _scales(name: str, place: Place, places: Mapping[str, Place], block: Sequence[int]) -> Place:
    if name + SCALE not in places:
        raise JobError(f"{name} has 8-bit numbers, and there is no {name + SCALE} with their scales")
    scales = places[name + SCALE]
    if not block:
        if math.prod(scales.shape) != 1 or len(place.shape) != 2:
            message = f"{name + SCALE} has the shape {list(scales.shape)}"
            raise JobError(f"{message}; {name}, {list(place.shape)}, would have to be a matrix with a single scale")
        return scales
    shape = tuple(-(-length // size) for length, size in zip(place.shape, block, strict=False))  # partial blocks too
    if len(place.shape) != 2 or scales.shape != shape:
        message = f"{name + SCALE} has the shape {list(scales.shape)}"
        raise JobError(f"{message}; blocks of {list(block)} of {name}, {list(place.shape)}, have {list(shape)}")
    return scales
