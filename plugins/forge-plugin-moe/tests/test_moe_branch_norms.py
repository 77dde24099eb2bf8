"""Norms around routed and around shared experts, and a router that reads the residual stream (Gemma 4)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from forge_plugin_moe import MoE, SoftmaxTopK
from forge_plugin_transformer import GroupedQueryAttention, RMSNorm, SwiGLU, Transformer
from forge_plugin_transformer.pattern import FFNPattern
from forge_testing import tiny_job
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.runs import tiny_run

KEYS = {"experts": 4, "hidden": 8, "activation": "geglu", "shared_experts": 2, "branch_norm": RMSNorm()}
ROUTER = SoftmaxTopK(top_k=2, input_norm=True, expert_scale=True)


def model_of(ffn, **keys):
    return Transformer(
        dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=2), ffn=ffn, norm=RMSNorm(), **keys
    )


def test_a_layer_computes_both_branches_by_its_formula(tmp_path):
    run = tiny_run(tmp_path, model=model_of(MoE(router=ROUTER, **KEYS)), precision="fp64")
    layer = run.model.layers["0"]
    ffn = layer.ffn.double()
    with torch.no_grad():
        for number, parameter in enumerate(ffn.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            parameter.copy_(noise if parameter.ndim > 1 else 1 + 0.3 * noise)
    assert isinstance(layer.ffn_norm, torch.nn.Identity)
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def normed(x, weight=None):
        return F.rms_norm(x, (16,), weight, 1e-6 if weight is None else 1e-5)

    logits = (normed(x) * ffn.router.scale / 4) @ ffn.router.weight.T
    best, chosen = logits.softmax(-1).topk(2, -1)
    weights = best / best.sum(-1, keepdim=True) * ffn.router.expert_scale[chosen]
    read, routed = normed(x, ffn.routed_norm.weight)[0], []
    for row, own, experts in zip(read, weights[0], chosen[0], strict=True):
        gate, up, down = (getattr(ffn.experts, name).weight[experts] for name in ("gate", "up", "down"))
        inner = F.gelu(gate @ row, approximate="tanh") * (up @ row)
        routed.append((own[:, None] * (down @ inner[..., None])[..., 0]).sum(0))
    read = normed(x, ffn.shared_norm.weight)
    shared = F.gelu(read @ ffn.shared.gate.weight.T, approximate="tanh") * (read @ ffn.shared.up.weight.T)
    expected = normed(torch.stack(routed)[None], ffn.routed_post_norm.weight)
    expected = expected + normed(shared @ ffn.shared.down.weight.T, ffn.shared_post_norm.weight)
    torch.testing.assert_close(ffn(x, {}), expected, rtol=1e-12, atol=1e-12)


MISTAKES = {
    "no shared experts": ({"shared_experts": 0}, at("model.ffn.branch_norm", "shared_experts")),
    "a gate": ({"shared_gate": True}, at("model.ffn.shared_gate", "branch_norm")),
    "dense layers": ({"first_dense": 1}, at("model.ffn.first_dense", "branch_norm", "pattern")),
    "every other layer": ({"every": 2}, at("model.ffn.every", "branch_norm", "pattern")),
}


@pytest.mark.parametrize(("keys", "problem"), MISTAKES.values(), ids=MISTAKES)
def test_a_layer_that_would_lack_a_norm_is_refused(tmp_path, keys, problem):
    check_problems(
        problems_of(tiny_job(str(tmp_path), model=model_of(MoE(router=ROUTER, **{**KEYS, **keys})))), problem
    )


def test_a_norm_that_both_parts_share_is_refused(tmp_path):
    model = model_of(MoE(router=ROUTER, **KEYS), norm_placement="shared", residual="parallel")
    check_problems(problems_of(tiny_job(str(tmp_path), model=model)), at("model.norm_placement", "MoE"))


def test_other_layers_of_a_pattern_have_the_norm_before_them(tmp_path):
    pattern = FFNPattern(layers=("dense", "moe"), kinds={"dense": SwiGLU(hidden=8), "moe": MoE(router=ROUTER, **KEYS)})
    layers = tiny_run(tmp_path, model=model_of(pattern)).model.layers
    assert [isinstance(layers[name].ffn_norm, torch.nn.Identity) for name in ("0", "1")] == [False, True]
