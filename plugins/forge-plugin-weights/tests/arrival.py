"""Hooks that look at the weights of each rank when they are loaded, and no step has been trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from torch.distributed.tensor import DTensor

from forge_core.checkpoint.state import model_tensors
from forge_core.contracts.components import TrainingHook
from forge_core.parallel.mesh import global_rank
from forge_plugin_weights import Export

if TYPE_CHECKING:
    from forge_core.contracts.contexts import TrainContext


@define(kw_only=True, slots=False)
class Arrival(TrainingHook):
    """Compares each tensor, gathered, with the one of a single process, and writes how many numbers this rank has."""

    expected: str
    """A file of tensors by name."""
    spoilt: int = -1
    """A rank whose part of one tensor is changed before; none: -1."""

    @torch.no_grad()
    def on_train_begin(self, context: TrainContext) -> None:
        model: Any = context.model
        tensors, expected = model_tensors(model), torch.load(self.expected)
        if global_rank() == self.spoilt:
            local(tensors["layers.0.ffn_norm.weight"]).view(-1)[-1:] += 1
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole.to(expected[name].dtype), expected[name]), f"{name} is not that of one process"
        counts = {name: local(tensor).numel() for name, tensor in tensors.items()}
        assert context.folder is not None
        (context.folder / f"arrived-{global_rank()}.json").write_text(json.dumps(counts))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@define(kw_only=True, slots=False)
class ExportBefore(Export):
    """Writes an export before the first step, too."""

    def on_train_begin(self, context: TrainContext) -> None:
        super().on_train_begin(context)
        self._export(context)


def arrived(folder: Path) -> list[dict[str, int]]:
    """How many numbers of each tensor each rank of a run had."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("arrived-*.json"))]
