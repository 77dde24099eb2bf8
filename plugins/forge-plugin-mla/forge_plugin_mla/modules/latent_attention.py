"""Multi-head latent attention.

A position is compressed into a latent c and a key part r with the position encoding, the same for all heads. Head h
has keys [U_h c, r] and values W_h c, where U and W are the rows of `kv_up`.

Shapes: B sequences, S positions, T positions with the cached ones, D model width, H heads, C width of c, N and P the
parts of a head's queries and keys without and with a position, E = N + P, V width of a head's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_kit.nn.attention_scores import ScoreWatch, scale_rows
from forge_kit.nn.modules import Linear
from forge_kit.nn.taps import TapPoint
from forge_plugin_mla.modules.latent_cache import LatentCache, absorbs
from forge_plugin_transformer.modules.attention_core import AttentionCore, torch_attention
from forge_plugin_transformer.modules.largest_scores import largest_scores
from forge_plugin_transformer.modules.narrow_values import NARROW
from forge_plugin_transformer.modules.norms import RootMeanSquareNorm
from forge_plugin_transformer.modules.parts import prepare
from forge_plugin_transformer.modules.rotary import (
    generation_tables,
    rotate,
    tables,
    with_generation_tables,
    with_tables,
)
from forge_plugin_transformer.scoring import PLAIN

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_plugin_transformer import InitStd


class Widths(NamedTuple):
    """Widths of the parts of latent attention."""

    q_latent: int
    """0: queries are made of x itself."""
    kv_latent: int
    """C."""
    nope: int
    """N."""
    rope: int
    """P."""
    value: int
    """V."""

    @property
    def key(self) -> int:
        """E."""
        return self.nope + self.rope


def turned(x: Tensor, turns: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Returns (B, S, heads, …) rotated to the positions of the tables, neighbouring dimensions together or halves."""
    cos, sin = turns
    width = cos.shape[-1]  # an encoding may rotate the first dimensions only, or none
    if interleaved and width:  # queries and keys are reordered alike, so their products are the same
        reordered = x[..., :width].unflatten(-1, (-1, 2)).mT.flatten(-2)
        x = reordered if width == x.shape[-1] else torch.cat([reordered, x[..., width:]], -1)
    return rotate(x, cos, sin)


