"""Reads what stores keep: a folder for each step, with `taps.json` and a safetensors file for each point."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.contracts.errors import ForgeError

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST, TOKENS = "taps.json", "tokens"


def steps_of(folder: Path) -> list[Path]:
    """Returns the folders of steps in a store or run folder, oldest first; the folder itself if it is one of a step."""
    if (folder / MANIFEST).is_file():
        return [folder]
    inside = [path.parent for path in (*folder.glob(f"step-*/{MANIFEST}"), *folder.glob(f"taps/step-*/{MANIFEST}"))]
    # By number: step-100 is after step-20
    return sorted(inside, key=lambda path: int(path.name.rpartition("-")[2]))


def manifest_of(step: Path) -> Mapping[str, Any]:
    """Returns the manifest of a step."""
    manifest: Mapping[str, Any] = json.loads((step / MANIFEST).read_text())
    return manifest


def points_in(step: Path) -> list[str]:
    """Returns the names of the points of a step, gradients (`NAME.grad`) among them."""
    names = (name.removesuffix(".safetensors") for name in manifest_of(step)["files"])
    return [name for name in names if name != TOKENS]


def steps_with(steps: Sequence[Path]) -> dict[str, list[Path]]:
    """Returns each point with the steps that have it: a point that nothing passed in a step is not in that one."""
    found: dict[str, list[Path]] = {}
    for step in steps:
        for name in points_in(step):
            found.setdefault(name, []).append(step)
    return found


def read_point(step: Path, name: str) -> Tensor:
    """Returns the samples of a point: (N, …), in the order of rows and positions."""
    return read_file(step / f"{name}.safetensors")[name]


def read_tokens(step: Path) -> dict[str, Tensor]:
    """Returns the facts about the samples, (N,) int64 each; see `forge_plugin_taps.samples.TOKENS`."""
    return read_file(step / f"{TOKENS}.safetensors")


def read_file(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, on the CPU whatever the default device is.

    Raises:
        ForgeError: it is none, or is cut short.
    """
    try:
        return _tensors(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        message = f"{path}: cannot be read as safetensors ({type(error).__name__}: {error})"
        raise ForgeError(f"{message}; make the file again") from error


def _tensors(path: Path) -> dict[str, Tensor]:
    import numpy as np
    import torch

    from forge_plugin_taps.tensor_file import DTYPES

    kinds = {name: dtype for dtype, name in DTYPES.items()}
    content = np.fromfile(path, dtype=np.uint8)
    # The format begins with the length of its header, in 8 bytes
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        dtype = kinds[entry["dtype"]]
        if math.prod(entry["shape"]) == 0:
            tensors[name] = torch.empty(entry["shape"], dtype=dtype, device="cpu")
        else:
            # A copy: a slice would keep the whole file in memory, and its address might not be aligned for the dtype.
            tensors[name] = torch.from_numpy(content[begin:end].copy()).view(dtype).view(entry["shape"])
    return tensors
