"""Every tap point of models with experts, latents, images and modalities sees the same under layouts, in float64."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from forge_core.data.loader import TrainLoader
from forge_core.engine.step import Stepper
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_parallel import ContextParallel, TensorParallel
from forge_plugin_taps import Taps, recorder_of
from forge_plugin_transformer import SwiGLU, Transformer
from forge_plugin_vision import VisionLanguage
from forge_testing import Numbers
from forge_testing.processes import run_on_ranks
from forge_testing.runs import tiny_run
from forge_testing.vision import RandomImages, tiny_language, tiny_vision

LATENT = MultiHeadLatentAttention(
    heads=4, q_lora_rank=10, kv_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
)
EXPERTS = MoE(experts=4, hidden=16, shared_experts=1, router=SigmoidTopK(top_k=2))
CROSS = CrossAttention(layers=(1,), heads=4, kv_heads=2, qk_norm=True, gate_start=0.5, ffn=SwiGLU(hidden=24))
MODELS = {
    "experts and latents": (
        Transformer(vocab_size=32, dim=16, layers=2, init_std=0.3, attention=LATENT, ffn=EXPERTS),
        Numbers(),
    ),
    **{
        name: (VisionLanguage(language=tiny_language(), vision=tiny_vision(), fusion=fusion), RandomImages())
        for name, fusion in {"modalities": MixtureOfTransformers(), "cross-attention": CROSS}.items()
    },
}
LAYOUTS = {"tp2": {"tp": TensorParallel(degree=2)}, "cp2": {"cp": ContextParallel(degree=2)}}
PARTIAL = ("*.expert_out", "*.shared_out")


def captured(folder, name, parallel, points=("*",)):
    """Values at all points and columns of tokens, of one training step."""
    model, data = MODELS[name]
    run = tiny_run(
        folder, model=model, precision="fp64", steps=1, seq_len=24, micro_batch_size=2, data={"sources": (data,)},
        parallel={**parallel, "taps": Taps(points=tuple(points), positions="all")},
    )  # fmt: skip
    recorder, loader = recorder_of(run.model), TrainLoader(run.job, run.datasets, run.context)
    info = recorder.agree()
    recorder.begin(1)
    Stepper(run).gradients(loader.next_step(), 0)
    sample = recorder.end()
    loader.close()
    return {point: sample.gather(point) for point in info.points}, dict(sample.tokens)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return {name: captured(folder, name, {}) for name in MODELS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_points_see_the_same_under_layouts(alone, layout, tmp_path):
    def whole(name):  # sums over experts are nowhere whole under tp, and refused
        names = alone[name][0]
        return [point for point in names if not any(fnmatchcase(point, pattern) for pattern in PARTIAL)]

    def rank(_):
        return {name: captured(Path(tmp_path), name, LAYOUTS[layout], whole(name)) for name in MODELS}

    for name, (values, tokens) in run_on_ranks(2, rank)[0].items():
        expected, columns = alone[name]
        assert [*values] == whole(name)
        assert all(torch.equal(tokens[column], columns[column]) for column in columns)
        for point, tensor in values.items():
            assert (tensor.double() - expected[point].double()).abs().max() < 1e-12, (name, point)
            assert tensor.double().std() > 0, (name, point)