class LatentAttention(nn.Module):
    """See `forge_plugin_transformer.AttentionComponent` for the contract."""

    score_watch: ScoreWatch | None = None

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        widths: Widths,
        rotary: nn.Module,
        interleaved: bool,
        score_factor: float,
        core: nn.Module,
        norm_eps: float,
        init: InitStd,
    ) -> None:
        """Builds the projections.

        Args:
            dim: D.
            heads: H.
            widths: C, N, P and V, and the width of the queries' latent.
            rotary: position encoding of width P.
            interleaved: whether neighbouring dimensions are rotated together.
            score_factor: multiplies every score, in addition to E^-0.5.
            core: attention of queries to keys and values.
            norm_eps: epsilon of the norms of both latents.
            init: standard deviations of initial weights.
        """
        super().__init__()
        self.heads, self.widths = heads, widths
        self.interleaved, self.score_factor = interleaved, score_factor
        if widths.q_latent:
            self.q_down = Linear(dim, widths.q_latent, std=init.inner)
            self.q_norm = RootMeanSquareNorm(widths.q_latent, eps=norm_eps)
            self.q_up = Linear(widths.q_latent, heads * widths.key, std=init.inner)
        else:
            self.q = Linear(dim, heads * widths.key, std=init.inner)
        self.kv_down = Linear(dim, widths.kv_latent + widths.rope, std=init.inner)
        self.kv_norm = RootMeanSquareNorm(widths.kv_latent, eps=norm_eps)
        self.kv_up = Linear(widths.kv_latent, heads * (widths.nope + widths.value), std=init.inner)
        self.o = Linear(heads * widths.value, dim, std=init.residual)
        self.rotary = rotary
        self.core = core

    def prepare(self, batch: Batch) -> Batch:
        """Returns the batch with the core's entries, and with tables of its positions if the encoding needs them."""
        return prepare(self.core, with_tables(self.rotary, batch))

    def forward(self, x: Tensor, batch: Batch, cache: LatentCache | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D). `batch` may hold `positions` and `document_ids`, both (B, S)."""
        if cache is not None:
            return self.o(self._attend_cached(x, batch, cache).flatten(2))
        turns = tables(self.rotary, x.shape[1], batch)
        k, v = self._expanded(*self._compressed(x, turns))
        q = self._queries(self._query_latent(x), turns)
        self._watch(q, k, batch)
        return self.o(self.core(q, k, v, batch).flatten(2))

    def _watch(self, q: Tensor, k: Tensor, batch: Batch) -> None:
        if self.score_watch is not None and self.training:
            self.score_watch.add(largest_scores(q, k, batch, PLAIN))

    def _query_latent(self, x: Tensor) -> Tensor:
        """Returns what queries are made of: the latent (B, S, …), or x itself without one."""
        return self.q_norm(self.q_down(x)) if self.widths.q_latent else x

    def _queries(self, latent: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """`_query_latent` -> (B, S, H, E)."""
        q = self.q_up(latent) if self.widths.q_latent else self.q(latent)
        nope, rope = q.unflatten(-1, (-1, self.widths.key)).split([self.widths.nope, self.widths.rope], -1)
        q = torch.cat([nope, self._turned(rope, turns)], -1)
        # On queries: the core multiplies scores by E^-0.5 and nothing else
        return q if self.score_factor == 1 else q * self.score_factor

    def _compressed(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(B, S, D) -> c (B, S, C) and r (B, S, P)."""
        latent, rope = self.kv_down(x).split([self.widths.kv_latent, self.widths.rope], -1)
        # Only the latent has a norm, as in DeepSeek's code
        return self.kv_norm(latent), self._turned(rope.unsqueeze(2), turns).squeeze(2)

    def _expanded(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Latents (B, T, C) and key parts (B, T, P) -> keys (B, T, H, E) and values (B, T, H, V)."""
        both = self.kv_up(latent).unflatten(-1, (-1, self.widths.nope + self.widths.value))
        nope, v = both.split([self.widths.nope, self.widths.value], -1)
        # No memory for each head before the concatenation, which some kernels need
        shared = rope.unsqueeze(2).expand(-1, -1, nope.shape[2], -1)
        return torch.cat([nope, shared], -1), v

    def _turned(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """(B, S, heads, P), rotated to the positions of the tables."""
        return turned(x, turns, self.interleaved)

    # --- generation ----------------------------------------------------------------------------------------------

    def new_cache(self, batch_size: int, length: int) -> LatentCache:
        """The cache has room for all `length` positions: there is no window."""
        return LatentCache(batch_size, length)

    def prepare_decode(self, batch: Batch, cache: Any) -> Batch:
        """Returns the batch of the next positions with the entries that layers like this one share."""
        batch = with_generation_tables(self.rotary, batch)
        return cache.with_mask(batch) if isinstance(cache, LatentCache) else batch

    def _attend_cached(self, x: Tensor, batch: Batch, cache: LatentCache) -> Tensor:
        """(B, S, D) -> (B, S, H, V). Each row is one document here: `document_ids` play no part."""
        positions = cache.positions(x, batch)
        turns = generation_tables(self.rotary, positions, batch)
        cached, mask = cache.extend(*self._compressed(x, turns), positions, cache.shared_mask(batch))
        q = self._queries(self._query_latent(x), turns)
        return self._attend_latents(q, cached, mask, cache)

    def _attend_latents(self, q: Tensor, cached: Tensor, mask: Tensor, cache: LatentCache) -> Tensor:
        """Queries (B, S, H, E), latents (B, T, C + P), mask (B, 1, S, T) -> (B, S, H, V)."""
        # By number of queries: a prompt has many for each key, for which expanding keys once is less work
        if absorbs(q.shape[1], cached.shape[1], self.widths):
            return self._attend_absorbed(q, cached, mask, cache)
        return self._attend_expanded(q, cached, mask)

    def _attend_expanded(self, q: Tensor, cached: Tensor, mask: Tensor) -> Tensor:
        """Queries (B, S, H, E), cache (B, T, C + P), mask (B, 1, S, T) -> (B, S, H, V)."""
        k, v = self._expanded(*cached.split([self.widths.kv_latent, self.widths.rope], -1))
        return torch_attention(q, k, v, mask)

    def _attend_absorbed(self, q: Tensor, cached: Tensor, mask: Tensor, cache: LatentCache) -> Tensor:
        """Same as `_attend_expanded`, without keys and values: q · U c = (Uᵀ q) · c, and Σ p W c = W Σ p c.

        The cache is then the one key of all heads, and its value, whose last P dimensions are unused.
        """
        up = cache.up_projection(self.kv_up, self.widths.kv_latent, like=q)
        by_head = up.unflatten(-1, (-1, self.widths.nope + self.widths.value))
        to_keys, to_values = by_head.split([self.widths.nope, self.widths.value], -1)
        nope, rope = q.split([self.widths.nope, self.widths.rope], -1)
        q = torch.cat([torch.einsum("bshn,chn->bshc", nope, to_keys), rope], -1)
        q = q * (q.shape[-1] / self.widths.key) ** 0.5  # scores are divided by the root of the width that they have
        heads = q.shape[2]
        rows, shared = q.flatten(1, 2).unsqueeze(2), cached.unsqueeze(2)  # heads as further queries, for any kernel
        # Rows are ordered by position, then by head, and so is the mask
        mixed = torch_attention(rows, shared, shared, mask.repeat_interleave(heads, 2))
        mixed = mixed.squeeze(2).unflatten(1, (-1, heads))[..., : self.widths.kv_latent]
        return torch.einsum("bshc,chv->bshv", mixed, to_values)

    # --- for the engine and the stages ---------------------------------------------------------------------------

    def flops(self, seq_len: int) -> float:
        """6 per weight, and for the causal half 3 per key and element of the heads, of scores (E) and of mixing (V)."""
        # Matrices alone: the gain of a norm multiplies element by element
        weights = sum(parameter.numel() for parameter in self.parameters() if parameter.ndim > 1)
        return 6.0 * weights + 3.0 * self.heads * (self.widths.key + self.widths.value) * seq_len

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the heads. Latents are replicated, and each rank has a part of their projections' gradients."""
        queries = {"q_down": "replicate", "q_norm": "replicate", "q_up": "column"}
        plan = {"": "whole_input", "kv_down": "replicate", "kv_norm": "replicate", "kv_up": "column", "o": "row"}
        return plan | (queries if self.widths.q_latent else {"q": "column"})

    def unscalable(self) -> str:
        """See `forge_kit.nn.attention_scores.ClipsScores`; norms of latents come before the weights that scale."""
        return ""

    def scale_scores(self, factors: Tensor, query_share: float) -> None:
        """See `forge_kit.nn.attention_scores.ClipsScores`. All heads share r: their queries take its whole factor."""
        widths, factors = self.widths, factors[:, None]
        queries = [(factors**query_share).expand(-1, widths.nope), factors.expand(-1, widths.rope)]
        # Scores do not depend on the rows of values
        values = torch.ones_like(factors).expand(-1, widths.value)
        keys = [(factors ** (1 - query_share)).expand(-1, widths.nope), values]
        scale_rows(self.q_up if widths.q_latent else self.q, torch.cat(queries, 1).flatten())
        scale_rows(self.kv_up, torch.cat(keys, 1).flatten())

    def float8_exempt(self) -> Sequence[str]:
        """Compressing projections: under tp each rank has a part of their gradient, and would round it separately."""
        return [*(["q_down"] if self.widths.q_latent else []), "kv_down"]

    def sequence_mixers(self) -> Mapping[str, int]:
        """Names the core, which receives expanded keys and values: as many heads of them as of queries."""
        return {"core": self.heads}

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the points of plain attention, and the latents after their norms."""
        points = {name: TapPoint("core", "input", number, "heads") for number, name in enumerate("qkv")}
        points["z"] = TapPoint("core", axes="heads")
        points["pattern"] = TapPoint("core", "pattern", axes="heads", differentiable=False)
        if self.widths.q_latent:
            points["q_latent"] = TapPoint("q_norm", axes="whole")
        return points | {"kv_latent": TapPoint("kv_norm", axes="whole")}

    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Returns the kernel, whether it pads values, and how documents are kept apart; nothing for a replaced core."""
        if not isinstance(self.core, AttentionCore):  # a stage has put another in its place
            return []
        kernel, documents = self.core.choice, self.core.documents
        why = kernel.why
        if kernel.kernel not in NARROW and self.widths.value < self.widths.key:
            why += f"; it takes one width, so values are padded from {self.widths.value} to {self.widths.key}"
        apart = [("documents", documents.way, documents.reason)] if documents.matters else []
        return [("attention", kernel.kernel, why), *apart]
