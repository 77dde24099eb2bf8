"""Images in rows, and modules with random weights; puts `qwen_models` on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core.contracts.contexts import BuildContext
from forge_core.engine.build import build_context
from forge_core.plugins.catalog import Catalog

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def context(make_job: Callable[..., Any], catalog: Catalog, tmp_path: Path) -> BuildContext:
    return build_context(make_job(), catalog, tmp_path)


@pytest.fixture
def randomised() -> Callable[..., Any]:
    """randomised(module): all of its parameters random, norms and biases too, in float64."""

    def fill(module: nn.Module, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in module.double().named_parameters():
            low = 0.5 if "norm" in name and name.endswith("weight") else -0.5
            parameter.data.uniform_(low, low + 1, generator=generator)
        return module.eval().requires_grad_(False)

    return fill


@pytest.fixture
def packed() -> Callable[..., tuple[Tensor, Tensor]]:
    """packed([[patches (h, w, V) of an image, …] of a row, …], P, N): patches (B, P, V) and grids (B, N, 3)."""

    def pack(rows: Sequence[Sequence[Tensor]], patches: int, images: int, values: int) -> tuple[Tensor, Tensor]:
        packed = torch.zeros(len(rows), patches, values, dtype=torch.float64)
        grids = torch.zeros(len(rows), images, 3, dtype=torch.int64)
        for number, row in enumerate(rows):
            filled = torch.cat([image.flatten(0, 1) for image in row]) if row else packed[number, :0]
            packed[number, : len(filled)] = filled
            for place, image in enumerate(row):
                grids[number, place] = torch.tensor([1, *image.shape[:2]])
        return packed, grids

    return pack
