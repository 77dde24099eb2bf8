"""Parts of a layer with weights for each modality. Shapes: B sequences, S positions, D model width.

A part keeps the text's weights under their names, and has others in `modalities`: one part of the same class for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forge_kit.nn.taps import TapPoint
from forge_plugin_mot.modules.routing import Route, route_in, tokens_of

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch

MODALITIES = "modalities"
"""Name of a part's child with the parts of other modalities."""


def copies(part: nn.Module) -> Mapping[str, Any]:
    """Returns the parts of other modalities, by modality; empty if `part` is for all."""
    own = getattr(part, MODALITIES, None)
    return dict(own.items()) if isinstance(own, nn.ModuleDict) else {}


def routed(part: nn.Module, length: int, batch: Batch) -> Iterator[tuple[str, Any, Route]]:
    """Yields each other modality with its part and the route of its positions, among `length`."""
    for modality, copy in copies(part).items():
        # With sequence parallel, `length` is a rank's chunk for norms, and all positions for other parts.
        route = route_in(batch, modality, length)
        if route is not None:
            yield modality, copy, route


def overlaid(part: nn.Module, x: Tensor, own: Tensor, batch: Batch) -> Tensor:
    """Returns `own`, the part's result for x (B, S, D), with the results of other modalities at their positions."""
    for _, copy, route in routed(part, x.shape[1], batch):
        # The model's last states may be wider than what its norm returns
        own = route.put(own, copy(route.take(x)).to(own.dtype))
    return own


class UntiedBlock(nn.Module):
    """Mixin of a layer (`Block`): the norms of each position's modality, all after their parts if `norm_after`."""

    norm_after: bool
    updates: nn.ModuleDict
    """Identities by part, through which the part's results for all modalities pass, for taps."""

    def update(self, name: str, x: Tensor, batch: Batch, *cache: Any) -> Tensor:
        """Returns the part's result for x; with `norm_after`, the norm before the part follows it instead."""
        if self.norm_after:
            updated = self.normalise(f"{name}_norm", getattr(self, name)(x, batch, *cache), batch)
        else:
            updated = super().update(name, x, batch, *cache)  # type: ignore[misc]
        merged: Tensor = self.updates[name](updated)
        return merged

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the tap points of the language model's layer, except for results that are merged later than there."""
        points: dict[str, TapPoint] = dict(getattr(super(), "tap_points", dict)())
        return points | {"attn_out": TapPoint("updates.attention"), "mlp_out": TapPoint("updates.ffn")}

    def normalise(self, name: str, x: Tensor, batch: Batch) -> Tensor:
        """Returns x (B, S, D), normalised at each position by the norm of its modality."""
        norm = getattr(self, name)
        return overlaid(norm, x, norm(x), batch)


class Merge(nn.Module):
    """The text's result (B, S, D), with the results of other modalities at their positions.

    A separate module: with tensor parallel the results are parts of a sum, which is computed after this module.
    """

    def forward(self, own: Tensor, others: Sequence[tuple[Route, Tensor]]) -> Tensor:
        """Puts each result (B, M, D) over `own` at the positions of its route; no two routes share one."""
        for route, other in others:
            own = route.put(own, other)
        return own


class UntiedAttention(nn.Module):
    """Mixin of `GroupedAttention`: projections for each modality, whose positions see each other as ever."""

    merge: Merge

    def project(self, x: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Returns queries, keys and values of all positions, projected by the weights of each one's modality."""
        own: tuple[Tensor, ...] = super().project(x, batch)  # type: ignore[misc]
        for _, copy, route in routed(self, x.shape[1], batch):
            # Without token entries of the slots: projections depend on x alone.
            others = copy.project(route.take(x), batch)
            own = tuple(route.put(tensor, other) for tensor, other in zip(own, others, strict=True))
        return own

    def output(self, mixed: Tensor, batch: Batch) -> Tensor:
        """Maps mixed values (B, S, H E) to (B, S, D) by the weights of each position's modality."""
        own = super().output(mixed, batch)  # type: ignore[misc]
        parts = routed(self, mixed.shape[1], batch)
        merged: Tensor = self.merge(own, [(route, copy.output(route.take(mixed), batch)) for _, copy, route in parts])
        return merged


class UntiedFeedForward(nn.Module):
    """Mixin of a feed-forward part: one for each modality."""

    merge: Merge

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Maps (B, S, D) to (B, S, D); the part of a modality receives the token entries of its slots."""
        own = super().forward(x, batch)
        parts = routed(self, x.shape[1], batch)
        others = [(route, copy(route.take(x), tokens_of(batch, modality))) for modality, copy, route in parts]
        merged: Tensor = self.merge(own, others)
        return merged

    def tap_points(self) -> Mapping[str, TapPoint]:
        """No tap points: each modality has separate hidden activations, for its own positions."""
        return {}

    def flops(self, seq_len: int) -> float:
        """Returns the FLOPs of one position, which goes through one of the parts, all of one size."""
        declared = getattr(super(), "flops", None)
        if declared is not None:
            return float(declared(seq_len))
        weights = (p for name, p in self.named_parameters() if not name.startswith(f"{MODALITIES}."))
        return 6.0 * sum(p.numel() for p in weights if p.ndim > 1)
