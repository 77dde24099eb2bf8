"""Grouped-query attention, and its cache for generation.

Shapes: B sequences, S positions, D model width, H query heads, K key/value heads, E width of a head, V width of
its values: E or less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_kit.nn.attention_scores import ScoreWatch, scale_rows
from forge_kit.nn.direct_calls import directly_callable
from forge_kit.nn.modules import Linear, cast
from forge_kit.nn.taps import TapPoint
from forge_plugin_transformer.modules.attention_core import AttentionCore, torch_attention
from forge_plugin_transformer.modules.cache import Cache
from forge_plugin_transformer.modules.largest_scores import largest_scores
from forge_plugin_transformer.modules.norms import HeadLayerNorm, normed_without_gain
from forge_plugin_transformer.modules.parts import last_parameters
from forge_plugin_transformer.modules.rotary import (
    generation_tables,
    rotate,
    tables,
    with_generation_tables,
    with_tables,
)
from forge_plugin_transformer.modules.sinks import HeadSinks
from forge_plugin_transformer.modules.softmax_attention import WHOLE
from forge_plugin_transformer.modules.spans import SPANS, attend_in_spans, see_spans, with_span_mask

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Role
    from forge_plugin_transformer.kinds import AttentionMaskComponent, InitStd


class KVCache(Cache):
    """Keys and values of the positions so far."""

    whole_mask: Tensor | None = WHOLE
    lent: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    """Keys, values and mask of the newest positions, and these, for the layers that attend to them, too."""

    def extend(
        self, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append S positions. Returns keys (B, T, K, E) and values (B, T, K, V) so far, and the mask (B, 1, S, T).

        Raises:
            ValueError: the cache is full.
        """
        (keys, values), mask = self.append((k, v), positions, mask)
        return keys, values, mask


