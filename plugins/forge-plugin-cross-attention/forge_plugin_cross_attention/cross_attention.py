"""The fusion `cross_attention`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, optional

from forge_core.contracts.components import default_type, when_resumed
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_transformer import FFNComponent, InitStd, NormComponent
from forge_plugin_vision import AdapterComponent, FusionComponent, Grid

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.job import Job
    from forge_plugin_vision.modules.vision import Vision

EVERY = 4
"""Layers from one block of cross-attention to the next, by default."""


@frozen(kw_only=True)
class CrossAttention(FusionComponent):
    """Blocks between the layers of the language model attend to the features of images.

    As in Flamingo (Alayrac et al. 2022) and Llama 3.2 Vision (Grattafiori et al. 2024, section 7.2). An image takes one
    position of the sequence, which marks where it stands. A block adds attention to the features of the images that
    a position sees, then a feed-forward part, each multiplied by a gate; it adds zeros where no image is seen.
    """

    every: int | None = field(default=None, validator=optional(ge(1)))
    """Every so many-th layer has a block: with 4, layers 3, 7, 11, … counted from 0. None: 4, unless `layers` names
    them."""
    layers: tuple[int, ...] = ()
    """Numbers of the layers that have a block, counted from 0, in place of `every`."""
    place: Literal["before", "after"] = "before"
    """Whether a block stands before its layer, as in Flamingo and Llama 3.2 Vision, or after it."""
    sees: Literal["last", "together", "all"] = "last"
    """Images that a position sees, of those that stand at or before it in its document. last: the last one (Flamingo).
    together: the last one and those that stand right before that, with no token between (Llama 3.2 Vision). all: all
    of them."""
    gate: Literal["tanh", "none"] = "tanh"
    """tanh: both parts of a block are multiplied by the tanh of a learned number, `gate_start` at first. none: they are
    not, and the matrices that write into the residual stream start at 0. Either way training starts, by default, from
    the language model as it is."""
    gate_start: float = 0.0
    """Initial value of those numbers. Other than 0, images have an influence, and all of a block a gradient, from the
    first step."""
    heads: int = field(default=8, validator=gt(0))
    """Query heads."""
    kv_heads: int = field(default=0, validator=ge(0))
    """Key/value heads, a divisor of `heads`; 0: as many as `heads`."""
    head_dim: int = field(default=0, validator=ge(0))
    """Width of a head; 0: the language model's width divided by `heads`."""
    qk_norm: bool = False
    """Whether queries and keys are RMS-normalised per head, with a learned gain (Llama 3.2 Vision)."""
    qk_norm_eps: float = field(default=1e-5, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the mean square in that normalisation."""
    norm: NormComponent = default_type("forge-plugin-transformer/rmsnorm")
    """`[model.fusion.norm]`: normalises the input of both parts of a block."""
    ffn: FFNComponent = default_type("forge-plugin-transformer/swiglu")
    """`[model.fusion.ffn]`: the feed-forward part of a block."""
    markers: int = field(default=2, validator=ge(2))
    """Rows of the embedding table for images: the first row stands for an image, the second for a video, and the others
    are not used. Llama 3.2 Vision has 8."""
    init_std: float = field(default=0.02, validator=gt(0))
    """Standard deviation of initial matrices."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields heads that do not divide, and keys that exclude each other or list a layer twice."""
        kv_heads = self.kv_heads or self.heads
        if self.heads % kv_heads:
            yield Problem("kv_heads", f"{kv_heads} does not divide heads, which is {self.heads}")
        elif kv_heads % layout.tp:  # each rank has whole heads
            yield Problem("kv_heads", f"{kv_heads} does not divide by the tensor-parallel degree {layout.tp}")
        if self.gate == "none" and self.gate_start:
            yield Problem("gate_start", 'there are no gates; leave it out, or set gate = "tanh"')
        if self.layers and self.every is not None:
            yield Problem("layers", "it names the layers that `every` would choose; leave one of them out")
        if any(self.ffn.left_out(number) for number in self.layers or [(self.every or EVERY) - 1]):
            yield Problem("ffn", 'its type is "none" in a block; a block has a feed-forward part always')
        if min(self.layers, default=0) < 0 or len({*self.layers}) < len(self.layers):
            yield Problem("layers", f"{list(self.layers)}: numbers from 0, each once")

    def positions(self, grid: Grid, adapter: AdapterComponent) -> int:
        """Returns 1: an image takes one position of any size, which marks where it stands."""
        return 1

    def tile_problem(self) -> str:
        """Returns why tiles need another `sees` than "last"; empty if it is another."""
        if self.sees != "last":
            return ""
        return 'with model.fusion.sees = "last" a position sees the last of them only; set it to "together" or "all"'

    def build(self, context: BuildContext, model: Model, vision: Vision) -> Model:
        """Adds a block to each chosen layer of the language model.

        Raises:
            JobError: `heads` does not divide the model's width, or the model lacks a chosen layer.
        """
        from forge_kit.nn.derived_class import derived
        from forge_kit.nn.generation import Generates
        from forge_plugin_cross_attention.modules.model import CrossAttentionModel, GeneratingModel, add_blocks
        from forge_plugin_vision.modules.grafting import TokensOnly, embedding_width, graft

        dim = embedding_width(model)
        self._check_width(dim)
        blocks = {number: self._build_block(context, int(number), dim) for number in self._chosen(list(model.layers))}
        # `Generates` is detected by its methods: a model that cannot generate must not have them.
        grafted: Any = graft(model, GeneratingModel if isinstance(model, Generates) else CrossAttentionModel, vision)
        # Ids of images are negative; `markers` has their embeddings.
        embedding: Any = type(grafted.embedding)
        grafted.embedding.__class__ = derived(TokensOnly, embedding)
        add_blocks(grafted, blocks, self, context)
        return grafted

    def _check_width(self, dim: int) -> None:
        if not self.head_dim and dim % self.heads:
            message = f"{self.heads} does not divide {dim}, the width of the language model"
            raise JobError([Problem("model.fusion.heads", f"{message}; change it or set head_dim")])

    def _chosen(self, layers: Sequence[str]) -> Sequence[str]:
        """Returns the names, of all `layers`, of those that have a block."""
        count, every = len(layers), self.every or EVERY
        if outside := [number for number in self.layers if number >= count]:
            message = f"{outside[0]} is no layer: the language model has {count}, counted from 0"
            raise JobError([Problem("model.fusion.layers", message)])
        if not self.layers and every > count:
            message = f"{every} leaves no layer that sees images: the language model has {count}"
            raise JobError([Problem("model.fusion.every", f"{message}; take {count} or less")])
        # From the end of the first `every` layers: with 4, the fourth layer is the first that has a block.
        return [layers[number] for number in self.layers or range(every - 1, count, every)]

    def _build_block(self, context: BuildContext, number: int, dim: int) -> nn.Module:
        from forge_plugin_cross_attention.modules.block import Attention, CrossAttentionBlock

        here = context.at(f"layers.{number}.cross_attention", layer=number)
        # Without gates, zeros in the last matrices make the block add nothing at first.
        init = InitStd(self.init_std, self.init_std if self.gate == "tanh" else 0.0)
        attention = Attention(
            dim,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim or dim // self.heads,
            qk_norm_eps=self.qk_norm_eps if self.qk_norm else None,
            init=init,
        )
        return CrossAttentionBlock(
            attention_norm=here.at("attention_norm").build(self.norm, dim=dim),
            attention=attention,
            ffn_norm=here.at("ffn_norm").build(self.norm, dim=dim),
            ffn=here.at("ffn").build(self.ffn, dim=dim, init=init),
            gate_start=self.gate_start if self.gate == "tanh" else None,
        )
