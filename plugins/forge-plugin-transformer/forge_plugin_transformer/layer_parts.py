"""The components `gqa`, `swiglu`, `geglu`, `gelu`, `relu2`, `xielu`, `rmsnorm` and `layernorm`: parts of layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, lt

from forge_core.contracts.components import default_type, when_resumed
from forge_core.contracts.errors import Problem
from forge_plugin_transformer.attention_backends import Backend, choose_backend
from forge_plugin_transformer.document_backends import (
    WayOrAuto,
    choose_documents,
    kernel_problems,
    plugged_problems,
)
from forge_plugin_transformer.kinds import (
    AttentionBackendComponent,
    AttentionComponent,
    AttentionMaskComponent,
    FFNComponent,
    InitStd,
    NormComponent,
    RopeComponent,
)
from forge_plugin_transformer.masks import CausalMask
from forge_plugin_transformer.scoring import Scoring

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_transformer.modules.attention import GroupedAttention
    from forge_plugin_transformer.modules.attention_core import AttentionCore


@frozen(kw_only=True)
class GroupedQueryAttention(AttentionComponent):
    """Causal attention in which groups of query heads share a key/value head (Ainslie et al. 2023)."""

    in_two_steps = True
    heads: int = field(default=8, validator=gt(0))
    """Query heads."""
    kv_heads: int = field(default=0, validator=ge(0))
    """Key/value heads, a divisor of `heads`; 0: as many as `heads` (multi-head attention)."""
    head_dim: int = field(default=0, validator=ge(0))
    """Width of a head, even; 0: `dim / heads`."""
    v_head_dim: int = field(default=0, validator=ge(0))
    """Width of a head's values, at most that of its queries and keys; 0: the same (MiMo-V2-Flash: 128, and 192)."""
    value_scale: float = field(default=1.0, validator=gt(0), metadata=when_resumed("flag"))
    """Factor on values, after their norm (MiMo-V2-Flash: `attention_value_scale`)."""
    rope: RopeComponent = default_type("forge-plugin-transformer/plain")
    """`[model.attention.rope]`: position encoding, and how it is stretched to longer sequences."""
    qk_norm: bool | Literal["head", "all", "layer"] = False
    """Whether queries and keys are RMS-normalised before the position encoding, with a learned gain. head or true: each
    head by itself, and all by the same gain (Qwen3). all: the features of all heads together (OLMo 2). layer: each head
    by a layer norm, centred first, with its own gain (Command R+)."""
    qk_norm_eps: float = field(default=1e-6, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the mean square in that normalisation, or to the variance."""
    qk_norm_offset: Literal[0, 1] = 0
    """Added to the learned gain of that normalisation, as `offset` of `rmsnorm`; 1 in Gemma 3."""
    qk_norm_gain: bool = True
    """Whether that normalisation has a learned gain; false in Llama 4, of each head by itself."""
    qk_norm_rotated: bool = False
    """Whether that normalisation, of each head by itself, comes after the position encoding (Hunyuan), not before."""
    v_norm: bool = False
    """Whether the values of each head are RMS-normalised, without a gain and with `qk_norm_eps` (Gemma 4)."""
    k_eq_v: bool = False
    """Whether values are the keys as projected, before their norm and position encoding, so that there is no
    projection of values (Gemma 4's layers without a window)."""
    bias: bool = False
    """Whether the four projections have biases."""
    output_bias: bool = True
    """Whether the last of the four has one too where `bias` is set; false in Qwen2 and Qwen2.5."""
    mask: AttentionMaskComponent = field(factory=CausalMask)
    """`[model.attention.mask]`: which positions of its document one sees: all before it (causal), or fewer, by a
    function of both positions. Later ones too with a loss that does not predict the next token."""
    window: int = field(default=0, validator=ge(0), metadata=when_resumed("flag"))
    """Positions that one sees at most: itself and the `window` - 1 before it, of its document (Mistral, Gemma); 0: all
    before it. It counts as `sliding_window` of Hugging Face configurations."""
    scale: float = field(default=0.0, validator=ge(0), metadata=when_resumed("flag"))
    """Factor on the products of queries and keys; 0: 1 / sqrt(width of a head). Gemma 2 and 3 have
    1 / sqrt(`query_pre_attn_scalar`)."""
    query_growth: float = field(default=0.0, validator=ge(0), metadata=when_resumed("flag"))
    """b > 0: a query at position p, counted from 0 in its document, is multiplied by
    1 + b ln(1 + floor(p / `query_growth_length`)), so that attention to long texts stays sharp (Ministral 3:
    `llama_4_scaling_beta`)."""
    query_growth_length: int = field(default=8192, validator=gt(0), metadata=when_resumed("flag"))
    """Positions from one step of that factor to the next; it is 1 for as many."""
    query_growth_offset: int = field(default=0, validator=ge(0), metadata=when_resumed("flag"))
    """Added to p in that factor; 1 in Llama 4, so that the first step ends one position earlier."""
    soft_cap: float = field(default=0.0, validator=ge(0), metadata=when_resumed("flag"))
    """c > 0: scaled scores are capped, c tanh(score / c), as in Gemma 2 (`attn_logit_softcapping`); 0: they are not.
    Kernels `gemm` and `math` only."""
    sinks: bool = False
    """Whether each query head has a learned score that takes part in the softmax and has no value, so that a head may
    attend to nothing (gpt-oss). On CUDA with kernels `gemm` and `math` only; on a CPU, `flash` computes them except
    with `documents = "mask"`."""
    gate: bool | Literal["head", "element"] = False
    """Whether what heads have mixed is multiplied by the sigmoid of a linear function of x, before the last projection
    (Qiu et al. 2025, "Gated Attention for Large Language Models"). element or true: a factor for each feature of each
    head (Qwen3-Next). head: one for each head."""
    backend: Backend | AttentionBackendComponent = field(default="auto", metadata=when_resumed("safe"))
    """Kernel. auto: the fastest by the committed measurements, torch's own choice where there are none. flash,
    efficient, math and cudnn are torch's; gemm is blocks of plain matrix products. A table names another one by its
    `type`, of a plugin or a file, which keeps documents apart itself."""
    documents: WayOrAuto = field(default="auto", metadata=when_resumed("safe"))
    """How the documents of a packed sequence are kept apart. mask: all pairs of positions are computed, and hidden
    where they cross. segments (CPU): document by document, short ones in groups. varlen (CUDA, half precision): torch's
    kernel for sequences of several lengths. auto: the fastest by the committed measurements."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks head counts (groups, tensor parallel), an even `head_dim`, and kernels on the job's device."""
        kv_heads = self.kv_heads or self.heads
        if self.heads % kv_heads:
            yield Problem("kv_heads", f"{kv_heads} does not divide heads, which is {self.heads}")
        elif kv_heads % layout.tp:
            yield Problem("kv_heads", f"{kv_heads} does not divide by the tensor-parallel degree {layout.tp}")
        if self.head_dim % 2:
            yield Problem("head_dim", f"{self.head_dim} is odd; the position encoding pairs dimensions")
        if self.v_head_dim and self.k_eq_v:
            yield Problem("v_head_dim", f"{self.v_head_dim} with k_eq_v = true: values are keys then; leave one out")
        yield from self._norm_problems()
        if not self.mask.causal:
            yield from self._bidirectional_problems(job)
        if isinstance(self.backend, AttentionBackendComponent):
            yield from plugged_problems(self.backend, self.documents, self._scoring)
        else:
            yield from kernel_problems(self.backend, self.documents, job, self._scoring)

    def _norm_problems(self) -> Iterable[Problem]:
        """Checks that what modifies the norm of queries and keys has one to modify."""
        of_each_head = self.qk_norm in (True, "head")
        if self.qk_norm_offset and self.qk_norm in (False, "layer"):
            what = "with layer norms" if self.qk_norm else "without qk_norm"
            message = f"{self.qk_norm_offset} has no effect {what}"
            yield Problem("qk_norm_offset", f'{message}; set qk_norm = "head" or "all", or leave it out')
        if not self.qk_norm_gain and (not of_each_head or self.qk_norm_offset):
            message = f"false with qk_norm = {str(self.qk_norm).lower()}, qk_norm_offset = {self.qk_norm_offset}"
            hint = 'set qk_norm = "head" without an offset, or leave it out'
            yield Problem("qk_norm_gain", f"{message} has no gain of each head to leave out; {hint}")
        if self.qk_norm_rotated and not of_each_head:
            message = f"true with qk_norm = {str(self.qk_norm).lower()} has no norm of each head to move"
            yield Problem("qk_norm_rotated", f'{message}; set qk_norm = "head", or leave it out')

    def _bidirectional_problems(self, job: Job) -> Iterable[Problem]:
        """Checks that what a position sees later is not what it is to predict."""
        mask, loss = type(self.mask).__name__, type(job.loss).__name__
        if job.loss.predicts_next_token:
            message = f"{mask} shows later positions, among them the next token, which {loss} predicts"
            hint = "take a causal mask, or a loss that declares `predicts_next_token = False`"
            yield Problem("mask", f"{message}; {hint}")
        if self.window:
            yield Problem("window", f"{self.window} counts positions back, and {mask} shows later ones; leave it out")

    @property
    def _scoring(self) -> Scoring:
        # Without the default, so that nothing takes the way of a mask
        mask = None if isinstance(self.mask, CausalMask) else self.mask
        return Scoring(self.window, self.scale, self.soft_cap, self.sinks, mask)

    def width_problems(self, dim: int) -> Iterable[Problem]:
        """Checks the encoding for the width of a head, and that a derived width, `dim / heads`, is whole and even."""
        head_dim = self.head_dim or dim // self.heads
        yield from (problem.below("rope") for problem in self.rope.width_problems(head_dim))
        if self.v_head_dim > head_dim:
            hint = "kernels take values as wide or narrower; lower it"
            yield Problem("v_head_dim", f"{self.v_head_dim} is more than the width of keys, {head_dim}; {hint}")
        # Set by the job, the heads need not have the width of the model together
        if self.head_dim:
            return
        if dim % self.heads:
            yield Problem("heads", f"{self.heads} does not divide dim, which is {dim}; change one or set head_dim")
        elif dim // self.heads % 2:
            message = f"dim / heads = {dim} / {self.heads} = {dim // self.heads} is odd; the position encoding pairs"
            yield Problem("heads", f"{message} dimensions; change one or set head_dim")

    @property
    def shares_kv(self) -> bool:  # type: ignore[override]
        """Not with narrower values: what layers share has one width."""
        return not self.v_head_dim

    def kv_shape(self, dim: int, ranks: int) -> tuple[int, int]:
        return (self.kv_heads or self.heads) // ranks, self.head_dim or dim // self.heads

    def build_borrowing(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns a `BorrowingAttention`; see `build`."""
        from forge_plugin_transformer.modules.attention import BorrowingAttention

        return self._module(BorrowingAttention, context, dim, init)

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns a `GroupedAttention`. Its kernel is chosen here, for the device, the dtype and `train.seq_len`.

        Raises:
            JobError: the job sets a kernel, or a way to keep documents apart, that the device or the dtype excludes.
        """
        from forge_plugin_transformer.modules.attention import GroupedAttention

        return self._module(GroupedAttention, context, dim, init)

    def _module(self, cls: type[GroupedAttention], context: BuildContext, dim: int, init: InitStd) -> GroupedAttention:
        from forge_plugin_transformer.modules.attention import Heads, QueryGrowth, QueryKeyNorms, ValueForm

        head_dim, kv_heads = self.head_dim or dim // self.heads, self.kv_heads or self.heads
        q_norm, k_norm = self._norm(self.heads, head_dim), self._norm(kv_heads, head_dim)
        return cls(
            dim,
            heads=Heads(self.heads, kv_heads, head_dim, self.v_head_dim or head_dim),
            rotary=context.at("rope").build(self.rope, head_dim=head_dim),
            core=self._core(context, head_dim),
            norms=QueryKeyNorms(q_norm, k_norm, all_heads=self.qk_norm == "all", rotated=self.qk_norm_rotated),
            values=ValueForm(self.qk_norm_eps if self.v_norm else None, self.value_scale, self.k_eq_v),
            growth=QueryGrowth(self.query_growth, self.query_growth_length, self.query_growth_offset)
            if self.query_growth
            else None,
            bias=self.bias,
            output_bias=self.bias and self.output_bias,
            gate_width=self._gate_width(self.v_head_dim or head_dim),
            init=init,
        )

    def _core(self, context: BuildContext, head_dim: int) -> AttentionCore:
        from forge_plugin_transformer.modules.attention_core import AttentionCore, PluggedCore
        from forge_plugin_transformer.modules.masks import MaskedCore, check_mask

        if self._scoring.mask is not None:
            check_mask(self.mask, "model.attention.mask")
        if isinstance(self.backend, AttentionBackendComponent):
            kernel = context.at("backend").build(self.backend, scoring=self._scoring, head_dim=head_dim)
            return PluggedCore(kernel, type(self.backend).__name__, self._scoring)
        choice = choose_backend(self.backend, context, head_dim, self._scoring)
        documents = choose_documents(self.documents, choice.kernel, context, head_dim, self._scoring)
        core = AttentionCore if self._scoring.mask is None else MaskedCore
        return core(choice, documents, self._scoring)

    def _gate_width(self, v_head_dim: int) -> int:
        if not self.gate:
            return 0
        return 1 if self.gate == "head" else v_head_dim

    def _norm(self, heads: int, head_dim: int) -> nn.Module | None:
        from forge_plugin_transformer.modules import norms

        if not self.qk_norm:
            return None
        eps, offset = self.qk_norm_eps, self.qk_norm_offset
        if not self.qk_norm_gain:
            return norms.GainlessNorm(eps=eps)
        if self.qk_norm == "layer":
            return norms.HeadLayerNorm(heads, head_dim, eps=eps)
        if self.qk_norm == "all":
            # A class apart: tensor-parallel ranks have the features of some heads, and add up the squares of all
            return norms.SplitRootMeanSquareNorm(heads * head_dim, eps=eps, offset=offset)
        return norms.RootMeanSquareNorm(head_dim, eps=eps, offset=offset)


ROUNDING = 256
"""The derived hidden width is a multiple of this, as accelerators like it."""


@frozen(kw_only=True)
class SwiGLU(FFNComponent):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    in_two_steps = True
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices; 0: 8/3 of `dim`, rounded up to a multiple of 256."""
    bias: bool = False
    """Whether the three matrices have biases."""
    gate_scale: float = field(default=1.0, validator=gt(0), metadata=when_resumed("flag"))
    """Factor on gate(x), before the activation (Falcon-H1)."""
    scale: float = field(default=1.0, validator=gt(0), metadata=when_resumed("flag"))
    """Factor on the output (Falcon-H1)."""

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns three matrices of width `hidden`, or `default_hidden(dim)` if that is 0."""
        from forge_plugin_transformer.modules import feed_forward

        hidden = self.hidden or default_hidden(dim)
        if self.gate_scale == self.scale == 1:  # without products with 1
            return feed_forward.GatedFeedForward(dim, hidden, bias=self.bias, init=init)
        scales = {"gate_scale": self.gate_scale, "scale": self.scale}
        return feed_forward.ScaledGatedFeedForward(dim, hidden, bias=self.bias, init=init, **scales)


def default_hidden(dim: int) -> int:
    """8/3 of `dim`, so that three matrices have as many elements as the two of a plain feed-forward of 4 `dim`."""
    # Negated twice, so that the floor division rounds up
    return -(-8 * dim // (3 * ROUNDING)) * ROUNDING


@frozen(kw_only=True)
class GEGLU(FFNComponent):
    """down(gelu(gate(x)) * up(x)) (Shazeer 2020), as in Gemma."""

    in_two_steps = True
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices; 0: 8/3 of `dim`, rounded up to a multiple of 256."""
    bias: bool = False
    """Whether the three matrices have biases."""
    approximate: Literal["tanh", "none"] = "tanh"
    """The activation by its tanh approximation (Gemma), or exactly."""
    sparsity: float = field(default=0.0, validator=[ge(0), lt(1)])
    """s > 0: of the gates of a position, about the share s is 0: before the activation they become
    relu(gate - mean - k std), with their mean and deviation, and k such that a normal variable is below k with
    probability s (Spark Transformer; Gemma 3n)."""

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns three matrices of width `hidden`, or `default_hidden(dim)` if that is 0."""
        from forge_plugin_transformer.modules import feed_forward

        hidden = self.hidden or default_hidden(dim)
        return feed_forward.GELUGatedFeedForward(
            dim, hidden, bias=self.bias, approximate=self.approximate, sparsity=self.sparsity, init=init
        )


@frozen(kw_only=True)
class GELU(FFNComponent):
    """down(gelu(up(x))), as in GPT-2."""

    in_two_steps = True
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices; 0: 4 times `dim`."""
    bias: bool = False
    """Whether the two matrices have biases."""
    approximate: Literal["tanh", "none"] = "tanh"
    """The activation by its tanh approximation (GPT-2), or exactly."""

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns two matrices of width `hidden`, or 4 `dim` if that is 0."""
        from forge_plugin_transformer.modules import feed_forward

        hidden = self.hidden or 4 * dim
        return feed_forward.PlainFeedForward(dim, hidden, bias=self.bias, approximate=self.approximate, init=init)


@frozen(kw_only=True)
class SquaredReLU(FFNComponent):
    """down(relu(up(x))²) (So et al. 2021, "Primer"), as in Nemotron."""

    in_two_steps = True
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices; 0: 4 times `dim`."""
    bias: bool = False
    """Whether the two matrices have biases."""

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns two matrices of width `hidden`, or 4 `dim` if that is 0."""
        from forge_plugin_transformer.modules import feed_forward

        return feed_forward.SquaredReLUFeedForward(dim, self.hidden or 4 * dim, bias=self.bias, init=init)


@frozen(kw_only=True)
class XIELU(FFNComponent):
    """down(xielu(up(x))), whose two slopes are learned (Huang and Schlag 2024, arXiv 2411.13010; Apertus).

    xielu(x) is a x² + b x where x > 0, and c (exp(x) - 1 - x) + b x elsewhere, with a = softplus(`alpha_p`),
    c = b + softplus(`alpha_n`) and b = 0.5. Both begin at 0.8.
    """

    in_two_steps = True
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices; 0: 4 times `dim`."""

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns two matrices of width `hidden`, or 4 `dim` if that is 0."""
        from forge_plugin_transformer.modules import feed_forward

        return feed_forward.XIELUFeedForward(dim, self.hidden or 4 * dim, init=init)


@frozen(kw_only=True)
class RMSNorm(NormComponent):
    """Scales by the root mean square, without centring (Zhang & Sennrich 2019)."""

    eps: float = field(default=1e-5, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the mean square."""
    offset: Literal[0, 1] = 0
    """Added to the learned gain, which starts at 1 - offset. With 1 (Gemma), weight decay draws the gain to one."""

    def build(self, context: BuildContext, dim: int) -> nn.Module:
        """Returns a module with one parameter, of the gain: (dim,)."""
        from forge_plugin_transformer.modules import norms

        return norms.RootMeanSquareNorm(dim, eps=self.eps, offset=self.offset)


@frozen(kw_only=True)
class LayerNorm(NormComponent):
    """Centres and scales to unit variance (Ba et al. 2016)."""

    eps: float = field(default=1e-5, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the variance."""
    bias: bool = True
    """Whether a learned offset is added after the learned gain."""
    offset: Literal[0, 1] = 0
    """Added to the learned gain, which starts at 1 - offset. With 1 (Nemotron), weight decay draws the gain to one."""

    def build(self, context: BuildContext, dim: int) -> nn.Module:
        """Returns a module with a gain (dim,) and, if `bias` is set, an offset (dim,)."""
        from forge_plugin_transformer.modules import norms

        return norms.CentredNorm(dim, eps=self.eps, bias=self.bias, offset=self.offset)
