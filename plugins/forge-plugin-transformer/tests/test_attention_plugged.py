"""Kernels of attention that are components: FlexAttention, and one of a stranger that trains under layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from forge_core.config.load import load_job
from forge_core.contracts.errors import JobError
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import AttentionBackendComponent, GroupedQueryAttention, Transformer
from forge_plugin_transformer.modules.documents import document_mask
from forge_plugin_transformer.modules.softmax_attention import softmax_attention
from forge_testing.catalogs import installed, with_components
from forge_testing.documents import RandomDocuments
from forge_testing.refusals import at, check_problems
from forge_testing.suites.parity import ParitySuite
from forge_testing.tiny import BESIDE_MODEL

MakeModel = Callable[..., Any]


class FlexKernel(nn.Module):
    """`flex_attention`, with documents and window in a mask of blocks and the cap as a change of scores."""

    def __init__(self, scoring: Any) -> None:
        super().__init__()
        self.scoring = scoring

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, sinks: Tensor | None) -> Tensor:
        length, window, cap = q.shape[1], self.scoring.window_in(q.shape[1]), self.scoring.soft_cap
        documents = batch.get("document_ids", torch.zeros(q.shape[:2], dtype=torch.int64))

        def seen(b: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
            near = i - j < window if window else i >= j
            return (i >= j) & near & (documents[b, i] == documents[b, j])

        def capped(score: Tensor, *_: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        mask = create_block_mask(seen, len(q), None, length, length, device=str(q.device))
        options = {"score_mod": capped if cap else None, "scale": self.scoring.given_scale, "enable_gqa": True}
        return flex_attention(*heads_first, block_mask=mask, **options).transpose(1, 2)


@frozen(kw_only=True)
class Flex(AttentionBackendComponent):
    """FlexAttention of torch."""

    computes: ClassVar = ("window", "scale", "soft_cap")

    def build(self, context: Any, scoring: Any, head_dim: int) -> nn.Module:
        return FlexKernel(scoring)


class PlainKernel(nn.Module):
    """All scores at once, with the mask of a batch made once for all layers."""

    def __init__(self, scoring: Any) -> None:
        super().__init__()
        self.scoring = scoring

    def prepare(self, batch: Any) -> Any:
        if "document_ids" not in batch or "plain mask" in batch:
            return batch
        return {**batch, "plain mask": document_mask(batch["document_ids"])}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, sinks: Tensor | None) -> Tensor:
        return softmax_attention(q, k, v, batch.get("plain mask"), self.scoring, sinks)


@frozen(kw_only=True)
class Plain(AttentionBackendComponent):
    """All scores at once."""

    computes: ClassVar = ("sinks",)

    def build(self, context: Any, scoring: Any, head_dim: int) -> nn.Module:
        return PlainKernel(scoring)


HEADS = {"heads": 4, "kv_heads": 2}
CATALOG = with_components(installed(), {"attention_backend": {"flex": Flex, "plain_scores": Plain}}, "a-stranger")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"window": 5, "scale": 0.3}, {"soft_cap": 0.5, "window": 3}, {"v_head_dim": 4, "value_scale": 0.5}]
)
@torch.no_grad()
def test_flex_attention_gives_the_logits_of_the_other_kernels(
    make_model: MakeModel, ids: Tensor, options: Any, packed: bool
) -> None:
    backends = ("gemm", Flex())
    plain, flex = (
        make_model(dtype=torch.float64, attention=GroupedQueryAttention(**HEADS, **options, backend=backend)).eval()
        for backend in backends
    )
    documents = {"document_ids": torch.tensor([[7] * 5 + [3] * 11, [0] * 12 + [1] * 4])} if packed else {}
    batch = {"input_ids": ids, **documents}
    torch.testing.assert_close(flex(batch), plain(batch), atol=1e-12, rtol=1e-12)
    assert flex.backend_choices(16) == [("attention", "Flex", "set by the job")]


def test_decoding_with_a_cache_is_as_with_other_kernels(make_model: MakeModel, ids: Tensor) -> None:
    model = make_model(attention=GroupedQueryAttention(**HEADS, backend=Plain(), sinks=True)).eval()
    model.requires_grad_(False)
    cache, positions = model.new_cache(2, 16), torch.arange(16).expand(2, -1)
    parts = zip(ids.split([9, 1, 6], 1), positions.split([9, 1, 6], 1), strict=True)
    decoded = torch.cat([model.decode({"input_ids": i, "positions": p}, cache) for i, p in parts], 1)
    torch.testing.assert_close(decoded, model({"input_ids": ids}), atol=2e-5, rtol=1e-4)


class TestAKernelOfAStranger(ParitySuite):
    """With documents that share sequences; `cp` has its own kernel, and the same curve."""

    layouts = ("tp2", "cp2", "checkpointing2", "traced")

    def parity_changes(self, folder):
        attention = GroupedQueryAttention(**HEADS, backend=Plain(), sinks=True)
        model = Transformer(vocab_size=32, dim=16, layers=2, attention=attention)
        return {"model": model, "data": {"sources": (RandomDocuments(held_out=5),), "packing": Isolate()}}


def job_of(folder: Path, attention: str) -> Any:
    path = folder / "job.toml"
    path.write_text(f'[model]\ntype = "transformer"\nvocab_size = 32\n[model.attention]\n{attention}\n{BESIDE_MODEL}')
    return load_job(path, catalog=CATALOG)


def test_a_kernel_is_found_by_its_entry_point(tmp_path: Path) -> None:
    assert job_of(tmp_path, 'backend.type = "flex"').model.attention.backend == Flex()
    assert job_of(tmp_path, 'backend = "gemm"').model.attention.backend == "gemm"


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ('sinks = true\nbackend.type = "flex"', at("model.attention.backend", "Flex", "sinks", "window, scale")),
        ('window = 4\nbackend.type = "plain_scores"', at("model.attention.backend", "Plain", "window", "sinks")),
        ('documents = "mask"\nbackend.type = "flex"', at("model.attention.documents", "Flex")),
        ('backend.type = "flux"', at("model.attention.backend.type", "flex")),
    ],
)
def test_what_a_kernel_does_not_compute_is_refused(tmp_path: Path, attention: str, expected: Any) -> None:
    with pytest.raises(JobError) as caught:
        job_of(tmp_path, attention)
    check_problems(caught.value.problems, expected)
