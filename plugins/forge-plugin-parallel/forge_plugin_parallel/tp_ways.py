"""The ways in which tensor parallel treats a module, which models name in their `tensor_parallel_plan()`.

A module's class is replaced by one derived from it, whose `forward` computes with this rank's parts of the parameters.
An object in place of `module.forward` would not do: torch.compile treats each such object as another constant, and
would compile each of many equal blocks again.

Shapes: B sequences, S positions, s positions of this rank (S without sequence parallel), D model width, v rows of the
vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge_kit.nn.derived_class import derived
from forge_kit.torch_internals import parameters_of
from forge_plugin_parallel.collectives import all_gather, all_reduce, fan_out, gather_equal, reduce_scatter

SEQUENCE = 1
"""Dimension of the sequence in activations (B, S, D)."""


@define(eq=False)
class Ranks:
    """The tensor-parallel ranks of a run, and their collectives on activations. All modules share one object."""

    group: dist.ProcessGroup
    rank: int
    sequence_parallel: bool
    """Whether positions are divided over the ranks; off while a model decodes."""
    loss_parallel: bool

    def enter(self, x: Tensor) -> Tensor:
        """Returns all positions (B, S, D) of x (B, s, D), for modules of which each rank computes a part."""
        return all_gather(x, SEQUENCE, self.group) if self.sequence_parallel else fan_out(x, self.group)

    def leave_partial(self, x: Tensor) -> Tensor:
        """Sums x (B, S, D) over the ranks. Returns this rank's positions (B, s, D) of the sum."""
        return reduce_scatter(x, SEQUENCE, self.group) if self.sequence_parallel else all_reduce(x, self.group)


@contextmanager
def local_parameters(*modules: nn.Module) -> Iterator[None]:
    """A context in which this rank's local tensors replace the modules' parameters, connected to them for autograd."""
    originals = [(module, dict(parameters_of(module))) for module in modules]
    for module, parameters in originals:
        for key, parameter in parameters.items():
            if isinstance(parameter, DTensor):  # otherwise an outer context has replaced it already
                parameters_of(module)[key] = _connected(parameter)
    try:
        yield
    finally:
        for module, parameters in originals:
            parameters_of(module).update(parameters)


def _connected(parameter: Any) -> Tensor:
    """The local tensor, whose gradient is accepted as it is even where it is partial: `complete_gradients` sums it."""
    return parameter.to_local(grad_placements=parameter.placements)


class SplitModule(nn.Module):
    """Computes with this rank's parts of the parameters. Base of the classes that modules receive."""

    tp_ranks: Ranks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass, with this rank's parts of the parameters."""
        with local_parameters(self):
            return super().forward(*args, **kwargs)


class RowModule(SplitModule):
    """x Wᵀ with this rank's columns of W, summed over ranks; then the bias, once."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, this rank's inputs) to (B, s, outputs); the bias is added to the sum."""
        with local_parameters(self):
            bias = parameters_of(self).get("bias")
            if bias is None:
                return self.tp_ranks.leave_partial(super(SplitModule, self).forward(x))
            parameters_of(self)["bias"] = None  # each rank would add it to its part of the sum
            return self.tp_ranks.leave_partial(super(SplitModule, self).forward(x)) + bias.to(x.dtype)


class PartialRowModule(SplitModule):
    """x Wᵀ with this rank's columns of W, a part of a sum that is made elsewhere; one rank alone adds the bias."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass; rank 0 adds the bias, and all others 0 times the bias."""
        with local_parameters(self):
            bias = parameters_of(self).get("bias")
            if bias is not None and self.tp_ranks.rank:
                parameters_of(self)["bias"] = bias * 0  # every rank has a gradient, to be summed
            return super(SplitModule, self).forward(*args, **kwargs)


class EmbeddingModule(SplitModule):
    """Looks up the ids within this rank's rows, with zeros for all others; the sum over ranks is the embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        """(B, S) int64 to this rank's positions of the embeddings: (B, s, D)."""
        with local_parameters(self):
            weight: Any = self.weight
            rows = weight.shape[0]
            index = ids - self.tp_ranks.rank * rows
            inside = (index >= 0) & (index < rows)
            # Ids of other ranks read row 0, and the result is zeroed
            rows_of_rank = super(SplitModule, self).forward(index.where(inside, 0))
            return self.tp_ranks.leave_partial(rows_of_rank * inside.unsqueeze(-1))


class HeadModule(SplitModule):
    """A `Head` with this rank's rows of the vocabulary."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns (…, v) with loss parallel, otherwise all V words, gathered."""
        logits = super().logits(hidden)  # type: ignore[misc]
        return logits if self.tp_ranks.loss_parallel else gather_equal(logits, -1, self.tp_ranks.group)

    @contextmanager
    def whole(self, dtype: torch.dtype | None = None) -> Iterator[Sequence[Tensor]]:
        """Yields this rank's rows of the weights: whole with regard to other shardings, not to the vocabulary."""
        with local_parameters(self), super().whole(dtype) as weights:  # type: ignore[misc]
            yield weights


class WholeInputModule(SplitModule):
    """Gathers all positions of its first argument."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Gathers x (B, s, D) to (B, S, D); its gradient is summed over the ranks."""
        return super(SplitModule, self).forward(self.tp_ranks.enter(x), *args, **kwargs)


