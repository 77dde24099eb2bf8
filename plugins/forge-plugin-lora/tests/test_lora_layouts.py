"""Adapters under every layout: the curve of one process, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_plugin_lora import LoRA
from forge_plugin_moe import MoE
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, SplittableModel, curves, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, same_curve
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase

DENSE = Transformer(
    vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2, bias=True, output_bias=True)
)
EXPERTS = Transformer(
    vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4), ffn=MoE(experts=4, hidden=16)
)
# Rank 4 and s = 4: updates are large, so that an error in an adapter's share of a sum is no rounding error
METHODS: Mapping[str, tuple[Any, LoRA]] = {
    "lora": (DENSE, LoRA(rank=4, alpha=16, random_base=True)),
    "dora": (DENSE, LoRA(rank=4, alpha=16, method="dora", train=("*norm*",), random_base=True)),
    "dora beside experts": (
        EXPERTS,
        LoRA(rank=4, alpha=16, method="dora", targets=("attention.*",), random_base=True),
    ),
    "experts": (EXPERTS, LoRA(rank=4, alpha=16, train=("*router*",), random_base=True)),
    "torch's layers": (SplittableModel(), LoRA(rank=2, alpha=4, method="rslora", random_base=True)),
}


def observation(name: str) -> Callable[[Path, Mapping[str, Any]], Curve]:
    def observe(folder: Path, changes: Mapping[str, Any]) -> Curve:
        model, plugin = METHODS[name]
        settings: dict[str, Any] = {"steps": 4, "precision": "fp64", "global_batch_size": 8, "seq_len": 16}
        data = {"sources": (Numbers(ignored=3),)}
        job = tiny_job(
            str(folder), installed(), model=model, plugins={"lora": plugin}, data=data, **settings, **changes
        )
        return curves.train(job, installed())

    return observe


def same_training(ranks: Sequence[Curve], alone: Curve) -> None:
    """Adapters and what `train` names have moved, and the base has not by a bit; all as in one process."""
    moved = {name for name, weight in alone.weights.items() if not weight.equal(alone.initial[name])}
    assert {name for name in alone.weights if "lora_" in name} <= moved
    assert not [name for name in moved if not any(part in name for part in ("lora_", "norm", "router"))]
    same_curve(ranks, alone)


LAYOUTS = ("fsdp2", "tp2", "tp2_whole_sequences", "pp2", "cp2", "fsdp2_tp2", "compiled")
test_layouts = layout_law(
    *(
        Case(name, observe=observation(name), compare=same_training, layouts=layouts)
        for name, layouts in {
            "lora": LAYOUTS,
            "dora": LAYOUTS,
            "dora beside experts": ("fsdp2_ep2",),
            "experts": ("tp2", "fsdp2_ep2"),
            "torch's layers": {"tp2": LayoutCase(ranks=2, parallel={"tp": {"degree": 2}})},
        }.items()
    )
)
