"""Kinds of component that a transformer consists of, and the module that each must build.

Shapes: B sequences, S positions, D model width, H query heads, K key/value heads, E width of a head.

The built modules may further have `flops`, `parameter_roles`, `tensor_parallel_plan`, `float8_exempt`, `expert_stacks`,
`sequence_mixers`, `prepare` and `backend_choices`, as `forge_core.contracts.model.Model`, with names relative to
themselves. The model combines the answers of its parts. A part without `flops` counts 6 for each element of its
matrices; the roles of one without roles follow from shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from forge_core.contracts.components import Component
from forge_core.contracts.errors import ForgeError, Problem
from forge_plugin_transformer.scoring import visible_pairs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_transformer.scoring import Scoring


@frozen
class InitStd:
    """Standard deviations from which a layer draws its matrices."""

    inner: float
    """Standard deviation of matrices whose output stays inside the layer."""
    residual: float
    """Standard deviation of matrices that write into the residual stream."""


@frozen(kw_only=True)
class AttentionComponent(Component):
    """Builds the module through which positions of a sequence see each other.

    The module maps `(x (B, S, D), batch, cache=None) -> (B, S, D)`. It owns the position encoding and the mask: a
    position attends to itself and earlier ones, within its document where the batch has `document_ids`. For generation
    it has `new_cache(batch_size, length)`, whose result is passed as `cache` with the next positions of each row.

    A module with `attends_spans = True` further lets positions of a span (an image, say) attend to each other in both
    directions, with a cache too, where the batch has spans: see `forge_plugin_transformer.modules.spans`.
    """

    kind = "attention"

    def width_problems(self, dim: int) -> Iterable[Problem]:
        """Yields problems that depend on the model's width; paths are relative to this component's table."""
        return ()

    def depth_problems(self, layers: int) -> Iterable[Problem]:
        """Yields problems that depend on the model's number of layers; paths are relative to this component's table."""
        return ()

    in_two_steps: ClassVar[bool] = False
    """Whether its modules are `InTwoSteps` of `forge_plugin_transformer.modules.parts`, so that `[model.canon]` can be
    between projections and attention."""

    shares_kv: ClassVar[bool] = False
    """Whether a layer of it may attend to keys and values of another, by `build_borrowing`; see `KVExchange` of
    `forge_plugin_transformer.modules.attention`."""

    def of_layer(self, layer: int) -> AttentionComponent:
        """Returns the component of a layer, by its number: this one, unless it chooses among others."""
        return self

    def kv_shape(self, dim: int, ranks: int) -> tuple[int, int]:
        """Returns the number and the width of heads of keys and values to share, of one of `ranks` that divide them.

        Raises:
            ForgeError: it shares none.
        """
        raise ForgeError(f"{type(self).__name__} shares no keys and values")

    def build_borrowing(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """As `build`, without keys and values: the module's `cache` has them, of another layer.

        Raises:
            ForgeError: it shares none.
        """
        raise ForgeError(f"{type(self).__name__} shares no keys and values")

    def of_layers(self) -> Iterable[AttentionComponent]:
        """Yields the components whose modules the layers have: this one, unless it chooses among others."""
        yield self

    def left_out(self, layer: int) -> bool:
        """Returns whether a layer has no attention, and so neither norm nor residual connection for it."""
        return False

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Build with the model's width D and the deviations of matrices; `context.layer` is the layer's number.

        Not called for a layer that `left_out` leaves without.
        """
        raise NotImplementedError


@frozen(kw_only=True)
class AttentionBackendComponent(Component):
    """Builds a kernel of attention, for `backend` of `gqa` in place of the name of an installed one.

    The module maps `(q (B, S, H, E), k (B, S, K, E), v (B, S, K, V), batch, sinks) -> (B, S, H, V)`: causal attention,
    within documents where the batch has `document_ids` (B, S), neighbours with equal ids being of one. It has no
    parameters, and computes what `scoring` describes; `sinks` (H,) are None without them. With tensor parallel, H and K
    are a rank's heads. `prepare(batch)` may add an entry that all layers share, such as a mask.

    Generation with a cache, spans and context parallelism have their own kernels.
    """

    kind = "attention_backend"
    resumes_as = "safe"
    computes: ClassVar[Collection[str]] = ()
    """Variations of plain causal attention that it computes: of `window`, `scale`, `soft_cap`, `sinks`, `mask`
    (`scoring.mask`, a causal one) and `bidirectional_mask` (any other). A job with another one is refused."""

    def build(self, context: BuildContext, scoring: Scoring, head_dim: int) -> nn.Module:
        """Build for heads of width E on the context's device and dtype.

        Raises:
            JobError: the kernel cannot run there.
        """
        raise NotImplementedError


@frozen(kw_only=True)
class AttentionMaskComponent(Component):
    """A mask: which positions of its document a position attends to, for `mask` of `gqa`.

    Documents of a packed sequence stay apart, and a position always sees itself, whatever the mask.
    """

    kind = "attention_mask"
    resumes_as = "flag"
    causal: ClassVar[bool] = True
    """Whether no position sees a later one; `sees` need not exclude these. A job with another mask needs a loss with
    `predicts_next_token = False`, as the next token is among what a position sees."""

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns where a query sees a key, as `mask_mod` of FlexAttention: bool, of the shape both broadcast to.

        Called with the positions (int64) of all queries and keys at once. They count from 0 at the start of the
        document; an element of the result depends on that query and that key only.
        """
        raise NotImplementedError

    def reach(self) -> int:
        """Returns how many positions a query looks back at most, itself included; 0: no limit.

        A cache has no more keys and values than that.
        """
        return 0

    def hides(self, length: int) -> bool:
        """Returns whether it hides anything (that is not later, if causal) in documents of this length or less.

        Where it does not, kernels get no mask.
        """
        return True

    def pairs(self, length: int) -> float:
        """Returns how many pairs of a document see each other, with half of each position's own, to count FLOPs."""
        return visible_pairs(length, self.reach())


