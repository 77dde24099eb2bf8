"""The lightning indexer: which earlier positions a query attends to, and how the choice is learned.

Shapes: B sequences, S positions, T positions of keys, R queries of a block, I heads of the indexer, J width of such a
head, H heads of the attention, E width of their queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forge_kit.nn.modules import LayerNorm, Linear
from forge_plugin_mla.modules.latent_attention import turned

FEWEST_ROWS = 128
MOST_BLOCKS = 64
"""So that the graph of compiled code does not grow with the length."""
KEY_EPS = 1e-6
"""Of the norm of keys, as in DeepSeek's code."""


class Index(NamedTuple):
    """What scores are made of."""

    q: Tensor
    """(B, S, I, J)."""
    k: Tensor
    """(B, T, J)."""
    weights: Tensor
    """(B, S, I), with the factor of scores."""

    def packed(self) -> Tensor:
        """Returns all of it in one tensor (B, S, 1, …), for T = S."""
        return torch.cat([self.q.flatten(2), self.k, self.weights], -1).unsqueeze(2)

    @classmethod
    def unpacked(cls, packed: Tensor, heads: int, width: int) -> Index:
        """Returns the parts of `packed`."""
        q, k, weights = packed.squeeze(2).split([heads * width, width, heads], -1)
        return cls(q.unflatten(-1, (heads, width)), k, weights)

    def detached(self) -> Index:
        """Returns the same without a path to the parameters, in float32 or wider.

        Of 16 bits, scores would have too few values to tell the best keys from others.
        """
        return Index(*(tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in self))


class LightningIndexer(nn.Module):
    """Makes queries of the attention's latent of queries, and one key for all heads and a weight per head of x."""

    def __init__(self, dim: int, *, latent: int, heads: int, head_dim: int, interleaved: bool, std: float) -> None:
        """Build the projections.

        Args:
            dim: D.
            latent: width of what queries are made of.
            heads: I.
            head_dim: J.
            interleaved: whether neighbouring dimensions are rotated together, of the first ones of a head.
            std: standard deviation of initial matrices.
        """
        super().__init__()
        self.heads, self.head_dim, self.interleaved = heads, head_dim, interleaved
        self.q = Linear(latent, heads * head_dim, std=std)
        self.k = Linear(dim, head_dim, std=std)
        self.k_norm = LayerNorm(head_dim, eps=KEY_EPS)
        self.weights = Linear(dim, heads, std=std)

    def forward(self, x: Tensor, latent: Tensor, turns: tuple[Tensor, Tensor]) -> Index:
        """(B, S, D), and the latent of queries (B, S, …); nothing flows back through either."""
        # Apart from the graph: the indexer learns by its divergence alone (DeepSeek-V3.2-Exp)
        x, latent = x.detach(), latent.detach()
        q = turned(self.q(latent).unflatten(-1, (self.heads, self.head_dim)), turns, self.interleaved)
        k = turned(self.k_norm(self.k(x)).unsqueeze(2), turns, self.interleaved).squeeze(2)
        # 1 / sqrt(J) for the products, 1 / sqrt(I) for the sum over heads, as in DeepSeek's code
        return Index(q, k, self.weights(x) * (self.heads * self.head_dim) ** -0.5)


# --- scores and choice -----------------------------------------------------------------------------------------------


def blocks(length: int) -> Iterator[tuple[slice, int]]:
    """Yields blocks of queries, each with the number of positions up to its end."""
    rows = max(FEWEST_ROWS, -(-length // MOST_BLOCKS))
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length)), min(start + rows, length)


def visible(own: slice, stop: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """Returns which of `stop` positions the queries of a block see: (1 or B, R, T).

    Args:
        own: the block.
        stop: T.
        documents: number of each position's document (B, S), if documents are apart.
        device: of the result.
    """
    positions = torch.arange(stop, device=device)
    seen = (positions <= positions[own, None])[None]
    return seen if documents is None else seen & (documents[:, None, :stop] == documents[:, own, None])


def index_scores(index: Index) -> Tensor:
    """Returns (B, S, T): for each pair the weighted sum of the heads' products, as far as they are positive."""
    products = torch.einsum("bsij,btj->bsit", index.q, index.k).relu()
    return torch.einsum("bsit,bsi->bst", products, index.weights)


def best(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """Returns which keys have the `count` largest scores of those that a query sees: (B, S, T) bool.

    Of equal scores the earlier positions are taken, so that the choice depends neither on the kernel nor on how many
    hidden positions there are.
    """
    if scores.shape[-1] <= count:
        return seen.expand(scores.shape)
    scores = scores.masked_fill(~seen, -torch.inf)
    last = scores.topk(count, -1).values[..., -1:]
    above, equal = scores > last, (scores == last) & seen
    left = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= left))