class MaskedKVCache(KVCache):
    """Keys and values of positions that a mask may hide, and how many of their row come before each."""

    whole_mask = None

    def __init__(self, batch_size: int, length: int, window: int, seen: AttentionMaskComponent) -> None:
        """Set up an empty cache.

        Args:
            batch_size: rows.
            length: positions of a row at most.
            window: positions that one sees at most, itself included; 0: all.
            seen: which of them it sees.
        """
        super().__init__(batch_size, length, window)
        self.seen = seen
        self._mask_key = f"mask of {seen!r} within {self.window}"

    def emptied(self, batch_size: int, length: int) -> Self:
        """Returns an empty cache of this kind."""
        return type(self)(batch_size, length, self._asked_window, self.seen)

    def extend(
        self, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `KVCache`."""
        (keys, values, _), mask = self.append((k, v, self._places(positions)), positions, mask)
        return keys, values, mask

    def mask(self, positions: Tensor) -> Tensor:
        """As `Cache`, without what the mask of the component hides."""
        before, new = self._past(), self._places(positions)
        earlier = self._stored[2][:, self._held - before : self._held] if before else new[:, :0]
        places = torch.cat([earlier, new], 1)
        itself = torch.arange(places.shape[1], device=places.device)
        seen = self.seen.sees(new[:, :, None], places[:, None, :]) | (itself == itself[before:, None])
        return super().mask(positions) & seen[:, None]

    def _places(self, positions: Tensor) -> Tensor:
        """Returns how many positions of their rows come before new ones (B, S); padding does not count."""
        numbers = (positions >= 0).cumsum(1) - 1
        if not self._held:
            return numbers
        newest = slice(self._held - 1, self._held)
        # A row of which there is only padding yet begins, whatever its entries are
        before = (self._stored[2][:, newest] + 1).where(self._positions[:, newest] >= 0, 0)
        return numbers + before


class Heads(NamedTuple):
    """Numbers and widths of heads."""

    queries: int
    """H."""
    keys: int
    """K."""
    width: int
    """E."""
    value_width: int
    """V."""


class QueryKeyNorms(NamedTuple):
    """Norms of queries and keys, and where they are."""

    queries: nn.Module | None
    """Over E features, or all H x E; None: there is none."""
    keys: nn.Module | None
    """Likewise, of K heads."""
    all_heads: bool
    """Whether both are over the features of all heads."""
    rotated: bool
    """Whether both come after the position encoding."""


class ValueForm(NamedTuple):
    """What values are."""

    norm_eps: float | None
    """Added to their mean square, by which they are normalised without a gain; None: they are not."""
    scale: float
    """Factor on them."""
    are_keys: bool
    """Whether they are the keys as projected, instead of a projection of their own."""


class QueryGrowth(NamedTuple):
    """A factor on queries that grows with the logarithm of their position."""

    rate: float
    length: int
    """Positions of a step."""
    offset: int = 0
    """Added to positions."""

    def __call__(self, q: Tensor, positions: Tensor | None) -> Tensor:
        """Returns queries (B, S, H, E) times 1 + rate ln(1 + floor((position + offset) / length)).

        Args:
            q: queries.
            positions: (B, S), where negative ones are padding; None: 0, 1, …
        """
        if positions is None:
            if q.shape[1] + self.offset <= self.length:  # the factor of all is 1
                return q
            positions = torch.arange(q.shape[1], device=q.device)
        # 16 bits would round large positions
        wide = torch.promote_types(q.dtype, torch.float32)
        # Padding has the position -1 in generation
        steps = ((positions.clamp(min=0) + self.offset) // self.length).to(wide)
        return cast(cast(q, wide) * (1 + self.rate * torch.log1p(steps))[..., None, None], q.dtype)


class KVExchange:
    """Keys and values (B, S, K, E) as the core takes them, which one layer makes and others attend to.

    It takes the place of a cache where there is none.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


@directly_callable
class PassThrough(nn.Module):
    """The identity on several tensors."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Taps read queries, keys and values here, with a cache and without one."""
        return tensors


@directly_callable
class GroupedAttention(nn.Module):
    """o(attention(q(x), k(x), v(x))): see `AttentionComponent` for the contract."""

    attends_spans = True
    spans_in_windows = False
    """Whether positions of a span see each other within the window only: in a layer without one, not at all."""
    score_watch: ScoreWatch | None = None
    lends = False
    """Whether later layers attend to its keys and values."""

    def __init__(
        self,
        dim: int,
        *,
        heads: Heads,
        rotary: nn.Module,
        core: AttentionCore,
        norms: QueryKeyNorms,
        values: ValueForm,
        growth: QueryGrowth | None,
        bias: bool,
        output_bias: bool,
        gate_width: int,
        init: InitStd,
    ) -> None:
        """Set up the layer.

        Args:
            dim: D.
            heads: H, K, E and V.
            rotary: position encoding.
            core: what mixes positions.
            norms: of queries and keys.
            values: what values are.
            growth: factor on queries by their position; None: there is none.
            bias: whether q, k and v have biases.
            output_bias: whether o has one.
            gate_width: gates of a head, 1 or V; 0: there are none.
            init: deviations of matrices.
        """
        super().__init__()
        self.kv_heads, self.head_dim, self.v_head_dim = heads.keys, heads.width, heads.value_width
        self.v_norm_eps, self.value_scale, self.k_eq_v = values
        self.q = Linear(dim, heads.queries * heads.width, bias=bias, std=init.inner)
        self.k = Linear(dim, heads.keys * heads.width, bias=bias, std=init.inner)
        if not values.are_keys:
            self.v = Linear(dim, heads.keys * heads.value_width, bias=bias, std=init.inner)
        # The only one of the four that writes into the residual stream
        self.o = Linear(heads.queries * heads.value_width, dim, bias=output_bias, std=init.residual)
        self._add_norms(norms)
        self.rotary, self.core, self.growth = rotary, core, growth
        # For taps. Spans attend beside the core: they take what it receives, and replace some of what it returns.
        self.qkv = PassThrough()
        self.mixed = nn.Identity()
        self.scoring = core.scoring
        if self.scoring.mask is not None:  # spans go beyond causality alone
            self.attends_spans = False
        if self.scoring.sinks:
            self.sinks = HeadSinks(heads.queries, init.inner)
        self.gate_width = gate_width
        if gate_width:
            self.gate = Linear(dim, heads.queries * gate_width, std=init.inner)

    def _add_norms(self, norms: QueryKeyNorms) -> None:
        q_norm, k_norm = norms.queries, norms.keys
        self.norm_all_heads, self.norm_rotated = norms.all_heads, norms.rotated
        if norms.rotated:  # under other names, as whatever replaces `project` would leave them out
            self.q_rotated_norm, self.k_rotated_norm = q_norm or nn.Identity(), k_norm or nn.Identity()
            q_norm = k_norm = None
        self.q_norm, self.k_norm = q_norm or nn.Identity(), k_norm or nn.Identity()

    def prepare(self, batch: Batch) -> Batch:
        """Adds the entries of the core, a mask of spans, and the tables of positions if the encoding has a `key`."""
        batch = with_tables(self.rotary, batch)
        if not self._ignores_spans:
            batch = with_span_mask(batch, self.scoring, bounded=self.spans_in_windows)
        return self.core.prepare(batch)

    @property
    def _ignores_spans(self) -> bool:
        """Whether spans are for other layers."""
        return self.spans_in_windows and not self.scoring.window

    def forward(self, x: Tensor, batch: Batch, cache: KVCache | KVExchange | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D). `batch` may hold `positions` and `document_ids`, both (B, S)."""
        return self.finish(self.project(x, batch), x, batch, cache)

    def finish(
        self, projected: Sequence[Tensor], x: Tensor, batch: Batch, cache: KVCache | KVExchange | None = None
    ) -> Tensor:
        """Queries, keys and values of `project`, and what the layer reads, x (B, S, D) -> (B, S, D)."""
        q, k, v = projected
        if cache is not None and not isinstance(cache, KVExchange):
            mixed = self._attend_cached(q, k, v, batch, cache)
        else:
            turns = tables(self.rotary, q.shape[1], batch)
            q, k, v = self.qkv(self._query(q, turns, batch.get("positions")), self._key(k, turns), v)
            if cache is not None:
                cache.keys, cache.values = k, v
            mixed = self._attend(q, k, v, batch)
        return self._projected(mixed, x, batch)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Queries (B, S, H, E), keys and values (B, S, K, E or V), as the core takes them -> (B, S, H, V)."""
        if self.score_watch is not None and self.training:
            own = {key: value for key, value in batch.items() if key != SPANS} if self._ignores_spans else batch
            self.score_watch.add(largest_scores(q, k, own, self.scoring, bounded=self.spans_in_windows))
        sinks = self._sinks(q)
        # A core that a stage has put in need not take sinks, unless there are any
        mixed: Tensor = self.core(q, k, v, batch) if sinks is None else self.core(q, k, v, batch, sinks)
        if self._ignores_spans:
            return mixed
        return attend_in_spans(q, k, v, mixed, batch, self.scoring, sinks, bounded=self.spans_in_windows)

    def _projected(self, mixed: Tensor, x: Tensor, batch: Batch) -> Tensor:
        """The mixed values (B, S, H, V), and what the layer reads, x (B, S, D) -> (B, S, D)."""
        mixed = self.mixed(mixed)
        if self.gate_width:
            mixed = mixed * torch.sigmoid(self.gate(x)).unflatten(-1, (-1, self.gate_width))
        return self.output(mixed.flatten(2), batch)

    def project(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, D) -> queries (B, S, H, E), keys (B, S, K, E) and values (B, S, K, V), normalised but not rotated.

        With `output`, all that this layer learns: a derived class may compute both from other weights by position.
        """
        q, k = self.q(x), self.k(x)
        v = (k if self.k_eq_v else self.v(x)).unflatten(-1, (-1, self.v_head_dim))
        if self.v_norm_eps is not None:
            v = normed_without_gain(v, self.v_norm_eps)
        if self.value_scale != 1:
            v = v * self.value_scale
        return self._normed_heads(self.q_norm, q), self._normed_heads(self.k_norm, k), v

    def stream_writers(self) -> Sequence[str]:
        """Names the parameters of `o`, which writes into the residual stream."""
        return last_parameters(self, "o")

    def unit_scale(self, seq_len: int) -> float | None:
        """Returns one over the size of mixed values at the start, of scores that are divided by E.

        As u-muP has it (Blake et al. 2024): between sqrt(log(S) / S), where all positions weigh alike, and 1, where one
        does, by E. None for values or results that are not plain ones, or other masks.
        """
        is_plain = self.v_norm_eps is None and self.value_scale == 1 and not self.gate_width and not self.scoring.sinks
        if not is_plain or self.scoring.mask is not None:
            return None
        length = self.scoring.window_in(seq_len) or seq_len
        share = 1 / (1 + 4 * self.head_dim)
        return (math.log(length) / length) ** (-(1 - share) / 2)

    def score_weights(self) -> tuple[Sequence[str], int, float]:
        """Returns the parameters that scores are proportional to, the width of a head, and the factor on scores.

        The parameters are of queries: their projection, or the gain of their norm, whose output has no other size.
        There are none if that norm has no gain, or one with an offset.
        """
        name = "q_rotated_norm" if self.norm_rotated else "q_norm"
        norm = getattr(self, name)
        names: Sequence[str] = ()
        if not getattr(norm, "offset", 0):
            names = last_parameters(self, "q" if isinstance(norm, nn.Identity) else name)
        return names, self.head_dim, self.scoring.scale or self.head_dim**-0.5

    def projected_widths(self) -> Mapping[str, int]:
        """See `forge_plugin_transformer.modules.parts.InTwoSteps`."""
        values = self.k if self.k_eq_v else self.v
        return {"q": self.q.out_features, "k": self.k.out_features, "v": values.out_features}

    def output(self, mixed: Tensor, batch: Batch) -> Tensor:
        """The mixed values of all heads (B, S, H x V) -> (B, S, D)."""
        return self.o(mixed)

    def prepare_decode(self, batch: Batch, cache: Any) -> Batch:
        """Returns the batch of the next positions with the entries that layers like this one share."""
        batch = with_generation_tables(self.rotary, batch)
        return cache.with_mask(batch) if isinstance(cache, Cache) else batch

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """Attend with a cache. Each row is one document here, so `document_ids` are ignored."""
        positions = cache.positions(q, batch)
        turns = generation_tables(self.rotary, positions, batch)
        # Cached with their encoding, so that earlier keys are not rotated once more for each token
        keys, values, mask = cache.extend(self._key(k, turns), v, positions, cache.shared_mask(batch))
        if self.lends:
            cache.lent = keys, values, mask, positions
        return self._attend_all(self._query(q, turns, positions), keys, values, mask, batch)

    def _attend_all(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
        """Queries (B, S, H, E) attend to keys and values (B, T, K, E or V) by a mask (B, 1, S, T)."""
        if not self._ignores_spans:
            mask = see_spans(mask, batch, self.scoring.window if self.spans_in_windows else 0)
        q, keys, values = self.qkv(q, keys, values)
        sinks = self._sinks(q)
        if isinstance(self.core, AttentionCore):  # so that what hangs on it sees heads here, too
            return self.core(q, keys, values, batch, sinks, mask=mask)
        return torch_attention(q, keys, values, mask, scoring=self.scoring, sinks=sinks)

    def _query(self, q: Tensor, turns: tuple[Tensor, Tensor], positions: Tensor | None) -> Tensor:
        """Queries (B, S, H, E) as the core takes them: rotated, and whatever comes after that."""
        q = rotate(q, *turns)
        if self.norm_rotated:
            q = self.q_rotated_norm(q)
        return q if self.growth is None else self.growth(q, positions)

    def _key(self, k: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Keys (B, S, K, E) as the core takes them."""
        k = rotate(k, *turns)
        return self.k_rotated_norm(k) if self.norm_rotated else k

    def _sinks(self, q: Tensor) -> Tensor | None:
        """The sinks of the heads of queries q (B, S, H, E), if the layer has any: (H,)."""
        return self.sinks(q.dtype) if self.scoring.sinks else None

    def _normed_heads(self, norm: nn.Module, x: Tensor) -> Tensor:
        return self._heads(norm(x)) if self.norm_all_heads else norm(self._heads(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def new_cache(self, batch_size: int, length: int) -> KVCache:
        """With a window, the cache has room for the window and some spare positions, not for all `length`.

        Raises:
            ForgeError: positions see later ones, which a cache cannot have yet.
        """
        if not self.scoring.causal:
            what = f"{type(self.scoring.mask).__name__}, the mask of attention, shows later positions"
            why = "so that each token would change what a cache has of earlier ones"
            raise ForgeError(f"{what}, {why}; such a model does not generate token by token")
        if self.scoring.mask is not None:
            return MaskedKVCache(batch_size, length, self.scoring.reach, self.scoring.mask)
        return KVCache(batch_size, length, self.scoring.window)

    def flops(self, seq_len: int) -> float:
        """Counts 6 a weight, and 2 x 3 a visible key and head element for scores, and for mixing as many a value's.

        Half of a sequence's positions are visible on average, or of a window W the W - W² / 2S; see `Scoring.pairs`.
        """
        names = [name for name in ("q", "k", "v", "o", "gate") if hasattr(self, name)]
        weights = sum(getattr(self, name).weight.numel() for name in names)
        pairs = self.scoring.pairs(seq_len)
        # Not `kv_heads`: each query head multiplies with all visible keys, also with keys that it shares
        return 6.0 * weights + 6.0 * (self.q.out_features + self.o.in_features) * (pairs / seq_len)

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the heads, with their sinks and gains; a norm that all heads share is whole on all ranks."""
        plan = {"": "whole_input", "o": "row"}
        plan |= {name: "column" for name in ("q", "k", "v", "gate") if hasattr(self, name)}
        way = "split_features" if self.norm_all_heads else "replicate"
        if isinstance(self.q_norm, HeadLayerNorm):
            way = "column"
        # An absent norm is an `nn.Identity`, which the plan need not name
        plan |= {name: way for name in ("q_norm", "k_norm") if [*getattr(self, name, nn.Identity()).parameters()]}
        plan |= {name: "replicate" for name in ("q_rotated_norm", "k_rotated_norm") if hasattr(self, name)}
        return plan | ({"sinks": "column"} if self.scoring.sinks else {})

    def parameter_roles(self) -> Mapping[str, Role]:
        """Makes sinks (H,) a bias, and gains (H, E) norms: by their shape they would have other roles."""
        roles: dict[str, Role] = {"sinks.weight": "bias"} if self.scoring.sinks else {}
        for name in ("q_norm", "k_norm"):
            if isinstance(getattr(self, name, None), HeadLayerNorm):
                roles[f"{name}.weight"] = "norm"
        return roles

    def sequence_mixers(self) -> Mapping[str, int]:
        """Names the core. K is the number over all ranks: tensor parallel does not change `out_features`."""
        return {"core": self.kv_heads}

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Queries and keys as the core receives them: normalised and rotated."""
        points = {name: TapPoint("qkv", "output", number, "heads") for number, name in enumerate("qkv")}
        points["z"] = TapPoint("mixed", axes="heads")
        mixing = self.scoring.options()
        return points | {"pattern": TapPoint("core", "pattern", axes="heads", differentiable=False, mixing=mixing)}

    def unscalable(self) -> str:
        """See `forge_kit.nn.attention_scores.ClipsScores`."""
        if self.k_eq_v:
            return "its values are its keys"
        if self.lends:
            return "later layers attend to its keys"
        norms = (self.q_norm, self.k_norm, *([self.q_rotated_norm] if self.norm_rotated else []))
        return "" if all(isinstance(norm, nn.Identity) for norm in norms) else "it normalises queries and keys"

    def scale_scores(self, factors: Tensor, query_share: float) -> None:
        """See `forge_kit.nn.attention_scores.ClipsScores`."""
        group = self.q.out_features // self.k.out_features
        # The smallest factor of the heads that share a key, which belongs to their largest score
        of_keys = factors.unflatten(0, (-1, group)).amin(1)
        scale_rows(self.q, (of_keys**query_share).repeat_interleave(group * self.head_dim))
        scale_rows(self.k, (of_keys ** (1 - query_share)).repeat_interleave(self.head_dim))

    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Returns the kernel, and the way to keep documents apart if the job does; nothing for a replaced core."""
        if not isinstance(self.core, AttentionCore):  # a stage has replaced it
            return []
        kernel, documents = self.core.choice, self.core.documents
        apart = [("documents", documents.way, documents.reason)] if documents.matters else []
        return [("attention", kernel.kernel, kernel.why), *apart]


@directly_callable
class BorrowingAttention(GroupedAttention):
    """Queries of this layer attend to keys and values of an earlier one, with the same heads, mask and window.

    Its `cache` is a `KVExchange` with these, or in generation the cache of that layer, which has run before.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("k", "v", "k_norm", "k_rotated_norm"):
            if hasattr(self, name):
                delattr(self, name)
        # Another name than projections have, so that whatever replaces these by modality notices that there are none
        self.borrowed = nn.Identity()

    def forward(self, x: Tensor, batch: Batch, cache: KVCache | KVExchange | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D), as `GroupedAttention`."""
        q = self._normed_heads(self.q_norm, self.q(x))
        if isinstance(cache, KVExchange):
            turns = tables(self.rotary, q.shape[1], batch)
            q = self._query(q, turns, batch.get("positions"))
            # A rank's heads: those of the exchange are of all ranks as long as no layer has filled it
            heads = q.shape[2] * self.kv_heads // (self.o.in_features // self.head_dim)
            q, k, v = self.qkv(q, cache.keys[:, :, :heads], cache.values[:, :, :heads])
            mixed = self._attend(q, k, v, batch)
        else:
            assert cache is not None
            assert cache.lent is not None
            keys, values, mask, positions = cache.lent
            q = self._query(q, generation_tables(self.rotary, positions, batch), positions)
            mixed = self._attend_all(q, keys, values, mask, batch)
        return self._projected(mixed, x, batch)

    def unscalable(self) -> str:
        """See `forge_kit.nn.attention_scores.ClipsScores`."""
        return "it reuses the keys of an earlier layer"
