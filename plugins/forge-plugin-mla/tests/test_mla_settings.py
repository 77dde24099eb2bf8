"""Keys of `[model.attention]`: what is refused, and what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn

from forge_core import load_job
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_parallel import ContextParallel, TensorParallel
from forge_plugin_transformer import AttentionBackendComponent, PlainRope, Transformer, YarnRope
from forge_testing.refusals import ExpectedProblem, at, check_problems, lacks, problems_of, refuses_all
from forge_testing.tiny import BESIDE_MODEL

REST = f"""
{BESIDE_MODEL}
[model]
type = "transformer"
vocab_size = 32
[model.attention]
type = "mla"
"""
LoadAttention = Callable[[str], MultiHeadLatentAttention]


@pytest.fixture
def load_attention(tmp_path: Path) -> LoadAttention:
    """The attention of a job of which the given TOML is the part below `[model.attention]`."""

    def load(attention: str) -> MultiHeadLatentAttention:
        path = tmp_path / "job.toml"
        path.write_text(REST + attention)
        return load_job(path).model.attention

    return load


class AllPairs(nn.Module):
    """Scores of all pairs, within documents. Values have the width of keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, sinks: Tensor | None) -> Tensor:
        assert v.shape == k.shape
        ids = batch["document_ids"]
        hidden = (ids[:, :, None] != ids[:, None]) | torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1), v)


@frozen(kw_only=True)
class OwnKernel(AttentionBackendComponent):
    """A stranger's."""

    def build(self, context: Any, scoring: Any, head_dim: int) -> nn.Module:
        assert head_dim == 12
        return AllPairs()


def test_a_kernel_of_a_stranger_attends_to_the_expanded_keys(
    make_model: Callable[..., Any], ids: Tensor, load_attention: LoadAttention
) -> None:
    sizes = {"heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    own, other = (
        make_model(MultiHeadLatentAttention(**sizes, backend=backend), precision="fp64")
        for backend in ("gemm", OwnKernel())
    )
    batch = {"input_ids": ids, "document_ids": torch.tensor([[7] * 5 + [3] * 19, [0] * 20 + [1] * 4])}
    torch.testing.assert_close(other(batch), own(batch), atol=1e-12, rtol=1e-12)
    assert other.backend_choices(24)[0][:2] == ("attention", "OwnKernel")
    read = load_attention(f'backend.type = "{__name__}:OwnKernel"')
    assert type(read.backend).__name__ == "OwnKernel"
    with refuses_all(at("model.attention.documents", "OwnKernel", "leave this out")):
        load_attention(f'documents = "mask"\nbackend.type = "{__name__}:OwnKernel"')


