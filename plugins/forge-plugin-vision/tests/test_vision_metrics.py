"""Metrics of images, and FLOPs as they are counted: of the global batch, under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forge_core import Catalog, Trainer, TrainingHook
from forge_core.job import MetricsSection
from forge_plugin_freeze import Freeze, Stage
from forge_plugin_parallel import FSDP, ContextParallel, PipelineParallel, TensorParallel
from forge_plugin_transformer import GroupedQueryAttention, LayerNorm, Transformer
from forge_plugin_vision import GRIDS, PATCHES, VisionLanguage
from forge_testing import tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.vision import RandomImages, tiny_language, tiny_vision

MODEL = VisionLanguage(language=tiny_language(), vision=tiny_vision())
S, B = 24, 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2, accumulation": {"parallel": {"fsdp": FSDP()}, "micro_batch_size": 1},
    "tp2": {"parallel": {"tp": TensorParallel(degree=2)}},
    "cp2": {"parallel": {"cp": ContextParallel(degree=2)}},
    "pp2": {"parallel": {"pp": PipelineParallel(degree=2)}, "micro_batch_size": 2},
}
SOURCES = (
    RandomImages(name="images", weight=3.0, text_only=3, held_out=5),
    RandomImages(name="text", text_only=1, has_entries=False),
)
STAGES = (
    Stage(steps=1),
    Stage(freeze=("vision.encoder.*",), steps=1),
    Stage(train=("vision.*",), steps=1),
    Stage(train=("layers.1.*", "norm.*", "head.*")),
)

# --- closed form: FLOPs forward and backward, of widths 16 (model and encoder), of 4 patches of 12 values ------------

PATCH, ENCODER = 6 * 4 * 12 * 16, 6 * 4 * (4 * 16**2 + 2 * 16 * 64) + 12 * 16 * 4 * 4
ADAPTER = 6 * 4 * (16 * 8 + 8 * 16)
IMAGE = PATCH + ENCODER + ADAPTER


def run(folder: Path, name: str, *hooks: TrainingHook, **changes: Any) -> list[dict[str, Any]]:
    """Returns the lines of the run's steps, on the first rank."""
    settings: dict[str, Any] = {"model": MODEL, "data": {"sources": SOURCES}}
    settings |= {"global_batch_size": B, "seq_len": S, "steps": 4, "precision": "fp64"}
    settings |= {"metrics": MetricsSection(peak_tflops=1e-3), "plugins": {"freeze": Freeze(stages=STAGES)}}
    catalog = Catalog.installed()
    job = tiny_job(str(folder), catalog, job={"name": name, "output": str(folder)}, **settings | changes)
    summary = Trainer(job, hooks=hooks, catalog=catalog, echo=lambda line: None).run()
    records = map(json.loads, (summary.folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "grad_norm" in record]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def layouts(rank: int) -> dict[str, list[dict[str, Any]]]:
        return {name: run(folder, name.replace(", ", "-"), **changes) for name, changes in LAYOUTS.items()}

    return {"one process": run(folder, "alone"), **run_on_ranks(2, layouts)[0]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_they_are_of_the_global_batch(lines, name):
    keys = ["vision/patches_per_sequence", "vision/fill", "vision/sequences_without_images", "flops_per_token"]
    keys += ["loss/source/images", "loss/source/text"]
    for line, expected in zip(lines[name], lines["one process"], strict=True):
        assert {key: line[key] for key in keys} == pytest.approx({key: expected[key] for key in keys}, rel=1e-12)


def test_flops_are_those_of_the_images_that_there_are(lines, build, make_job):
    language = build(make_job(model=MODEL.language, seq_len=S)).model.flops(S)
    for line, ranks in ((lines["one process"][0], 1), (lines["fsdp2, accumulation"][0], 2)):
        images = line["vision/patches_per_sequence"] / 4
        assert 0 < images < 2, "as many as rows have room for would be no test"
        assert line["flops_per_token"] == pytest.approx(language + images * IMAGE / S, rel=1e-12)
        assert line["mfu"] == pytest.approx(line["flops_per_token"] * line["tokens_per_second"] / 1e9 / ranks)


@define(slots=False)
class SourceLosses(TrainingHook):
    """Computes each source's loss before the update of a step, row by row and without the engine."""

    def __attrs_post_init__(self) -> None:
        self.losses: list[dict[str, float]] = []

    @torch.no_grad()
    def on_gradients(self, context: Any) -> None:
        losses: dict[str, list[Tensor]] = {"images": [], "text": []}
        for batch in context.batches:
            for number, source in enumerate(batch["sources"].tolist()):
                row = {name: tensor[number : number + 1] for name, tensor in batch.items()}
                if source == 1:  # of text, whose rows need no entries of images
                    row = {name: tensor for name, tensor in row.items() if name not in (PATCHES, GRIDS)}
                logits = context.model.head.logits(context.model(row))[0]
                own = F.cross_entropy(logits, row["labels"][0], reduction="none")
                losses["text" if source else "images"].append(own[row["labels"][0] >= 0])
        self.losses.append({f"loss/source/{name}": torch.cat(own).mean().item() for name, own in losses.items()})


def test_each_source_has_its_own_loss(tmp_path):
    """One of images, and one of text."""
    hook = SourceLosses()
    records = run(tmp_path, "run", hook, plugins={}, micro_batch_size=2)
    assert len(hook.losses) == 4
    for record, expected in zip(records, hook.losses, strict=True):
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-12)


@define(slots=False)
class Counted(TrainingHook):
    """Lets torch count the products of each step's forward and backward pass, attention as products."""

    def __attrs_post_init__(self) -> None:
        self.flops: list[int] = []

    def on_step_begin(self, context: Any) -> None:
        self._mode, self._kernel = FlopCounterMode(display=False), sdpa_kernel(SDPBackend.MATH)
        self._kernel.__enter__()
        self._mode.__enter__()

    def on_gradients(self, context: Any) -> None:
        self._mode.__exit__(None, None, None)
        self._kernel.__exit__(None, None, None)
        self.flops.append(self._mode.get_total_flops())


def test_flops_of_what_trains_are_those_that_torch_counts(tmp_path):
    """Every row has as many images as there is room for, since the tower computes what fills a row, too."""
    counted = Counted()
    # Without RMS norms, which compute their weights' gradients by products on a CPU.
    attention = GroupedQueryAttention(heads=4, kv_heads=2)
    language = Transformer(vocab_size=32, dim=16, layers=2, attention=attention, norm=LayerNorm())
    model = VisionLanguage(language=language, vision=tiny_vision())
    records = run(tmp_path, "run", counted, model=model, data={"sources": (RandomImages(text_only=0, held_out=0),)})
    assert records[0]["vision/fill"] == 1
    # Two layers' causal half, which torch counts whole; gradients of the first trained product's input, which it omits.
    causal = 2 * 6 * 16 * S * (S * B)
    omitted = (PATCH * 2 * B / 3, ADAPTER / 2 * 2 * B / 3, PATCH * 2 * B / 3, 0)  # the last begins with a norm
    halves = (causal, causal, causal, causal * 2 / 3)
    for record, flops, less, half in zip(records, counted.flops, omitted, halves, strict=True):
        assert record["flops_per_token"] * S * B == pytest.approx(flops + less - half, rel=1e-12)
