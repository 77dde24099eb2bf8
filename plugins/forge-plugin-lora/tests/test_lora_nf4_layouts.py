"""A base in NF4 under every layout: the curve of one process, in float64."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core import Trainer
from forge_core.contracts.components import TrainingHook
from forge_plugin_checkpoints import Parts
from forge_plugin_lora import LoRA
from forge_plugin_moe import MoE
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.catalogs import installed
from forge_testing.laws import Case, layout_law
from forge_testing.outcomes import losses_of
from forge_testing.runs import whole_tensors

DENSE = Transformer(
    vocab_size=32,
    dim=128,
    layers=2,
    attention=GroupedQueryAttention(heads=4, kv_heads=2, bias=True, output_bias=True),
    ffn=SwiGLU(hidden=128),
)
EXPERTS = Transformer(
    vocab_size=32, dim=128, layers=2, attention=GroupedQueryAttention(heads=4), ffn=MoE(experts=4, hidden=128)
)
MODELS: Mapping[str, tuple[Any, LoRA]] = {
    "lora": (DENSE, LoRA(rank=4, alpha=16, base_dtype="nf4")),
    "dora": (DENSE, LoRA(rank=4, alpha=16, method="dora", train=("*norm*", "*.q.bias"), base_dtype="nf4")),
    # Attention keeps no adapters, and is in NF4 all the same
    "experts": (EXPERTS, LoRA(rank=4, alpha=16, targets=("stack",), base_dtype="nf4")),
}
SETTINGS: Mapping[str, Any] = {"precision": "fp64", "global_batch_size": 8, "seq_len": 16}
_FOLDERS = tempfile.TemporaryDirectory(prefix="nf4-")


@cache
def base_of(model: Any) -> str:
    """A run of that model; the first caller is one process, before ranks are forked."""
    folder = tempfile.mkdtemp(dir=_FOLDERS.name)
    job = tiny_job(folder, installed(), model=model, steps=2, **SETTINGS)
    return str(Trainer(job, catalog=installed(), echo=lambda line: None).run().folder)


class Keep(TrainingHook):
    """Keeps the whole parameters that train, and their number of bytes on this rank."""

    def on_train_begin(self, context: Any) -> None:
        self.state: dict[str, Tensor] = {}

    def on_train_end(self, context: Any) -> None:
        trained = {name: p for name, p in context.model.named_parameters() if p.requires_grad}
        self.state = whole_tensors(trained, context.build.mesh)

    def state_dict(self) -> dict[str, Any]:
        return {}


def observation(name: str) -> Callable[[Path, Mapping[str, Any]], tuple[list[float], Mapping[str, Tensor]]]:
    def observe(folder: Path, changes: Mapping[str, Any]) -> tuple[list[float], Mapping[str, Tensor]]:
        model, plugin = MODELS[name]
        settings = {**SETTINGS, **changes, "steps": 3, "data": {"sources": (Numbers(ignored=3),)}}
        load = {"load": Parts(path=base_of(model))}
        job = tiny_job(str(folder), installed(), model=model, plugins={"lora": plugin}, checkpoint=load, **settings)
        keep = Keep()
        summary = Trainer(job, catalog=installed(), hooks=[keep], echo=lambda line: None).run()
        return losses_of(summary), keep.state

    return observe


def same_training(ranks: Sequence[Any], alone: Any) -> None:
    losses, weights = alone
    assert len(losses) == 3
    assert any("lora_" in name for name in weights)
    for of_rank, trained in ranks:
        assert of_rank == pytest.approx(losses, rel=1e-9)
        assert trained.keys() == weights.keys()
        for name, weight in trained.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-6, atol=1e-9)


test_layouts = layout_law(
    *(
        Case(name, observe=observation(name), compare=same_training, layouts=layouts)
        for name, layouts in {
            "lora": ("fsdp2", "tp2", "pp2", "cp2", "fsdp2_tp2", "compiled"),
            "dora": ("fsdp2", "tp2_whole_sequences"),
            "experts": ("tp2", "fsdp2_ep2"),
        }.items()
    )
)
