"""Attentions `mla` and `dsa`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import default_type, when_resumed
from forge_core.contracts.errors import Problem
from forge_kit.optim.fields import TRAINING_ONLY
from forge_plugin_transformer import AttentionBackendComponent, AttentionComponent, InitStd, RopeComponent
from forge_plugin_transformer.attention_backends import Backend, choose_backend
from forge_plugin_transformer.document_backends import (
    WayOrAuto,
    choose_documents,
    kernel_problems,
    plugged_problems,
)
from forge_plugin_transformer.scoring import PLAIN

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_transformer.modules.attention_core import AttentionCore


@frozen(kw_only=True)
class LatentAttentionComponent(AttentionComponent):
    """The keys of attention with latents, which all its kinds have."""

    heads: int = field(default=8, validator=gt(0))
    """Number of heads, of queries as of keys and values."""
    q_lora_rank: int = field(default=0, validator=ge(0))
    """Width of the latent that queries are projected from; 0: they are projected from x itself."""
    kv_lora_rank: int = field(default=128, validator=gt(0))
    """Width of the latent that keys and values are projected from."""
    qk_nope_head_dim: int = field(default=32, validator=gt(0))
    """Width of the part of a head's queries and keys without position encoding."""
    qk_rope_head_dim: int = field(default=16, validator=gt(0))
    """Width of the part with rotary position encoding; even. All heads share that part of the key."""
    v_head_dim: int = field(default=32, validator=gt(0))
    """Width of a head's values, at most `qk_nope_head_dim` + `qk_rope_head_dim`."""
    rope: RopeComponent = default_type("forge-plugin-transformer/plain")
    """`[model.attention.rope]`: encoding of positions, of width `qk_rope_head_dim`."""
    rope_interleave: bool = False
    """Whether dimension 2i of the rotated part is paired with 2i + 1, as in DeepSeek's own weights; else i with
    i + `qk_rope_head_dim` / 2, which needs no reordering. Neither is better for training."""
    norm_eps: float = field(default=1e-6, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the mean square where the latents are RMS-normalised."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks heads with tensor parallel, the rotated width, and values against keys."""
        if self.heads % layout.tp:
            yield Problem("heads", f"{self.heads} does not divide by the tensor-parallel degree {layout.tp}")
        if self.qk_rope_head_dim % 2:
            message = f"{self.qk_rope_head_dim} is odd; the position encoding pairs dimensions"
            yield Problem("qk_rope_head_dim", f"{message}; take {self.qk_rope_head_dim + 1}")
        if self.v_head_dim > self._head_dim:
            message = f"{self.v_head_dim} is more than the width of keys, qk_nope_head_dim + qk_rope_head_dim"
            hint = "kernels take values as wide or narrower; lower it or raise one of them"
            yield Problem("v_head_dim", f"{message} = {self._head_dim}; {hint}")

    def width_problems(self, dim: int) -> Iterable[Problem]:
        """Checks the encoding for `qk_rope_head_dim`; no width follows from `dim` here."""
        return (problem.below("rope") for problem in self.rope.width_problems(self.qk_rope_head_dim))

    @property
    def _head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def _latent(self, context: BuildContext, init: InitStd) -> dict[str, Any]:
        """Returns the arguments of a `LatentAttention` that these keys make."""
        from forge_plugin_mla.modules.latent_attention import Widths

        return {
            "heads": self.heads,
            "widths": Widths(
                q_latent=self.q_lora_rank,
                kv_latent=self.kv_lora_rank,
                nope=self.qk_nope_head_dim,
                rope=self.qk_rope_head_dim,
                value=self.v_head_dim,
            ),
            "rotary": context.at("rope").build(self.rope, head_dim=self.qk_rope_head_dim),
            "interleaved": self.rope_interleave,
            "score_factor": self.rope.score_factor(),
            "norm_eps": self.norm_eps,
            "init": init,
        }


@frozen(kw_only=True)
class MultiHeadLatentAttention(LatentAttentionComponent):
    """Causal attention whose keys and values are projected from one small latent per position.

    The latent is all that generation caches (DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv 2412.19437,
    section 2.1.1).
    """

    backend: Backend | AttentionBackendComponent = field(default="auto", metadata=when_resumed("safe"))
    """Kernel, as for `gqa`: by its name, or a table with the `type` of another one. For kernels that take values only
    as wide as keys (all but math, efficient and gemm), values are padded with zeros."""
    documents: WayOrAuto = field(default="auto", metadata=when_resumed("safe"))
    """How the documents of a packed sequence are kept apart, as for `gqa`: mask, segments, varlen, or auto."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks heads with tensor parallel, the rotated width, values against keys, and kernels on the device."""
        yield from super().problems(job, layout)
        if isinstance(self.backend, AttentionBackendComponent):
            yield from plugged_problems(self.backend, self.documents)
        else:
            yield from kernel_problems(self.backend, self.documents, job)

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns a `LatentAttention`. Its kernel is chosen here, for heads of N + P, the device and the dtype.

        Raises:
            JobError: the job sets a kernel, or a way to keep documents apart, that the device or the dtype excludes.
        """
        from forge_plugin_mla.modules.latent_attention import LatentAttention

        return LatentAttention(dim, core=self._core(context), **self._latent(context, init))

    def _core(self, context: BuildContext) -> AttentionCore:
        from forge_plugin_transformer.modules.attention_core import AttentionCore, PluggedCore

        if isinstance(self.backend, AttentionBackendComponent):
            kernel = context.at("backend").build(self.backend, scoring=PLAIN, head_dim=self._head_dim)
            return PluggedCore(kernel, type(self.backend).__name__)
        choice = choose_backend(self.backend, context, self._head_dim)
        return AttentionCore(choice, choose_documents(self.documents, choice.kernel, context, self._head_dim))


@frozen(kw_only=True)
class DeepSeekSparseAttention(LatentAttentionComponent):
    """Latent attention of each query to the keys that an indexer chooses.

    The lightning indexer scores all earlier positions, and the attention sees the `index_topk` best (DeepSeek-V3.2-Exp,
    section 2). Its loss, in addition to the job's, is the divergence of its scores from the attention's own weights; it
    learns from nothing else, and nothing else learns from it.
    """

    index_n_heads: int = field(default=8, validator=gt(0))
    """Heads of the indexer, of queries only: they share one key."""
    index_head_dim: int = field(default=32, validator=gt(0))
    """Width of such a head, at least `qk_rope_head_dim`: so many of its first dimensions have the position encoding."""
    index_topk: int = field(default=2048, validator=gt(0), metadata=when_resumed("flag"))
    """Keys that a query attends to, at most."""
    index_rope_interleave: bool = False
    """`rope_interleave` of the indexer: false in DeepSeek-V3.2, true in GLM-5."""
    index_loss_weight: float = field(default=1.0, validator=gt(0), metadata=TRAINING_ONLY)
    """Factor of the indexer's loss, a mean over positions that is summed over layers. Only the indexer's parameters
    get gradients of it."""
    dense_warmup: bool = field(default=False, metadata=when_resumed("flag"))
    """Whether queries attend to all keys, and the indexer learns from all: the first stage, for a trained model of type
    `mla` with all else frozen (`[plugins.freeze]`)."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks heads with tensor parallel, widths, and the indexer's heads against the rotated width."""
        yield from super().problems(job, layout)
        if self.index_head_dim < self.qk_rope_head_dim:
            message = f"{self.index_head_dim} is less than qk_rope_head_dim = {self.qk_rope_head_dim}"
            yield Problem("index_head_dim", f"{message}, the dimensions of a head that are rotated")

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns a `SparseLatentAttention`."""
        from forge_plugin_mla.modules.sparse_attention import Choosing, SparseLatentAttention

        choosing = Choosing(
            heads=self.index_n_heads,
            head_dim=self.index_head_dim,
            top_k=self.index_topk,
            interleaved=self.index_rope_interleave,
            warm_up=self.dense_warmup,
            loss_weight=self.index_loss_weight,
        )
        latent = self._latent(context, init)
        return SparseLatentAttention(dim, choosing=choosing, std=init.inner, context=context, **latent)
