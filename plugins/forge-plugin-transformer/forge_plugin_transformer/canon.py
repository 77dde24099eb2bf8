"""The table `[model.canon]` of `transformer`: short causal convolutions before and within the parts of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen
from attrs.validators import gt, min_len

from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from torch import nn

    from forge_plugin_transformer.kinds import AttentionComponent, FFNComponent
    from forge_plugin_transformer.transformer import Transformer

BEFORE = {"attention": "A", "ffn": "C"}
"""The point before each part."""
WITHIN = {"attention": "B", "ffn": "D"}
"""The point between both steps of each part."""
PARTS = {point: part for points in (BEFORE, WITHIN) for part, point in points.items()}


@frozen(kw_only=True)
class Canon:
    """Canon layers (Allen-Zhu 2025, "Physics of Language Models", part 4.1): each position receives its latest ones.

    A Canon layer replaces h by h + conv(h), where conv sums the last `kernel` positions of each feature, itself
    included, with learned weights. It begins empty with each document. Every layer of the model has them at `points`.
    """

    points: tuple[Literal["A", "B", "C", "D"], ...] = field(default=("A", "C"), validator=min_len(1))
    """Where they are. A: before attention, behind its norm. B: queries, keys and values of `gqa`, behind norms of
    queries and keys, before the position encoding. C: before the feed-forward part, behind its norm. D: hidden features
    of the feed-forward part before the activation, those of the gate and the others."""
    kernel: int = field(default=4, validator=gt(1))
    """Positions that the convolution sums, the present one included."""
    residual: bool = True
    """Whether h is added to the convolution."""

    def problems(self, model: Transformer) -> Iterable[Problem]:
        """Yields problems; paths are relative to this table."""
        if model.kv_shared_layers:
            message = "its layers have caches, which layers that attend to keys of another have not"
            yield Problem("points", f"{message}; leave it out, or model.kv_shared_layers")
        for point in sorted({*self.points}):
            place = "before" if point in BEFORE.values() else "within"
            kinds = self._kinds(model, PARTS[point])
            if not kinds:
                yield Problem("points", f"{point} is {place} {PARTS[point]}, which no layer has; leave {point} out")
            if place == "within" and (closed := [kind for kind in kinds if not kind.in_two_steps]):
                message = f"{point} is within {PARTS[point]}, where {type(closed[0]).__name__} has no place for it"
                yield Problem("points", f"{message}; leave {point} out, or take another type")

    def _kinds(self, model: Transformer, part: str) -> Sequence[AttentionComponent | FFNComponent]:
        """Returns the components of the parts that layers have."""
        if part == "attention":
            depth = model.layers + (0 if model.mtp is None else model.mtp.depth)
            return [model.attention.of_layer(n) for n in range(depth) if not model.attention.left_out(n)]
        return [ffn for ffn in model.ffn.of_layers() if not ffn.left_out(0)]

    def added_to(self, name: str, part: nn.Module, dim: int) -> nn.Module:
        """Returns the part `name` of a layer, with the Canon layers that it is to have."""
        from forge_plugin_transformer.modules.canon import CanonLayer, InnerCanon, canonical

        before, inner = None, None
        if BEFORE[name] in self.points:
            before = CanonLayer(dim, self.kernel, residual=self.residual)
        if WITHIN[name] in self.points:
            two_steps: Any = part
            inner = InnerCanon(two_steps.projected_widths(), self.kernel, residual=self.residual)
        return part if before is None and inner is None else canonical(part, before, inner)
