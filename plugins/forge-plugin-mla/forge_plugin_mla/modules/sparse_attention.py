"""Latent attention to the keys that an indexer chooses (DeepSeek Sparse Attention).

Shapes: as in `latent_attention`; I heads of the indexer, J their width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import Tensor, nn

from forge_kit.nn.head_mixers import sharing_ranks
from forge_kit.nn.taps import TapPoint
from forge_plugin_mla.modules.latent_attention import LatentAttention
from forge_plugin_mla.modules.latent_cache import IndexedCache
from forge_plugin_mla.modules.lightning_indexer import (
    Index,
    LightningIndexer,
    Teacher,
    chosen,
    chosen_of,
    index_loss,
)
from forge_plugin_transformer.modules.attention_core import torch_attention
from forge_plugin_transformer.modules.documents import document_starts
from forge_plugin_transformer.modules.rotary import generation_tables, tables
from forge_plugin_transformer.scoring import visible_pairs

if TYPE_CHECKING:
    import torch.distributed as dist

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch

LOSS = "dsa/index_loss"
"""Metric: the divergence of the indexer, a mean over positions, summed over layers."""
MASKED = "by a mask: all pairs are computed, and those not chosen have no weight"


@frozen(kw_only=True)
class Choosing:
    """How keys are chosen, and how that is learned."""

    heads: int
    """I."""
    head_dim: int
    """J."""
    top_k: int
    """Keys of a query."""
    interleaved: bool
    warm_up: bool
    """Whether queries attend to all keys, from which the indexer learns."""
    loss_weight: float


class SparseCore(nn.Module):
    """Attention to chosen keys; see `forge_kit.nn.head_mixers.MixesHeads`, by which `cp` calls it."""

    mixes_heads = True

    def __init__(self, choosing: Choosing, heads: int, context: BuildContext) -> None:
        """Set up the core.

        Args:
            choosing: how keys are chosen.
            heads: H over all ranks.
            context: of the attention.
        """
        super().__init__()
        self.choosing, self.heads = choosing, heads
        layout, mesh = context.layout, context.mesh
        shared = [name for name, degree in (("tp", layout.tp), ("cp", layout.cp)) if degree > 1]
        self._auxiliary, self._tp, self._cp = context.auxiliary, layout.tp, layout.cp
        self._groups: Sequence[dist.ProcessGroup] = [] if mesh is None else [mesh.get_group(name) for name in shared]

    def forward(self, tensors: Sequence[Tensor], per_head: Sequence[Tensor], batch: Batch) -> Tensor:
        """Returns (B, S, H, V).

        Args:
            tensors: queries and keys (B, S, H, E), values (B, S, H, V), and `Index.packed`.
            per_head: nothing.
            batch: `document_ids` (B, S), if documents are apart.
        """
        q, k, v, packed = tensors
        how, length = self.choosing, q.shape[1]
        index = Index.unpacked(packed, how.heads, how.head_dim)
        # Numbered by their starts: an id may occur again for another document
        documents = document_starts(batch["document_ids"]).cumsum(1) if "document_ids" in batch else None
        # In a sequence of at most `top_k` positions all keys are chosen
        mask = None if how.warm_up or length <= how.top_k else chosen(index, documents, how.top_k)
        if mask is not None:
            out = torch_attention(q, k, v, mask[:, None])
        elif documents is not None:
            out = torch_attention(q, k, v, (documents[:, None, :, None] == documents[:, None, None]).tril())
        else:
            out = torch_attention(q, k, v, None)
        if not self._auxiliary.active:
            return out
        loss = index_loss(index, Teacher(q, k, self.heads, self._groups), documents, mask)
        # Metrics are summed over the ranks of `cp`, which all compute the whole sequence; over `tp`, only gradients are
        return self._auxiliary.attach(
            out, loss / (length * self._cp), unit="sequence", name=LOSS, weight=how.loss_weight / self._tp
        )


class SparseLatentAttention(LatentAttention):
    """See `forge_plugin_transformer.AttentionComponent` for the contract."""

    def __init__(self, dim: int, *, choosing: Choosing, std: float, context: BuildContext, **latent: Any) -> None:
        """Build the attention.

        Args:
            dim: D.
            choosing: how keys are chosen.
            std: standard deviation of the indexer's initial matrices.
            context: of the attention.
            **latent: the other arguments of `LatentAttention`, without `core`.
        """
        super().__init__(dim, core=SparseCore(choosing, latent["heads"], context), **latent)
        self.choosing = choosing
        self.indexer = LightningIndexer(
            dim,
            latent=self.widths.q_latent or dim,
            heads=choosing.heads,
            head_dim=choosing.head_dim,
            interleaved=choosing.interleaved,
            std=std,
        )

    def forward(self, x: Tensor, batch: Batch, cache: Any = None) -> Tensor:
        """(B, S, D) -> (B, S, D). `batch` may hold `positions` and `document_ids`, both (B, S)."""
        if cache is not None:
            return self.o(self._attend_cached(x, batch, cache).flatten(2))  # type: ignore[no-any-return]
        turns, latent = tables(self.rotary, x.shape[1], batch), self._query_latent(x)
        k, v = self._expanded(*self._compressed(x, turns))
        q = self._queries(latent, turns)
        self._watch(q, k, batch)
        # All heads need the index: expanded, so that each rank of `cp` has it once heads are exchanged
        packed = self.indexer(x, latent, turns).packed().expand(-1, -1, sharing_ranks(self.core), -1)
        return self.o(self.core([q, k, v, packed], [], batch).flatten(2))  # type: ignore[no-any-return]

    # --- generation ----------------------------------------------------------------------------------------------

    def new_cache(self, batch_size: int, length: int) -> IndexedCache:
        """The cache has room for all `length` positions, since any of them may be chosen."""
        return IndexedCache(batch_size, length)

    def _attend_cached(self, x: Tensor, batch: Batch, cache: Any) -> Tensor:
        """(B, S, D) -> (B, S, H, V). Each row is one document here: `document_ids` play no part."""
        positions = cache.positions(x, batch)
        turns, latent = generation_tables(self.rotary, positions, batch), self._query_latent(x)
        index = self.indexer(x, latent, turns)
        compressed = self._compressed(x, turns)
        cached, keys, mask = cache.extend_indexed(*compressed, index.k, positions, cache.shared_mask(batch))
        if not self.choosing.warm_up and keys.shape[1] > self.choosing.top_k:
            cached, mask = self._chosen(Index(index.q, keys, index.weights), cached, mask)
        return self._attend_latents(self._queries(latent, turns), cached, mask, cache)

    def _chosen(self, index: Index, cached: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Latents (B, T, C + P) and mask (B, 1, S, T) -> of chosen positions, if there is one query alone."""
        count = self.choosing.top_k
        mask = chosen_of(index, mask.squeeze(1), count)
        if mask.shape[1] == 1:
            # True comes first, and there are at most `count`; a query that sees fewer keeps some hidden ones
            # As bytes, since topk takes no bool
            places = mask.squeeze(1).byte().topk(count, -1).indices
            cached = cached.gather(1, places.unsqueeze(-1).expand(-1, -1, cached.shape[-1]))
            mask = mask.gather(2, places.unsqueeze(1))
        return cached, mask.unsqueeze(1)

    # --- for the engine and the stages ---------------------------------------------------------------------------

    def flops(self, seq_len: int) -> float:
        """Counts 6 per weight; per key that a query attends to 6 per element, and of the indexer for all that it sees.

        The indexer's backward pass is over the attended keys only. What the loss computes once more of the attention
        is not counted.
        """
        weights = sum(parameter.numel() for parameter in self.parameters() if parameter.ndim > 1)
        every, how = visible_pairs(seq_len), self.choosing
        attended = every if how.warm_up else visible_pairs(seq_len, how.top_k)
        main = 6.0 * self.heads * (self.widths.key + self.widths.value) * attended
        index = how.heads * how.head_dim * (2.0 * every + 4.0 * attended)
        return 6.0 * weights + (main + index) / seq_len

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """As `LatentAttention`; each rank has the whole indexer, and a part of its gradients."""
        own = ("q", "k", "k_norm", "weights")
        return {**super().tensor_parallel_plan(), **{f"indexer.{name}": "replicate" for name in own}}

    def float8_exempt(self) -> Sequence[str]:
        """Also the indexer, whose choice rounding would change."""
        return [*super().float8_exempt(), *(f"indexer.{name}" for name in ("q", "k", "weights"))]

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the mixed values and the latents: the core gets queries and keys in one list with the indexer's."""
        points = super().tap_points()
        return {name: points[name] for name in ("z", "q_latent", "kv_latent") if name in points}

    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Returns how the choice of keys is computed."""
        how = self.choosing
        if how.warm_up:
            return [("attention", "torch", "warm-up of the indexer: all keys are attended to")]
        if seq_len <= how.top_k:
            return [("attention", "torch", f"sequences have no more than {how.top_k} keys, so all are chosen")]
        return [("attention", "torch", f"{how.top_k} of {seq_len} keys, {MASKED}")]