@torch.no_grad()
def chosen_of(index: Index, seen: Tensor, count: int) -> Tensor:
    """As `chosen`, of T keys where `seen` (B, S, T) is the mask of a cache: (B, S, T) bool."""
    index = index.detached()
    parts = []
    for own, _ in blocks(seen.shape[1]):
        scores = index_scores(Index(index.q[:, own], index.k, index.weights[:, own]))
        parts.append(best(scores, seen[:, own], count))
    return torch.cat(parts, 1)


@torch.no_grad()
def chosen(index: Index, documents: Tensor | None, count: int) -> Tensor:
    """Returns which `count` keys each query attends to: (B, S, S) bool."""
    index = index.detached()
    mask = torch.zeros(*index.k.shape[:2], index.k.shape[1], dtype=torch.bool, device=index.k.device)
    for own, stop in blocks(index.k.shape[1]):
        scores = index_scores(Index(index.q[:, own], index.k[:, :stop], index.weights[:, own]))
        mask[:, own, :stop] = best(scores, visible(own, stop, documents, scores.device), count)
    return mask


# --- loss ------------------------------------------------------------------------------------------------------------


class Teacher(NamedTuple):
    """The attention that the indexer learns from."""

    q: Tensor
    """(B, S, H, E), of this rank's heads."""
    k: Tensor
    """(B, S, H, E)."""
    heads: int
    """Over all ranks."""
    groups: Sequence[dist.ProcessGroup]
    """Of ranks that have other heads of the same sequences."""

    def distribution(self, own: slice, stop: int, attended: Tensor) -> Tensor:
        """Returns the mean of all heads' weights for a block of queries, each row of sum 1: (B, R, T)."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        q, k = self.q[:, own].to(wide), self.k[:, :stop].to(wide)
        scores = torch.einsum("brhe,bthe->bhrt", q, k) * q.shape[-1] ** -0.5
        # Divided by the heads of all ranks: the sum over ranks then is the mean
        weights = scores.masked_fill(~attended[:, None], -torch.inf).softmax(-1).sum(1) / self.heads
        for group in self.groups:
            dist.all_reduce(weights, group=group)
        return weights


def index_loss(index: Index, teacher: Teacher, documents: Tensor | None, mask: Tensor | None) -> Tensor:
    """Returns the sum over positions of KL(p || softmax of the indexer's scores), with a gradient for the index alone.

    p is the mean of the attention's weights over its heads. Both are over the keys that the query attends to.

    Args:
        index: T = S.
        teacher: where p comes from.
        documents: number of each position's document (B, S), if documents are apart.
        mask: which keys are attended to, (B, S, S); None: all that a query sees.
    """
    detached = Teacher(teacher.q.detach(), teacher.k.detach(), teacher.heads, teacher.groups)
    return _IndexLoss.apply(*index, detached, documents, mask)  # type: ignore[no-any-return, no-untyped-call]


class _IndexLoss(torch.autograd.Function):
    """Computes gradients with the loss, block by block, and keeps nothing of the size S x S."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, weights: Tensor, teacher: Teacher, documents: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        dtypes = [tensor.dtype for tensor in (q, k, weights)]
        q, k, weights = Index(q, k, weights).detached()
        total = q.new_zeros(())
        grads = [torch.zeros_like(tensor) for tensor in (q, k, weights)]
        for own, stop in blocks(k.shape[1]):
            attended = visible(own, stop, documents, q.device) if mask is None else mask[:, own, :stop]
            target = teacher.distribution(own, stop, attended)
            products = torch.einsum("brij,btj->brit", q[:, own], k[:, :stop])
            positive = products.relu()
            scores = torch.einsum("brit,bri->brt", positive, weights[:, own]).masked_fill(~attended, -torch.inf)
            logs = scores.log_softmax(-1)
            # 0 where p is 0, and hidden keys have a logarithm of -inf
            total += (torch.xlogy(target, target) - target * logs.masked_fill(~attended, 0.0)).sum()
            # The derivative of the divergence by the scores, as each row of p sums to 1
            grad = logs.exp() - target
            grads[2][:, own] = torch.einsum("brit,brt->bri", positive, grad)
            inner = grad[:, :, None] * weights[:, own, :, None] * (products > 0)
            grads[0][:, own] = torch.einsum("brit,btj->brij", inner, k[:, :stop])
            grads[1][:, :stop] += torch.einsum("brit,brij->btj", inner, q[:, own])
        ctx.save_for_backward(*(grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)))
        return total

    @staticmethod
    # Gradients were computed with the loss, and have no graph
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(tensor * grad.to(tensor.dtype) for tensor in ctx.saved_tensors), None, None, None
