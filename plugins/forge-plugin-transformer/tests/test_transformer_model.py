"""The model: what its parts compute together, how it starts, and what it tells the engine and the stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatch
from itertools import chain
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forge_core.contracts.model import Model
from forge_kit.nn.generation import Generates
from forge_plugin_transformer import GELU, FFNComponent, GroupedQueryAttention, LayerNorm, SwiGLU

MakeModel = Callable[..., Any]


def logits(model: Any, **batch: Tensor) -> Tensor:
    return model.head.logits(model(batch))


# --- what it computes ----------------------------------------------------------------------------------------------


def test_forward_equals_its_parts_in_order(make_model: MakeModel, ids: Tensor) -> None:
    model, batch = make_model(), {"input_ids": ids}
    carry = model.embed(batch)
    for layer in model.layers.values():
        carry = layer(carry, batch)
    assert torch.equal(model.finish(carry, batch), model(batch))


def test_later_tokens_change_nothing_earlier(make_model: MakeModel, ids: Tensor) -> None:
    model, changed = make_model(), ids.clone()
    changed[:, 10:] = 0
    torch.testing.assert_close(logits(model, input_ids=changed)[:, :10], logits(model, input_ids=ids)[:, :10])


@pytest.mark.parametrize("backend", ["flash", "math", "gemm"])
def test_documents_in_one_sequence_equal_separate_ones(make_model: MakeModel, ids: Tensor, backend: str) -> None:
    model = make_model(attention=GroupedQueryAttention(heads=4, kv_heads=2, backend=backend))
    document_ids = torch.tensor([[7] * 5 + [3] * 11, [0] * 12 + [1] * 4])
    packed = logits(model, input_ids=ids, document_ids=document_ids)
    parts = [(0, 0, 5), (0, 5, 16), (1, 0, 12), (1, 12, 16)]
    for row, start, stop in parts:
        torch.testing.assert_close(
            packed[row, start:stop], logits(model, input_ids=ids[row : row + 1, start:stop])[0], atol=2e-5, rtol=1e-4
        )


def test_positions_of_the_batch_replace_their_numbers(make_model: MakeModel, ids: Tensor) -> None:
    model = make_model()
    plain, positions = logits(model, input_ids=ids), torch.arange(16).expand(2, -1)
    shifted, stretched = (logits(model, input_ids=ids, positions=p) for p in (positions + 5, positions * 3))
    torch.testing.assert_close(shifted, plain, atol=2e-5, rtol=1e-4)
    assert (stretched - plain).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_hidden_states_have_the_compute_dtype(make_model: MakeModel, ids: Tensor, dtype: torch.dtype) -> None:
    model, reference = make_model(dtype=dtype, norm=LayerNorm(), ffn=GELU()), make_model(norm=LayerNorm(), ffn=GELU())
    hidden = model({"input_ids": ids})
    assert hidden.dtype == dtype
    assert {p.dtype for p in model.parameters()} == {torch.promote_types(dtype, torch.float32)}
    tolerance = 1e-5 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(hidden.float(), reference({"input_ids": ids}), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["flash", "gemm"])
def test_gradients_in_float64_equal_those_in_float32(make_model: MakeModel, ids: Tensor, backend: str) -> None:
    attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True, backend=backend)
    models = [make_model(attention=attention, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    for model in models:
        logits(model, input_ids=ids).logsumexp(-1).sum().backward()
    for single, double in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(single.grad.double(), double.grad, atol=1e-3, rtol=1e-3)


def test_recomputed_blocks_give_the_same_gradients(make_model: MakeModel, ids: Tensor) -> None:
    gradients = []
    for recompute in (False, True):
        model, batch = make_model(), {"input_ids": ids}
        carry = model.embed(batch)
        for layer in model.layers.values():
            carry = checkpoint(layer, carry, batch, use_reentrant=False) if recompute else layer(carry, batch)
        model.finish(carry, batch).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(g is None or torch.equal(g, h) for g, h in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    "keys",
    [{}, {"norm_placement": "both", "residual": "parallel"}, {"norm_placement": "shared", "residual": "parallel"}],
)
def test_a_compiled_block_has_no_graph_break(make_model: MakeModel, ids: Tensor, keys: dict[str, str]) -> None:
    model, batch = make_model(**keys), {"input_ids": ids}
    expected = model(batch)
    for layer in model.layers.values():
        layer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(batch), expected)


# --- how a block combines its parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["pre", "post", "both"])
@pytest.mark.parametrize("residual", ["sequential", "parallel"])
def test_norms_stand_before_and_after_parts(make_model: MakeModel, ids: Tensor, placement: str, residual: str) -> None:
    model = make_model(norm_placement=placement, residual=residual)
    block, x = model.layers["1"], model.embed({"input_ids": ids})[0]
    for parameter in block.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5)
    before, after = placement in ("pre", "both"), placement in ("post", "both")
    norms = {name for name, child in block.named_children() if name.endswith("norm") and [*child.parameters()]}
    assert norms == {
        *(["attention_norm", "ffn_norm"] if before else []),
        *(["attention_post_norm", "ffn_post_norm"] if after else []),
    }

    def update(name: str, x: Tensor) -> Tensor:
        x = getattr(block, f"{name}_norm")(x) if before else x
        x = getattr(block, name)(x, {})
        return getattr(block, f"{name}_post_norm")(x) if after else x

    middle = x + update("attention", x)
    expected = middle + update("ffn", x if residual == "parallel" else middle)
    torch.testing.assert_close(block((x,), {})[0], expected)


def test_one_norm_stands_before_both_parts(make_model: MakeModel, ids: Tensor) -> None:
    model = make_model(norm_placement="shared", residual="parallel", residual_scale=0.5)
    block, x = model.layers["1"], model.embed({"input_ids": ids})[0]
    assert [name for name, child in block.named_children() if name.endswith("norm") and [*child.parameters()]] == [
        "attention_norm"
    ]
    block.attention_norm.weight.data.uniform_(0.5, 1.5)
    calls = []
    block.attention_norm.register_forward_hook(lambda *_: calls.append(1))
    (out,) = block((x,), {})
    assert len(calls) == 1
    normed = block.attention_norm(x)
    torch.testing.assert_close(out, x + 0.5 * block.attention(normed, {}) + 0.5 * block.ffn(normed, {}))


def test_a_bias_of_the_head_is_scaled_with_the_logits(make_model: MakeModel, ids: Tensor) -> None:
    model = make_model(head_bias=True, logit_scale=0.3)
    model.head.bias.data.uniform_(-1, 1)
    hidden = model({"input_ids": ids})
    torch.testing.assert_close(model.head.logits(hidden), 0.3 * (hidden @ model.head.weight.mT + model.head.bias))
    assert type(make_model(head_bias=True).head) is type(make_model().head)


def test_norm_of_all_heads_is_over_the_whole_projection(make_model: MakeModel, ids: Tensor) -> None:
    model = make_model(attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm="all", qk_norm_eps=1e-3))
    attention = model.layers["0"].attention
    attention.q_norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(2, 16, 32)
    q, k, _ = attention.project(x, {})
    plain = x @ attention.q.weight.mT
    expected = plain / (plain.square().mean(-1, keepdim=True) + 1e-3).sqrt() * attention.q_norm.weight
    torch.testing.assert_close(q.flatten(2), expected)
    assert (q.shape, k.shape) == ((2, 16, 4, 8), (2, 16, 2, 8))
    assert (attention.q_norm.weight.shape, attention.k_norm.weight.shape) == ((32,), (16,))


def test_learned_positions_are_added_to_embeddings(make_model: MakeModel, ids: Tensor) -> None:
    model = make_model(learned_positions=16)
    positions = torch.arange(16).flip(0).expand(2, -1)
    for batch, numbers in (({}, torch.arange(16)), ({"positions": positions}, positions)):
        (x,) = model.embed({"input_ids": ids, **batch})
        torch.testing.assert_close(x, model.embedding.weight[ids] + model.positions.weight[numbers])
    assert model.parameter_roles()["positions.weight"] == "embedding"
    assert model.fsdp_units()[0] == ["embedding", "positions"]


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_logits_are_scaled_and_then_bounded(make_model: MakeModel, ids: Tensor, cap: float) -> None:
    model = make_model(logit_scale=0.3, logit_soft_cap=cap)
    hidden = model({"input_ids": ids})
    plain = 0.3 * hidden @ model.head.weight.mT
    torch.testing.assert_close(model.head.logits(hidden), cap * torch.tanh(plain / cap) if cap else plain)


def test_logits_in_float32_are_products_of_the_rounded_states(make_model: MakeModel, ids: Tensor) -> None:
    narrow, wide = (make_model(dtype=torch.bfloat16, head_precision=key) for key in ("train", "fp32"))
    hidden = narrow({"input_ids": ids})
    # Of the rounded weights, as those are that FSDP gathers
    exact = hidden.double() @ narrow.head.weight.bfloat16().double().mT
    torch.testing.assert_close(logits(wide, input_ids=ids).double(), exact, rtol=1e-5, atol=1e-5)
    cache = wide.new_cache(2, 16)
    decoded = wide.head.logits(wide.decode({"input_ids": ids, "positions": torch.arange(16).expand(2, -1)}, cache))
    assert decoded.dtype == torch.float32
    with wide.head.whole(torch.float32):
        assert torch.equal(wide.head.logits(wide({"input_ids": ids})), logits(wide, input_ids=ids))
    assert logits(make_model(dtype=torch.float64, head_precision="fp32"), input_ids=ids).dtype == torch.float64
    logits(wide, input_ids=ids).sum().backward()
    before = logits(wide, input_ids=ids)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.copy_(parameter.bfloat16())
    assert torch.equal(logits(wide, input_ids=ids), before), "FSDP gathers weights rounded to bf16"
    assert all(parameter.grad is not None for parameter in wide.parameters())


# --- how it starts -------------------------------------------------------------------------------------------------


def test_initial_deviations(make_model: MakeModel) -> None:
    keys = {"dim": 128, "vocab_size": 512, "layers": 2, "init_std": 0.05, "ffn": SwiGLU(hidden=256)}
    model = make_model(attention=GroupedQueryAttention(heads=8, bias=True), norm=LayerNorm(), **keys)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            expected = 0.0, 0.0
        elif "norm" in name:
            expected = 1.0, 0.0
        else:
            residual = name.endswith((".o.weight", ".down.weight"))
            expected = 0.0, 0.05 / math.sqrt(2 * 2) if residual else 0.05
        seen = parameter.mean().item(), parameter.std(correction=0).item()
        assert seen == pytest.approx(expected, abs=1.5e-3), name


def test_depth_scaling_can_be_left_out(make_model: MakeModel) -> None:
    model = make_model(dim=128, init_std=0.05, depth_scaled_init=False)
    assert model.layers["0"].attention.o.weight.std().item() == pytest.approx(0.05, rel=0.05)


def test_a_tied_head_is_one_parameter_through_materialisation(make_model: MakeModel, ids: Tensor) -> None:
    model = make_model(tie_embeddings=True)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
    assert model.tied_parameters() == {"head.weight": "embedding.weight"}
    assert model.double().head.weight is model.embedding.weight


# --- what it tells -------------------------------------------------------------------------------------------------


def test_flops_equal_a_count_by_hand(make_model: MakeModel) -> None:
    model = make_model(dim=32, layers=2, vocab_size=61, ffn=SwiGLU(hidden=48))
    per_layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    attention = 3 * (2 + 2) * 4 * 8 * 100 / 2
    assert model.flops(100) == 6 * (2 * per_layer + 32 * 61) + 2 * attention


def test_a_tied_head_is_counted_like_another(make_model: MakeModel) -> None:
    assert make_model(tie_embeddings=True).flops(64) == make_model().flops(64)


@frozen(kw_only=True)
class HalfActive(FFNComponent):
    """A stack of two matrices of which each token uses one, with a router."""

    def build(self, context: Any, dim: int, init: Any) -> nn.Module:
        return HalfActiveModule(dim, context.layer)


class HalfActiveModule(nn.Module):
    def __init__(self, dim: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.router = nn.Parameter(torch.empty(dim, 2))
        self.experts = nn.Parameter(torch.empty(2, dim, dim))

    def init_parameter(self, name: str, fill: Any) -> None:
        fill.normal(0.1)

    def init_buffers(self, device: torch.device) -> None:
        pass

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        choice = (x @ self.router).argmax(-1)
        return torch.einsum("bsd,bsde->bse", x, self.experts[choice])

    def flops(self, seq_len: int) -> float:
        return 6.0 * (self.router.numel() + self.experts[0].numel())

    def parameter_roles(self) -> dict[str, str]:
        return {"router": "router"}

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"router": "replicate"}

    def float8_exempt(self) -> list[str]:
        return ["router"]


def test_a_part_of_another_plugin_speaks_for_itself(make_model: MakeModel, ids: Tensor) -> None:
    model, dense = make_model(ffn=HalfActive()), make_model(ffn=SwiGLU(hidden=48))
    assert torch.isfinite(logits(model, input_ids=ids)).all()
    assert [layer.ffn.layer for layer in model.layers.values()] == [0, 1]
    assert dense.flops(8) - model.flops(8) == 2 * 6 * (3 * 32 * 48 - 32 * 2 - 32 * 32)
    assert model.parameter_roles()["layers.1.ffn.router"] == "router"
    assert model.parameter_roles()["layers.1.ffn.experts"] == "stack"
    assert model.tensor_parallel_plan()["layers.0.ffn.router"] == "replicate"
    assert model.float8_exempt() == ["layers.0.ffn.router", "layers.1.ffn.router", "head"]


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_its_role(make_model: MakeModel, tied: bool) -> None:
    attention = GroupedQueryAttention(heads=4, qk_norm=True, bias=True)
    model = make_model(attention=attention, tie_embeddings=tied, norm=LayerNorm())
    roles = model.parameter_roles()
    assert set(roles) == {name for name, _ in model.named_parameters()}
    expected = {
        "embedding.weight": "embedding",
        "layers.0.attention_norm.weight": "norm",
        "layers.0.attention_norm.bias": "bias",
        "layers.0.attention.q.weight": "matrix",
        "layers.0.attention.q.bias": "bias",
        "layers.0.attention.q_norm.weight": "norm",
        "layers.0.ffn.down.weight": "matrix",
        "norm.weight": "norm",
    }
    assert expected.items() <= roles.items()
    assert roles.get("head.weight") == (None if tied else "head")


def test_plans_name_modules_that_exist(make_model: MakeModel) -> None:
    model = make_model(attention=GroupedQueryAttention(heads=4, qk_norm=True))
    modules = dict(model.named_modules())
    named = [*model.tensor_parallel_plan(), *model.float8_exempt(), *chain.from_iterable(model.fsdp_units())]
    assert [pattern for pattern in named if not any(fnmatch(name, pattern) for name in modules)] == []


def test_tensor_parallel_plan_covers_every_matrix(make_model: MakeModel) -> None:
    model = make_model()
    plan = model.tensor_parallel_plan()
    pairs = {name for name, way in plan.items() if way == "whole_input"}
    assert pairs == {f"layers.{number}.{part}" for number in model.layers for part in ("attention", "ffn")}
    assert {name.removesuffix(".weight") for name, _ in model.named_parameters()} == set(plan) - pairs
    assert [plan[f"layers.1.attention.{name}"] for name in "qkvo"] == ["column", "column", "column", "row"]


@pytest.mark.parametrize("tied", [False, True])
def test_fsdp_units_hold_every_parameter_once(make_model: MakeModel, tied: bool) -> None:
    model = make_model(tie_embeddings=tied)
    units = model.fsdp_units()
    owners = [[u for u in units if any(name.startswith(f"{m}.") for m in u)] for name, _ in model.named_parameters()]
    assert {len(found) for found in owners} == {1}
    assert tied == (["embedding", "norm", "head"] in units)


def test_the_model_can_generate(make_model: MakeModel) -> None:
    assert isinstance(make_model(), Generates)


@pytest.mark.parametrize(
    "method", ["flops", "parameter_roles", "tied_parameters", "tensor_parallel_plan", "fsdp_units", "float8_exempt"]
)
def test_the_model_declares(make_model: MakeModel, method: str) -> None:
    assert getattr(type(make_model()), method) is not getattr(Model, method)


def test_parts_are_built_where_they_are_named(make_model: MakeModel, make_context: Callable[..., Any]) -> None:
    context = make_context()
    make_model(context)
    attention = ("attention_residual", "attention_norm", "attention", "attention.rope")
    parts = (*attention, "ffn_residual", "ffn_norm", "ffn")
    expected = {f"layers.{number}.{part}": number for number in range(2) for part in parts}
    assert context.built == expected | {"norm": None, "": None}
