"""Dispatch of tokens to the groups that compute them, experts or ranks, and back.

Shapes: T tokens, K choices of each among G groups, M rows, one for each choice, ordered by group; D width.

The way there copies tokens and the way back sums their rows, so each is the gradient of the other. Both are gathers: no
two writes go to one place, so results do not depend on their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class ExpertStack(Protocol):
    """A module whose parameters, its own and its children's, all stack experts on dimension 0.

    Ranks share experts by holding a contiguous range each: with only these parameters, and expert numbers relative to
    the range, the module computes their part of the sum.
    """

    def __call__(
        self,
        tokens: Tensor,
        weights: Tensor,
        chosen: Tensor,
        rows: int | None = None,
        overlap_fn: Callable[[], None] | None = None,
    ) -> Tensor:
        """Returns (T, D), in the dtype of `tokens`: the sum of weight x expert(token) over a token's choices.

        Args:
            tokens: (T, D).
            weights: (T, K), float32 or wider; differentiable.
            chosen: (T, K), int64, numbers of experts. -1: none, whatever the weight.
            rows: number of choices that are not -1; None: the host waits for the device to count them.
            overlap_fn: called once; expert parallelism runs it while tokens are in flight.
        """
        ...


class ExpertRanks(NamedTuple):
    """Ranks that share the experts of a stack equally: rank r of R has the experts r x E / R to (r + 1) x E / R - 1.

    With nodes, the same holds of the nodes, and of the ranks of each.
    """

    group: dist.ProcessGroup
    """This rank, and those that it exchanges tokens with."""
    experts: int
    """Experts of each rank of the group, or of its node."""
    outer: int = 1
    """Nodes over which tokens are distributed already."""


class Dispatched(NamedTuple):
    """What a dispatcher has brought to a rank: N tokens, each with K' choices among the rank's experts."""

    arrive: Callable[[], Tensor]
    """Waits for the tokens if they are in flight, and returns them, (N, D); called once."""
    weights: Tensor
    """(N, K'), float32 or wider; differentiable."""
    chosen: Tensor
    """(N, K'), int64, numbers relative to the rank's first expert; -1: none."""
    rows: int | None = None
    """Number of choices that are not -1; None: whoever needs it waits for the device to count them."""
    state: Any = None
    """What `combine` needs to know of the way here."""


class TokenDispatcher(Protocol):
    """Moves tokens to the ranks that hold their experts, and results back (Megatron's token dispatcher).

    Ranks of a group call both methods in the same order, with T different on each, 0 included. One dispatcher serves
    all layers whose stacks have equally many experts, so it has no state between calls but `Dispatched.state`. Both
    methods are differentiable in tokens and weights; activation checkpointing may call them twice. They run outside of
    compiled graphs. In a planned step, tensors are fake: no number may be read from one.

    A token may arrive at a rank once, with all its choices there (K' = K; `all_to_all`, DeepEP), or once for each
    choice (K' = 1). The stack orders the rows by expert: it adds up outputs of a token's choices on its rank, each
    times its weight, so `combine` adds up one output of each arrived token, without weights.
    """

    def dispatch(self, tokens: Tensor, weights: Tensor, chosen: Tensor, rows: int | None) -> Dispatched:
        """Sends a rank's tokens to the ranks that hold their experts; arguments as of `ExpertStack`."""
        ...

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """(N, D), one for each token that has arrived -> (T, D): the sum of the outputs of each token that was sent."""
        ...


class Dispatch(NamedTuple):
    """The order of the rows by group and by token."""

    # A named tuple and not an attrs class: torch.compile can trace its construction.

    choices: Tensor
    """(M,) the choice, t x K + k, that each row is for; T x K: for none."""
    sources: Tensor
    """(M,) the token of each row; any, if it is for no choice."""
    counts: Tensor
    """(G,) rows of each group."""
    by_token: Tensor
    """The rows that are for a choice, ordered by token."""
    starts: Tensor
    """(T,) where a token's rows begin in `by_token`."""

    @classmethod
    def to_groups(cls, chosen: Tensor, groups: int, rows: int, multiple: int = 1) -> Dispatch:
        """Returns the dispatch of choices. Tokens keep their order within a group.

        Args:
            chosen: (T, K), the group of each choice, -1 for none.
            groups: G.
            rows: number of choices that are not -1, passed in so that the host need not wait for it.
            multiple: the rows of each group are padded to a multiple of this, with rows for no choice. If it is more
                than 1, the host waits for their number.
        """
        flat = chosen.flatten()
        # -1 sorts last, as a group after all others, so that the first `rows` are those that are for a choice.
        ordered, order = flat.where(flat >= 0, groups).sort(stable=True)
        # Unlike for `bincount`, the host need not wait for this.
        ends = torch.searchsorted(ordered, torch.arange(groups, device=flat.device), right=True)
        choices = order[:rows]
        of_token = (chosen >= 0).sum(1)
        dispatch = cls(
            choices=choices,
            sources=choices // chosen.shape[1],
            counts=ends.diff(prepend=ends.new_zeros(1)),
            # If every choice has a row, the inverse of the permutation is enough: no second sort
            by_token=_inverse(order) if _surely(rows == len(flat)) else choices.argsort(),
            starts=of_token.cumsum(0) - of_token,
        )
        return dispatch if multiple == 1 else dispatch._filled_up(multiple, none=len(flat))

    def _filled_up(self, multiple: int, none: int) -> Dispatch:
        """Returns this dispatch with groups padded to a multiple of rows, by rows for the choice `none`."""
        counts = self.counts.add(multiple - 1).floor_divide(multiple).mul(multiple)
        missing = counts - self.counts
        # Rows of padding that precede each row: the padding of all earlier groups
        before = (missing.cumsum(0) - missing).repeat_interleave(self.counts)
        places = torch.arange(len(self.choices), device=counts.device) + before
        # The host waits here, as the size of a tensor must be known to it
        shape = (int(counts.sum()),)
        return self._replace(
            choices=self.choices.new_full(shape, none).scatter(0, places, self.choices),
            sources=self.sources.new_zeros(shape).scatter(0, places, self.sources),
            counts=counts,
            by_token=places.index_select(0, self.by_token),
        )

    def to_rows(self, tokens: Tensor) -> Tensor:
        """(T, D) -> (M, D): a copy of its token for each row."""
        return _ToRows.apply(tokens, self.sources, self.by_token, self.starts)  # type: ignore[no-untyped-call]

    def add_up(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """(M, D), weights (T, K) -> (T, D): the sum of each token's rows, each times its choice's weight if given.

        Raises:
            ValueError: there are rows for no choice, whose gradients only weights make zero, and no weights.
        """
        if weights is not None:
            weights = self.of_rows(weights)
        elif len(self.choices) > len(self.by_token):
            raise ValueError("groups are filled up with rows for no choice; pass the weights")
        return _AddUp.apply(rows, weights, self.sources, self.by_token, self.starts)  # type: ignore[no-untyped-call]

    def of_rows(self, values: Tensor) -> Tensor:
        """(T, K) -> (M,): the value of each row's choice, 0 for rows for no choice."""
        values = values.flatten()
        if len(self.choices) > len(self.by_token):  # rows for no choice have the number T x K, at which a 0 is appended
            values = F.pad(values, (0, 1))
        return values.index_select(0, self.choices)


def _surely(condition: bool) -> bool:
    """Returns a condition on a number of rows; False in a graph that serves any number of them."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # brings sympy, which takes a second

    return guard_or_false(condition)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, by_token: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(by_token, starts)
        return tokens.index_select(0, sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _sums(grad, None, *ctx.saved_tensors), None, None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, sources: Tensor, by_token: Tensor, starts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(sources, *(() if weights is None else (rows, weights)))
        return _sums(rows, weights, by_token, starts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        sources, *weighted = ctx.saved_tensors
        of_rows = grad.index_select(0, sources)
        if not weighted:
            return of_rows, None, None, None, None
        rows, weights = weighted
        # First, as the product below is in place
        of_weights = (of_rows * rows).sum(-1, dtype=weights.dtype) if ctx.needs_input_grad[1] else None
        return of_rows.mul_(weights.to(rows.dtype).unsqueeze(-1)), of_weights, None, None, None


def _sums(rows: Tensor, weights: Tensor | None, by_token: Tensor, starts: Tensor) -> Tensor:
    """(T, D): the sum of the rows (M, D) of each token, times `weights` (M,)."""
    if _surely(len(rows) == 0):
        return rows.new_zeros(len(starts), rows.shape[1])
    if weights is not None:
        weights = weights.to(rows.dtype).index_select(0, by_token)
    # Gathers and sums in one kernel, without a copy of the rows in the order of tokens
    return F.embedding_bag(by_token, rows, starts, mode="sum", per_sample_weights=weights)