class PartialOutputModule(SplitModule):
    """Sums its output over the ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the sum over ranks of what the module computes on each."""
        return self.tp_ranks.leave_partial(super(SplitModule, self).forward(*args, **kwargs))


class SplitFeaturesModule(SplitModule):
    """Computes with some of the features of its input; what its `sum_features` returns is summed over the ranks."""

    def sum_features(self, x: Tensor) -> Tensor:
        """Returns the sum over the features of all ranks: (…, 1)."""
        own = super().sum_features(x)  # type: ignore[misc]
        # Each rank continues with different features: the sum's gradients differ by rank, and are summed, too.
        return fan_out(all_reduce(own, self.tp_ranks.group), self.tp_ranks.group)


NEVER, ALWAYS, AT_REST = "never", "always", "with sequence parallel"


@frozen
class Way:
    """How a module is split. A plan names one of `WAYS`, or contains a `Way` object of another distribution.

    Way("scale", split={"weight": 0}, inside=True)  # a factor for each feature, between `column` and `row`
    """

    # The stage and the checks go by these fields alone, so that a way of a third party can do whatever ours do.

    name: str
    module: type[SplitModule] = SplitModule
    """Mixin of the class that replaces the module's own; its `forward` computes this rank's part."""
    split: Mapping[str, int | None] = field(factory=dict, kw_only=True)
    """Dimension along which a parameter is split, by its name; None or not named: whole on each rank."""
    matrix: int | None = field(default=None, kw_only=True)
    """`MatrixShard.dimension` of the module, if it is one matrix that ranks share."""
    inside: bool = field(default=False, kw_only=True)
    """Whether it computes a part, so that a module around it must be `whole_input`."""
    partial: str = field(default=NEVER, kw_only=True)
    """When gradients of whole parameters are partial on each rank: `NEVER`, `ALWAYS`, or `AT_REST` (some positions)."""
    bias: bool = field(default=True, kw_only=True)
    """Whether its module may have a bias; without a sum in the module each rank would add it."""
    holder: bool = field(default=False, kw_only=True)
    """Whether its module has all positions, and sums the gradients of its input, for the modules in it."""
    vocabulary: bool = field(default=False, kw_only=True)
    """Whether its module is the head with some rows of the vocabulary on each rank."""
    needs_parameters: bool = field(default=True, kw_only=True)
    """Whether a module without parameters is left as it is."""
    method: str = field(default="", kw_only=True)
    """Method that its module must have, as the mixin extends it; empty: none but `forward`."""


WAYS: Mapping[str, Way] = {
    way.name: way
    for way in (
        Way("column", split={"weight": 0, "bias": 0}, matrix=0, inside=True),
        Way("row", RowModule, split={"weight": 1, "bias": None}, matrix=1, inside=True, partial=AT_REST),
        Way("partial_row", PartialRowModule, split={"weight": -1}, matrix=1, inside=True, partial=ALWAYS),
        Way("column_stack", split={"weight": 1, "bias": 1}, inside=True),
        Way("vocab_embedding", EmbeddingModule, split={"weight": 0}),
        Way("vocab_head", HeadModule, split={"weight": 0, "bias": 0}, vocabulary=True),
        Way("sequence", partial=AT_REST),  # it computes on this rank's positions only
        Way("replicate", inside=True, partial=ALWAYS),  # it computes on this rank's heads or columns only
        Way("partial", partial=ALWAYS),  # it computes a part of a sum that a module around it makes
        Way("whole_input", WholeInputModule, holder=True, needs_parameters=False),
        Way("partial_output", PartialOutputModule, needs_parameters=False),
        Way("split_features", SplitFeaturesModule, split={"weight": 0}, inside=True, method="sum_features"),
        Way("split_sum", SplitFeaturesModule, inside=True, needs_parameters=False, method="sum_features"),
        Way("behind_sum", inside=True, partial=AT_REST),  # as `sequence`, within a module that has all positions
    )
}
"""Ways by name.

column: rows of the weight, so that outputs are split. row: columns of the weight; takes split inputs, and sums over
ranks. partial_row: row without the sum, also for a stack of matrices. column_stack: column for a stack.
partial_output: sums its output over the ranks. whole_input: a module around such a pair; its first argument arrives
with all positions. vocab_embedding, vocab_head: rows, one per id. sequence: whole weights, on some positions (a norm
between such pairs). replicate: whole weights, on split features (a norm of each head).
partial: whole weights, of whose use each rank computes a part (an encoder of some of the images, in `partial_output`).
split_features: a weight for each feature, on split features; the module's `sum_features(x)`, its sum over the last
dimension, becomes that over the features of all ranks (a norm of all heads together). split_sum: likewise without a
weight. behind_sum: whole weights, on what a sum over ranks has left of the positions, inside of `whole_input`.
"""


def give_class(module: nn.Module, mixin: Any) -> None:
    """Derive the module's class from `mixin` and its own. Equal modules share one class, and so one compiled graph."""
    # An earlier stage may have set `forward` on the object, which would shadow the method of the new class.
    replaced = vars(module).pop("forward", None)
    base: Any = type(module)
    if replaced is not None:
        # In a class, where the mixin's `super()` finds it; static, as it is bound to the object already
        base = type(base.__name__, (base,), {"forward": staticmethod(replaced)})
    module.__class__ = derived(mixin, base)
