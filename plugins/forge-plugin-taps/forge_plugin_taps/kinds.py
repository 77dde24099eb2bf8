"""Kinds `sink` and `edit`: what receives activations, and what changes them.

Shapes: N samples, the sampled positions of all sequences of a global batch; m of them that one rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import field, frozen
from attrs.validators import ge, min_len, optional

from forge_core.contracts.components import Component, WhenResumed
from forge_plugin_taps.selection import matching

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.errors import Problem
    from forge_core.contracts.layout import Layout
    from forge_kit.nn.taps import TapPoint
    from forge_plugin_taps.samples import Sample
    from forge_plugin_taps.where import Where

GRADIENT = ".grad"
"""Suffix of the name of a point whose gradient is meant: of the objective, by the activation."""


@frozen
class PointInfo:
    """A point that a run captures."""

    axes: str
    """How layouts divide it: see `forge_kit.nn.taps.Axes`; `pattern` for attention."""
    layer: int | None
    """Number of its layer; None: it belongs to none."""


@frozen(kw_only=True)
class TapsInfo:
    """What a stage captures, known to sinks when they are built; the same on every rank."""

    points: Mapping[str, PointInfo]
    """By name, including gradients (`NAME.grad`), in the order of the model; a sink is passed only its own points."""
    interval: int
    """Steps between sampled ones."""
    rows: int
    """Sequences of a global batch."""
    positions: int
    """Sampled positions of each."""
    length: int
    """Positions of a sequence."""

    @property
    def samples(self) -> int:
        """N."""
        return self.rows * self.positions


class Sink:
    """Receives what was captured. Derive from it and override what the sink needs.

    All ranks call each method alike, so it may use collectives.
    """

    def start(self, step: int) -> None:
        """The run starts after `step` completed steps, its state restored: anything kept of later ones is stale."""

    def consume(self, sample: Sample) -> None:
        """Receive the samples of a step, after its update."""
        raise NotImplementedError

    def settle(self) -> None:
        """Finish what `consume` began. Called a step later, when its copies from the device have arrived."""

    def metrics(self) -> Mapping[str, float | Tensor]:
        """Returns numbers for the line of the step that was just consumed; device scalars are copied without a wait.

        They must be the same on every rank. Names are logged as they are.
        """
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the state to save: tensors and plain values by name.

        A tensor may be on one rank only, and every rank gets it back whole. Plain values are taken from rank 0.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Called before `start`."""

    def close(self, final: bool) -> None:
        """The run ends: `final` after its last step, else it is to be continued. Not called after a failure."""


@frozen(kw_only=True)
class SinkComponent(Component["Sink"]):
    """Builds a sink: an entry of `[parallel.taps.sinks.NAME]`."""

    kind = "sink"
    resumes_as: ClassVar[WhenResumed | None] = "safe"

    points: tuple[str, ...] = ()
    """Globs over names of points that it receives; by default all of the stage."""
    interval: int | None = field(default=None, validator=optional(ge(1)))
    """Interval of the steps that it receives, which are then sampled; by default the stage's interval."""
    first_step: int = field(default=1, validator=ge(1))
    """It receives no step before this one."""

    def is_due(self, step: int, interval: int) -> bool:
        """Returns whether it receives step `step`, where `interval` is the stage's."""
        return step >= self.first_step and step % (self.interval or interval) == 0

    def received(self, taps: TapsInfo) -> list[str]:
        """Returns the points that it receives, of those that the stage captures."""
        return matching(self.points or ("*",), list(taps.points))

    def point_problems(self, points: Mapping[str, TapPoint]) -> Iterable[Problem]:
        """Yields why it cannot use the points that it receives, by name and without gradients, relative to itself."""
        return ()

    def build(self, context: BuildContext, taps: TapsInfo) -> Sink:
        """Build it, when the run begins; `taps` has its points only."""
        raise NotImplementedError


class Edit:
    """Changes activations at a point."""

    def apply(self, x: Tensor, where: Where) -> Tensor:
        """Returns the activations in place of x, as this rank has them: see `where` for its part of them."""
        raise NotImplementedError


@frozen(kw_only=True)
class EditComponent(Component["Edit"]):
    """Builds an edit: an entry of `[parallel.taps.edits.NAME]`."""

    kind = "edit"
    resumes_as = "flag"

    point: str = field(validator=min_len(1))
    """Glob over the names of points (`layers.3.resid_post`, `layers.*.z`)."""
    in_training: bool = False
    """Whether it is on in training. It is always on in evaluations and commands that name it."""

    def point_problems(self, points: Mapping[str, TapPoint], layout: Layout) -> Iterable[Problem]:
        """Yields why the edit cannot be made at some of the points that it matches, relative to itself."""
        return ()

    def build(self, context: BuildContext, taps: TapsInfo) -> Edit:
        """Build it, when the model is; `taps` has the points that are captured on this rank."""
        raise NotImplementedError
