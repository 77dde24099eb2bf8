"""A tower whose blocks are plain modules of torch trains alike when data parallelism divides them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen
from torch import Tensor, nn

from forge_core import Catalog, Trainer
from forge_core.contracts.contexts import BuildContext
from forge_kit.nn.modules import Linear
from forge_plugin_parallel import FSDP
from forge_plugin_vision import ImageFormat, VisionEncoderComponent, VisionLanguage
from forge_testing import tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.vision import RandomImages, tiny_language, tiny_vision


@frozen(kw_only=True)
class Plain(VisionEncoderComponent):
    """Two blocks of `nn.Linear`, which initialise themselves as torch's modules do."""

    def image_format(self) -> ImageFormat:
        return ImageFormat(patch=2, grid=(2, 2))

    def build(self, context: BuildContext, taps: Sequence[int]) -> nn.Module:
        return PlainTower(self.image_format().values)


class PlainTower(nn.Module):
    width = 16

    def __init__(self, values: int) -> None:
        super().__init__()
        self.patch = Linear(values, self.width)
        self.blocks = nn.ModuleList([nn.Linear(self.width, self.width) for _ in range(2)])

    def forward(self, patches: Tensor, images: object) -> tuple[Tensor, ...]:
        x = self.patch(patches)
        for block in self.blocks:
            x = x + block(x).tanh()
        return (x,)


def losses(folder: Path, name: str, **changes: Any) -> list[float]:
    model = VisionLanguage(language=tiny_language(), vision=evolve(tiny_vision(), encoder=Plain()))
    settings: dict[str, Any] = {"model": model, "data": {"sources": (RandomImages(),)}, "global_batch_size": 4}
    settings |= {"seq_len": 24, "steps": 3, "precision": "fp64", "job": {"name": name, "output": str(folder)}}
    job = tiny_job(str(folder), Catalog.installed(), **settings | changes)
    run = Trainer(job, echo=lambda line: None).run()
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "grad_norm" in line]


def test_blocks_that_are_plain_modules_of_torch_are_sharded(tmp_path):
    sharded = run_on_ranks(2, lambda rank: losses(tmp_path, "fsdp2", parallel={"fsdp": FSDP()}))[0]
    assert sharded == pytest.approx(losses(tmp_path, "alone"), rel=1e-12)
    assert len(sharded) == 3
