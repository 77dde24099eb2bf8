"""The table `[model.canon]` of `transformer`: short causal convolutions before the parts of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import gt, min_len

from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from torch import nn

    from forge_plugin_transformer.transformer import Transformer

POINTS = {"A": "attention", "C": "ffn"}
"""The part that a layer of each point is before."""


@frozen(kw_only=True)
class Canon:
    """Canon layers (Allen-Zhu 2025, "Physics of Language Models", part 4.1): each position receives its latest ones.

    A Canon layer replaces h by h + conv(h), where conv sums the last `kernel` positions of each feature, itself
    included, with learned weights. It begins empty with each document. Every layer of the model has them at `points`.
    Points B (queries, keys and values after their projection) and D (inside of the feed-forward part) are not here.
    """

    points: tuple[Literal["A", "C"], ...] = field(default=("A", "C"), validator=min_len(1))
    """Where they are. A: before attention, behind its norm. C: before the feed-forward part, behind its norm."""
    kernel: int = field(default=4, validator=gt(1))
    """Positions that the convolution sums, the present one included."""
    residual: bool = True
    """Whether h is added to the convolution."""

    def problems(self, model: Transformer) -> Iterable[Problem]:
        """Yields problems; paths are relative to this table."""
        if model.kv_shared_layers:
            message = "its layers have caches, which layers that attend to keys of another have not"
            yield Problem("points", f"{message}; leave it out, or model.kv_shared_layers")
        absent = {point for point in self.points if not self._parts(model, point)}
        for point in sorted(absent):
            yield Problem("points", f"{point} is before {POINTS[point]}, which no layer has; leave {point} out")

    def _parts(self, model: Transformer, point: str) -> int:
        part = model.attention if POINTS[point] == "attention" else model.ffn
        return sum(not part.left_out(layer) for layer in range(model.layers))

    def before(self, name: str, part: nn.Module, dim: int) -> nn.Module:
        """Returns the part `name` of a layer, with a Canon layer before it if there is a point."""
        if name not in {POINTS[point] for point in self.points}:
            return part
        from forge_plugin_transformer.modules.canon import CanonLayer, canonical

        return canonical(part, CanonLayer(dim, self.kernel, residual=self.residual))