@frozen(kw_only=True)
class BlockMaskComponent(AttentionMaskComponent):
    """A causal mask that cuts documents into blocks, of which each is as a document for itself.

    Kernels get the blocks as documents. So each of them computes such a mask, in each of its ways to keep documents
    apart, and no pair of two blocks need be computed.
    """

    def block(self, position: Tensor) -> Tensor:
        """Returns the number of the block of each position, of the same shape; equal numbers are neighbours."""
        raise NotImplementedError

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns where both are of one block."""
        return self.block(query) == self.block(key)


@frozen(kw_only=True)
class FFNComponent(Component):
    """Builds the module that transforms each position: `(x (B, S, D), batch) -> (B, S, D)`.

    A module that has `new_cache`, as attention, depends on earlier positions, and in generation receives its cache as a
    third argument.
    """

    kind = "ffn"
    in_two_steps: ClassVar[bool] = False
    """Whether its modules are `InTwoSteps` of `forge_plugin_transformer.modules.parts`, so that `[model.canon]` can be
    before the activation."""

    def normalises_input(self, layer: int) -> bool:
        """Returns whether the module of a layer normalises what it reads, so that the block has no norm before it."""
        return False

    def depth_problems(self, layers: int) -> Iterable[Problem]:
        """Yields problems that depend on the model's number of layers; paths are relative to this component's table."""
        return ()

    def of_layers(self) -> Iterable[FFNComponent]:
        """Yields the components whose modules the layers have: this one, unless it chooses among others."""
        yield self

    def left_out(self, layer: int) -> bool:
        """Returns whether a layer has no feed-forward part, and so neither norm nor residual connection for it."""
        return False

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Build with the model's width D and the deviations of matrices; `context.layer` is the layer's number.

        Not called for a layer that `left_out` leaves without.
        """
        raise NotImplementedError


@frozen(kw_only=True)
class NormComponent(Component):
    """Builds a normalisation over the last dimension, computed in float32 or wider: `(x) -> x` of the same dtype."""

    kind = "norm"

    def build(self, context: BuildContext, dim: int) -> nn.Module:
        """Build for a last dimension of size `dim`."""
        raise NotImplementedError


@frozen(kw_only=True)
class ResidualComponent(Component):
    """Builds the module by which a part of a block (attention or feed-forward, with its norms) joins the stream.

    The module maps `(x, branch) -> x`: `branch` is the part, (B, S, D) to (B, S, D), and is called once. With
    `residual = "parallel"` it ignores its argument, as both parts read what comes before the first of them.

    x is (B, S, D), or (B, S, n, D) if the component has n > 1 streams: a model then expands its embeddings to n equal
    streams, passes all of them from layer to layer, and adds them up before its last norm. The module computes each
    position by itself: with sequence parallel, S is a rank's part, and gradients of its parameters are summed.
    """

    kind = "residual"

    def stream_count(self) -> int:
        """Returns n, the residual streams between layers."""
        return 1

    def build(self, context: BuildContext, dim: int, init: InitStd, part: int) -> nn.Module:
        """Build for width D; `part` counts the parts of all layers from 0, two of each: attention, then feed-forward.

        Initial values should make the module start close to x + f(x), to which the matrices' deviations fit.
        """
        raise NotImplementedError


@frozen(kw_only=True)
class RopeComponent(Component):
    """Builds a rotary position encoding for heads of one width.

    The module maps `(length, positions=None) -> (cos, sin)` for positions 0 to `length` - 1, or for `positions`
    (B, S). Both tables broadcast against (B, S, heads, E), or against the first dimensions of heads where these alone
    are rotated, and are float32 or wider; `sin` carries the sign of the half-split rotation, so that
    `rotate(x, cos, sin)` of `forge_plugin_transformer.modules.rotary` applies them. A module may have a string `key`
    that is equal where the tables are equal: layers then share the tables of a batch's positions. It may have a string
    `entry`: the batch entry (B, S, …) of that name is passed as `positions` where there is one.

    A module whose tables depend on the length of a sequence has `at_lengths(positions, lengths)`: it is called in
    generation with a cache, `lengths` (B,) being the positions that each row has by now. Where keys in the cache are
    void beyond a length, `cache_limits` has that length, and `generate` recomputes the cache (see `VoidsCache` of
    `forge_kit.nn.generation`).
    """

    kind = "rope"
    resumes_as = "flag"

    def score_factor(self) -> float:
        """Returns the factor on attention scores that the tables do not contain.

        Only attention with a separate part for positions (`mla`) uses it: its tables affect only a part of each score.
        """
        return 1.0

    def width_problems(self, head_dim: int) -> Iterable[Problem]:
        """Yields problems that depend on the width of a head; paths are relative to this component's table."""
        return ()

    def build(self, context: BuildContext, head_dim: int) -> nn.Module:
        """Args: `head_dim`, the width E of a head; even."""
        raise NotImplementedError
