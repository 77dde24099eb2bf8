"""`cross_attention` keeps the contract of fusions, and has one curve under every layout."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

import pytest
from cross_attention_models import LANGUAGE, SMALL, Open

from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_plugin_compile import Compile
from forge_plugin_parallel import ContextParallel, PipelineParallel, TensorParallel
from forge_plugin_parallel.pp import splits_backward
from forge_plugin_vision import LinearAdapter, MLPAdapter, TiledViT, VisionLanguage, VisionPart, ViT
from forge_plugin_vision.suite import VisionModelSuite
from forge_plugin_vision.testing import RandomImages, tiny_language, tiny_vision
from forge_testing import tiny_job
from forge_testing.curves import Curve, Difference, train
from forge_testing.processes import run_on_ranks


class TestCrossAttention(VisionModelSuite):
    """The first rank of a pipeline has no block, so it only hands features on."""

    component = VisionLanguage(
        language=tiny_language(), vision=tiny_vision(), fusion=Open(layers=(1,), qk_norm=True, **SMALL)
    )
    layouts = ("replicate2", "fsdp2", "tp2", "pp2", "cp2", "checkpointing2")


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
    layouts = ("replicate2", "fsdp2", "tp2", "pp2", "cp2", "checkpointing2")


NINE_FEATURES = VisionPart(
    encoder=ViT(dim=16, layers=1, heads=2, patch=2, size=(2, 6)), adapter=MLPAdapter(hidden=8), images_per_sequence=3
)
"""Of a row: a number that ranks cannot divide equally."""
FOUR_LAYERS = VisionLanguage(
    language=LANGUAGE, vision=NINE_FEATURES, fusion=Open(every=2, sees="all", place="after", **SMALL)
)
STAGES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": TensorParallel(degree=2)},
    "tp2 without sequence parallel": {"tp": TensorParallel(degree=2, sequence_parallel=False, loss_parallel=False)},
    "cp2, ulysses": {"cp": ContextParallel(degree=2, method="ulysses")},
    "compiled without graph breaks": {"compile": Compile(backend="eager", fullgraph=True)},
}
if splits_backward(version("torch")):
    STAGES["pp2, zero bubble"] = {"pp": PipelineParallel(degree=2, schedule="interleaved_zero_bubble")}


def job(folder: Any, catalog: Catalog, **changes: Any) -> Job:
    settings = {"model": FOUR_LAYERS, "data": {"sources": (RandomImages(),)}, "precision": "fp64"}
    return tiny_job(str(folder), catalog, **settings, steps=2, global_batch_size=8, seq_len=16, **changes)


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Curve, dict[str, Curve]]:
    """The curve of one process, and those of all `STAGES`."""
    catalog = Catalog.installed()
    make = partial(job, tmp_path_factory.mktemp("run"), catalog)
    jobs = {name: make(parallel=stages, micro_batch_size=2) for name, stages in STAGES.items()}
    # Compiled once: a second rank would trace the same graphs.
    compiled = {name: jobs.pop(name) for name in [*jobs] if "compile" in STAGES[name]}
    others = {}
    for ranks, of_ranks in ((1, compiled), (2, jobs)):

        def curves_of(rank: int, of_ranks: dict[str, Job] = of_ranks) -> dict[str, Curve]:
            return {name: train(each, catalog) for name, each in of_ranks.items()}

        others |= run_on_ranks(ranks, curves_of)[0]
    return train(make(), catalog), others


@pytest.mark.parametrize("name", STAGES)
def test_other_forms_of_the_stages_have_the_same_curve(curves, name):
    one, others = curves
    difference = Difference.between(others[name], one)
    assert difference.initial == 0
    assert max(difference.loss, difference.norm, difference.gradient, difference.evaluation) < 1e-12
    assert difference.weights < 1e-10