def test_the_keys_are_deepseeks(load_attention: LoadAttention) -> None:
    attention = load_attention(
        """
        heads = 16
        q_lora_rank = 96
        kv_lora_rank = 64
        qk_nope_head_dim = 16
        qk_rope_head_dim = 8
        v_head_dim = 16
        [model.attention.rope]
        type = "yarn"
        factor = 40.0
        original_max_position_embeddings = 4096
        mscale = 1.0
        mscale_all_dim = 1.0
        """
    )
    rope = YarnRope(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    assert attention == MultiHeadLatentAttention(heads=16, q_lora_rank=96, rope=rope, **sizes)


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("heads = 0", at("model.attention.heads", "> 0")),
        ("kv_lora_rank = 0", at("model.attention.kv_lora_rank", "> 0")),
        ("q_lora_rank = -1", at("model.attention.q_lora_rank", ">= 0", -1)),
        ("qk_rope_head_dim = 0", at("model.attention.qk_rope_head_dim", "> 0")),
        ("qk_rope_head_dim = 7", at("model.attention.qk_rope_head_dim", 7, "odd", 8)),
        (
            "v_head_dim = 49",
            at("model.attention.v_head_dim", 49, "qk_nope_head_dim + qk_rope_head_dim = 48"),
        ),
        ("kv_heads = 4", at("model.attention.kv_heads")),
        (
            'backend = "cudnn"',
            at("model.attention.backend", "cudnn", "cpu", "float32", "auto, flash, math, gemm"),
        ),
        (
            'backend = "math"\ndocuments = "segments"',
            at("model.attention.documents", "segments", "math", "cpu"),
        ),
        (
            '[model.attention.rope]\ntype = "yarn"\nfactor = 2.0\n'
            "original_max_position_embeddings = 8\nbeta_fast = 0.5",
            at("model.attention.rope.beta_fast", 0.5, "beta_slow", 1.0),
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_built(
    load_attention: LoadAttention, toml: str, expected: ExpectedProblem
) -> None:
    with refuses_all(expected):
        load_attention(toml)


def test_ranks_share_heads_and_not_parts_of_them(make_job: Callable[..., Any]) -> None:
    """Also where the rows of a matrix could be shared."""
    attention = MultiHeadLatentAttention(heads=3)
    job = make_job(model=Transformer(vocab_size=32, attention=attention), parallel={"tp": TensorParallel(degree=2)})
    check_problems(problems_of(job, 2), at("model.attention.heads", 3, "degree 2"))


def test_ulysses_exchanges_all_heads(make_job: Callable[..., Any]) -> None:
    attention = MultiHeadLatentAttention(heads=6)
    parallel = {"cp": ContextParallel(degree=4, method="ulysses")}
    job = make_job(model=Transformer(vocab_size=32, attention=attention), parallel=parallel)
    check_problems(problems_of(job, 4), at("parallel.cp.method", "6 key/value heads", "4 ranks"))


def test_the_score_factor_is_yarns_mscale_squared() -> None:
    assert PlainRope().score_factor() == 1.0
    assert YarnRope(factor=40.0, original_max_position_embeddings=4096).score_factor() == 1.0
    sharpened = YarnRope(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
    assert (sharpened.amplitude(), sharpened.score_factor()) == (1.0, pytest.approx(1.3688879**2))


@pytest.mark.parametrize(("backend", "padded"), [("flash", True), ("math", False), ("gemm", False)])
def test_the_plan_tells_of_values_that_are_padded(make_model: Callable[..., Any], backend: str, padded: bool) -> None:
    model = make_model(MultiHeadLatentAttention(backend=backend))
    [(what, kernel, why)] = model.backend_choices(16)
    assert (what, kernel) == ("attention", backend)
    assert (not lacks(why, "padded", 32, 48)) == padded
    wide = make_model(MultiHeadLatentAttention(backend=backend, v_head_dim=48))
    assert "padded" not in wide.backend_choices(16)[0][2]


def test_flops_count_matrices_and_the_causal_half_of_each_width(make_model: Callable[..., Any]) -> None:
    attention = make_model(MultiHeadLatentAttention(heads=2, q_lora_rank=8), dim=16).layers["0"].attention
    matrices = 16 * 8 + 8 * 2 * 48 + 16 * (128 + 16) + 128 * 2 * (32 + 32) + 2 * 32 * 16
    assert attention.flops(100) == 6 * matrices + 6 * 2 * (48 + 32) * 100 / 2


def test_projections_are_matrices_and_norms_are_norms(make_model: Callable[..., Any]) -> None:
    roles = make_model(MultiHeadLatentAttention(q_lora_rank=8), layers=1).parameter_roles()
    assert {name.removeprefix("layers.0.attention."): role for name, role in roles.items() if "attention." in name} == {
        **{f"{name}.weight": "matrix" for name in ("q_down", "q_up", "kv_down", "kv_up", "o")},
        **{f"{name}.weight": "norm" for name in ("q_norm", "kv_norm")},
    }


@pytest.mark.parametrize(("q_lora_rank", "names"), [(0, ["kv_down"]), (8, ["q_down", "kv_down"])])
def test_what_compresses_keeps_its_precision(
    make_model: Callable[..., Any], q_lora_rank: int, names: list[str]
) -> None:
    exempt = make_model(MultiHeadLatentAttention(q_lora_rank=q_lora_rank), layers=1).float8_exempt()
    assert exempt == [*(f"layers.0.attention.{name}" for name in names), "head"]
