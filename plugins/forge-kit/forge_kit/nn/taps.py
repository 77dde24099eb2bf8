"""Points inside a model at which activations can be read and changed; `forge-plugin-taps` uses them.

Shapes: B sequences, S positions, s positions of this rank between blocks, D model width, H heads, E width of a head, F
hidden features of a feed-forward part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
from attrs import field, frozen
from attrs.validators import ge, in_
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Side = Literal["input", "output", "carry_in", "carry_out", "pattern"]
"""Which tensor of a module. `input` and `output`: of its forward pass. `carry_in` and `carry_out`: of a block, which
maps a carry to a carry. `pattern`: attention that sampled queries pay, of a module that maps (queries
(B, S, H, E), keys (B, S, K, E), values, batch, sinks (H,) if it has any); computed beside what the module does."""
Axes = Literal["rest", "heads", "hidden", "whole", "partial", "images"]
"""How a layout divides the tensor. `rest`: (B, s, D), as between blocks, so that sequence parallel divides positions.
`heads`: (B, S, H, E), whose heads tensor parallel divides. `hidden`: (B, S, F), whose features it divides. `whole`:
(B, S, …), equal on all ranks of tensor parallel, inside of a part that they share, so that each has a part of its
gradient. `partial`: (B, S, D), of whose sum each of them has a part, with equal gradients. `images`: rows and positions
belong to images, as in a vision tower, and not to the batch's tokens."""


MIXING = frozenset({"window", "scale", "soft_cap", "sinks", "mask", "bidirectional_mask"})
"""Variations of causal attention that `forge_kit.nn.attention_pattern` supports, by the names of `TapPoint.mixing`."""


def _known_mixing(_: object, attribute: Any, value: Mapping[str, Any]) -> None:
    if unknown := sorted(value.keys() - MIXING):
        known = ", ".join(sorted(MIXING))
        raise ValueError(f"{attribute.name!r} has {unknown[0]!r}, of which no pattern is known; there are {known}")


@frozen
class TapPoint:
    """One tensor inside a model: of which module, on which side, and how a layout divides it."""

    module: str
    """Name of the module, relative to the one that declares the point; empty: that module itself."""
    side: Side = field(default="output", validator=in_(("input", "output", "carry_in", "carry_out", "pattern")))
    index: int = field(default=0, validator=ge(0))
    """Number of the positional argument, or of the element of a tuple that is returned."""
    axes: Axes = field(default="rest", validator=in_(("rest", "heads", "hidden", "whole", "partial", "images")))
    differentiable: bool = field(default=True, kw_only=True)
    """Whether it has a gradient; chosen numbers of experts, say, have none."""
    size: int | None = field(default=None, kw_only=True)
    """How many heads, features or experts it has over all ranks, so that a number beyond them is refused when a job is
    checked; None: unknown."""
    mixing: Mapping[str, Any] = field(factory=dict, kw_only=True, validator=_known_mixing)
    """For a `pattern`: the differences from plain causal attention, as returned by `mixing()` of a module of
    `sequence_mixers()`; see `MIXING`. A module that does more has no such point."""

    def hook(self, module: nn.Module, passing: Callable[[Tensor], Tensor]) -> RemovableHandle:
        """Let a function see what passes the point, not a `pattern`, and return what takes its place.

        Args:
            module: the point's module.
            passing: maps the tensor at the point to one of the same shape.
        """

        def at(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*values[: self.index], passing(values[self.index]), *values[self.index + 1 :])

        if self.side == "input":
            return module.register_forward_pre_hook(lambda _, args: at(args))
        if self.side == "carry_in":
            return module.register_forward_pre_hook(lambda _, args: (at(args[0]), *args[1:]))
        return module.register_forward_hook(lambda _, args, out: passing(out) if isinstance(out, Tensor) else at(out))


@runtime_checkable
class HasTapPoints(Protocol):
    """A model, or a part of one, that names its points."""

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the points by name: `layers.3.resid_post` of a model, `z` of an attention part."""


def tap_points(part: nn.Module, name: str = "", point_prefix: str = "") -> dict[str, TapPoint]:
    """Returns the points of a part, for the module that contains it; none if it declares none.

    Args:
        part: any module.
        name: its name in the module that contains it.
        point_prefix: put before the names of its points, with a dot, as in `layers.3`.
    """
    # Not by isinstance: a stage may have wrapped the part, and its wrapper passes on attributes.
    declared: Any = getattr(part, "tap_points", None)
    points: Mapping[str, TapPoint] = {} if declared is None else declared()
    return {_join(point_prefix, key): below(name, point) for key, point in points.items()}


def below(name: str, point: TapPoint) -> TapPoint:
    """Returns a point of the module `name`, for the module that contains it."""
    return attrs.evolve(point, module=_join(name, point.module))


def _join(first: str, second: str) -> str:
    return f"{first}.{second}" if first and second else first or second
