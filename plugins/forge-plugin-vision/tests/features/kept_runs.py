"""Runs of tiny vision-language models with a frozen tower, whose features are kept or not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, frozen
from torch import Tensor

from forge_core import Catalog, Trainer, TrainingHook
from forge_core.contracts.components import ModelComponent
from forge_core.job import Job
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_freeze import Freeze, Stage
from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_transformer import SwiGLU
from forge_plugin_vision import Joint, Merger, QwenViT, VisionLanguage, VisionPart, ViT
from forge_plugin_vision.features import Features
from forge_testing import tiny_job
from forge_testing.vision import RandomImages, tiny_language, tiny_vision

FROZEN = Freeze(stages=(Stage(freeze=("vision.encoder.*",)),))
EPOCH, ROWS = 3, 4
"""Steps of an epoch, and rows of a step; every third row has no image."""


def model(fusion: str = "joint") -> VisionLanguage:
    language: ModelComponent = tiny_language()
    if fusion == "deepstack":  # images of several sizes, several in a row
        tower = QwenViT(dim=16, layers=2, heads=2, patch=2, window=4, full_attention=(1,))
        vision = VisionPart(encoder=tower, adapter=Merger(), images_per_sequence=2, patches_per_sequence=24)
        return VisionLanguage(language=language, vision=vision, fusion=Joint(deepstack=(0,)))
    if fusion == "naflex":
        tower = ViT(dim=16, layers=2, heads=2, patch=2, size=(8, 8), position_interpolation="bilinear")
        vision = VisionPart(encoder=tower, images_per_sequence=2, patches_per_sequence=24)
        return VisionLanguage(language=language, vision=vision)
    fusions = {
        "joint": Joint(),
        "cross_attention": CrossAttention(
            gate_start=0.5, every=2, heads=4, kv_heads=2, ffn=SwiGLU(hidden=24), qk_norm=True
        ),
        "mot": MixtureOfTransformers(),
    }
    return VisionLanguage(language=language, vision=tiny_vision(), fusion=fusions[fusion])


@frozen
class Outcome:
    losses: list[float]
    weights: Mapping[str, Tensor]
    tower_rows: Sequence[Sequence[int]]
    """By step, the rows of each call of the tower on this rank."""
    lines: Sequence[Mapping[str, Any]]

    @property
    def hits(self) -> list[float]:
        return [line["features/hits"] for line in self.lines]

    def equals(self, other: Outcome) -> bool:
        """Whether losses and weights are equal to the bit."""
        return self.losses == other.losses and self.weights_equal(other)

    def weights_equal(self, other: Outcome) -> bool:
        same = all(weight.equal(other.weights[name]) for name, weight in self.weights.items())
        return same and self.weights.keys() == other.weights.keys()


@define(kw_only=True, slots=False)
class Watch(TrainingHook):
    """Notes each call of the tower, and the weights at the end."""

    def on_train_begin(self, context: Any) -> None:
        self.calls: list[list[int]] = []
        vision = getattr(context.model, "vision", None)
        if hasattr(vision, "encoder"):  # the first rank of a pipeline alone has one
            vision.encoder.register_forward_pre_hook(lambda _, inputs: self.calls[-1].append(len(inputs[0])))

    def on_step_begin(self, context: Any) -> None:
        self.calls.append([])

    def on_train_end(self, context: Any) -> None:
        self.weights = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in context.model.named_parameters()
        }


def job(folder: Path, name: str = "run", *, features: Features | None = None, **changes: Any) -> Job:
    plugins = {"freeze": FROZEN, **changes.pop("plugins", {})}
    if features is not None:
        plugins["features"] = features
    data = {"sources": (RandomImages(sequences=EPOCH * ROWS, held_out=0, has_entries=False),)}
    where = {"name": name, "output": str(folder)}
    settings: dict[str, Any] = {"model": model(), "steps": 2 * EPOCH, "global_batch_size": ROWS, "seq_len": 24}
    settings |= {"data": data, "job": where, "device": "cpu", "gc_interval": 0}
    return tiny_job(str(folder), Catalog.installed(), **settings | changes, plugins=plugins)


def run(folder: Path, name: str = "run", *, hooks: Sequence[TrainingHook] = (), **changes: Any) -> Outcome:
    """Train two epochs of 12 rows, if not said otherwise. Collective."""
    watch = Watch()
    trainer = Trainer(
        job(folder, name, **changes), hooks=[*hooks, watch], catalog=Catalog.installed(), echo=lambda line: None
    )
    summary = trainer.run()
    lines = map(json.loads, (summary.folder / "metrics.jsonl").read_text().splitlines())
    lines = [line for line in lines if "loss" in line]
    return Outcome([line["loss"] for line in lines], watch.weights, watch.calls, lines)
