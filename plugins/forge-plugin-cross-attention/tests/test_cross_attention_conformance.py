"""`cross_attention` keeps the contract of fusions, and has one curve under every layout."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cross_attention_models import LANGUAGE, SMALL, Open

from forge_plugin_parallel.pp import splits_backward
from forge_plugin_vision import LinearAdapter, MLPAdapter, TiledViT, VisionLanguage, VisionPart, ViT
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, same_curve, train
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase
from forge_testing.suites.vision import VisionModelSuite
from forge_testing.vision import RandomImages, tiny_language, tiny_vision


class TestCrossAttention(VisionModelSuite):
    """The first rank of a pipeline has no block, so it only hands features on."""

    component = VisionLanguage(
        language=tiny_language(), vision=tiny_vision(), fusion=Open(layers=(1,), qk_norm=True, **SMALL)
    )
    layouts = ("replicate2", "tp2", "pp2", "cp2", "checkpointing2")


class TestTiles(VisionModelSuite):
    """Images of one to two tiles, behind the encoder of Llama 3.2 Vision."""

    component = VisionLanguage(
        language=tiny_language(),
        vision=VisionPart(
            encoder=TiledViT(
                dim=16, layers=2, global_layers=1, heads=2, hidden=24, patch=2, tile=4,
                arrangements=((1, 1), (1, 2), (2, 1)), intermediate=(0,), gate_start=0.5,
            ),
            adapter=LinearAdapter(),
            images_per_sequence=2,
        ),
        fusion=Open(layers=(1,), sees="together", qk_norm=True, markers=8, **SMALL),
    )  # fmt: skip
    layouts = ("tp2", "cp2", "checkpointing2")


NINE_FEATURES = VisionPart(
    encoder=ViT(dim=16, layers=1, heads=2, patch=2, size=(2, 6)), adapter=MLPAdapter(hidden=8), images_per_sequence=3
)
"""Of a row: a number that ranks cannot divide equally."""
FOUR_LAYERS = VisionLanguage(
    language=LANGUAGE, vision=NINE_FEATURES, fusion=Open(every=2, sees="all", place="after", **SMALL)
)
TABLES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": {"degree": 2}},
    "tp2 without sequence parallel": {"tp": {"degree": 2, "sequence_parallel": False, "loss_parallel": False}},
    "cp2, ulysses": {"cp": {"degree": 2, "method": "ulysses"}},
}
if splits_backward(version("torch")):
    TABLES["pp2, zero bubble"] = {"pp": {"degree": 2, "schedule": "interleaved_zero_bubble"}}
LAYOUTS = {name: LayoutCase(ranks=2, parallel=tables, micro_batch_size=4) for name, tables in TABLES.items()}
COMPILED = LayoutCase(ranks=1, parallel={"compile": {"backend": "eager", "fullgraph": True}}, micro_batch_size=4)
"""On one rank: a second one would trace the same graphs."""


def curve(folder: Path, changes: Mapping[str, Any]) -> Curve:
    settings = {"model": FOUR_LAYERS, "data": {"sources": (RandomImages(),)}, "precision": "fp64"}
    sizes = {"steps": 2, "global_batch_size": 8, "seq_len": 16}
    return train(tiny_job(str(folder), installed(), **settings, **sizes, **changes))


test_layouts = layout_law(
    Case(
        "further stages",
        observe=curve,
        compare=same_curve,
        layouts={**LAYOUTS, "compiled without graph breaks": COMPILED},
    )
)
