"""Attention `gqa`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import default_type, when_resumed
from forge_core.contracts.errors import Problem
from forge_plugin_transformer.attention_backends import Backend, choose_backend
from forge_plugin_transformer.document_backends import WayOrAuto, choose_documents, kernel_problems
from forge_plugin_transformer.kinds import AttentionComponent, InitStd, RopeComponent

if TYPE_CHECKING:
    from torch import nn

    from forge_core.config.job import Job
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout


@frozen(kw_only=True)
class GroupedQueryAttention(AttentionComponent):
    """Causal attention in which groups of query heads share a key/value head (Ainslie et al. 2023)."""

    heads: int = field(default=8, validator=gt(0))
    """Query heads."""
    kv_heads: int = field(default=0, validator=ge(0))
    """Key/value heads, a divisor of `heads`; 0: as many as `heads` (multi-head attention)."""
    head_dim: int = field(default=0, validator=ge(0))
    """Width of a head, even; 0: `dim / heads`."""
    rope: RopeComponent = default_type("forge-plugin-transformer/plain")
    """`[model.attention.rope]`: position encoding, and how it is stretched to longer sequences."""
    qk_norm: bool = False
    """Whether queries and keys are RMS-normalised per head before the position encoding, with a learned gain."""
    qk_norm_eps: float = field(default=1e-6, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the mean square in that normalisation."""
    bias: bool = False
    """Whether the four projections have biases."""
    backend: Backend = field(default="auto", metadata=when_resumed("safe"))
    """Kernel. auto: the fastest by the committed measurements, torch's own choice where there are none. flash,
    efficient, math and cudnn are torch's; gemm is blocks of plain matrix products."""
    documents: WayOrAuto = field(default="auto", metadata=when_resumed("safe"))
    """How the documents of a packed sequence are kept apart. mask: all pairs of positions are computed, and hidden
    where they cross. segments (CPU): document by document, short ones in groups. varlen (CUDA, half precision): torch's
    kernel for sequences of several lengths. auto: the fastest by the committed measurements."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        kv_heads = self.kv_heads or self.heads
        if self.heads % kv_heads:
            yield Problem("kv_heads", f"{kv_heads} does not divide heads, which is {self.heads}")
        elif kv_heads % layout.tp:
            yield Problem("kv_heads", f"{kv_heads} does not divide by the tensor-parallel degree {layout.tp}")
        if self.head_dim % 2:
            yield Problem("head_dim", f"{self.head_dim} is odd; the position encoding pairs dimensions")
        yield from kernel_problems(self.backend, self.documents, job)

    def width_problems(self, dim: int) -> Iterable[Problem]:
        if self.head_dim:
            return
        if dim % self.heads:
            yield Problem("heads", f"{self.heads} does not divide dim, which is {dim}; change one or set head_dim")
        elif dim // self.heads % 2:
            message = f"dim / heads = {dim} / {self.heads} = {dim // self.heads} is odd; the position encoding pairs"
            yield Problem("heads", f"{message} dimensions; change one or set head_dim")

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        from forge_plugin_transformer.modules import attention
        from forge_plugin_transformer.modules.attention_core import AttentionCore

        head_dim = self.head_dim or dim // self.heads
        kernel = choose_backend(self.backend, context, head_dim)
        documents = choose_documents(self.documents, kernel.kernel, context, head_dim)
        return attention.GroupedQueryAttention(
            dim,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=head_dim,
            rotary=context.at("rope").build(self.rope, head_dim=head_dim),
            core=AttentionCore(kernel, documents),
            qk_norm_eps=self.qk_norm_eps if self.qk_norm else None,
            bias=self.bias,
            init=init,
        )
