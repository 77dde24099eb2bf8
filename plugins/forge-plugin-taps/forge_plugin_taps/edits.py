"""The edits `add`, `zero`, `mean` and `replace`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, min_len

from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import Problem
from forge_plugin_taps.division import shares_tokens
from forge_plugin_taps.kinds import Edit, EditComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_kit.nn.taps import TapPoint
    from forge_plugin_taps.kinds import TapsInfo

NUMBERS = deep_iterable(ge(0))
EXPERTS_AT = "router_weights"
"""Last part of the name of the point at which experts have numbers: their weights and choices pass together."""


@frozen(kw_only=True)
class SelectingEdit(EditComponent):
    """Base of edits of heads, experts, features or positions: of all activations at the point unless some are named."""

    heads: tuple[int, ...] = field(default=(), validator=NUMBERS)
    """Numbers of heads, from 0 over all ranks, at `q`, `z` (query heads), `k` and `v` (key/value heads)."""
    experts: tuple[int, ...] = field(default=(), validator=NUMBERS)
    """Numbers of experts whose weights are meant, at `router_weights`."""
    features: tuple[int, ...] = field(default=(), validator=NUMBERS)
    """Numbers of features, from 0 over all ranks, at points without heads (`mlp_hidden`: neurons)."""
    positions: tuple[int, ...] = field(default=(), validator=NUMBERS)
    """Positions in the sequence, from 0 and below `train.seq_len`."""

    def problems(self, job: Job, layout: object) -> Iterator[Problem]:
        """Checks `positions` against the length of sequences."""
        if self.positions and max(self.positions) >= job.train.seq_len:
            message = f"a sequence has the positions 0 to {job.train.seq_len - 1}, and {max(self.positions)} is named"
            yield Problem("positions", message)

    def point_problems(self, points: Mapping[str, TapPoint], layout: Layout) -> Iterable[Problem]:
        """Checks that each point has the heads, features, experts and positions that are named."""
        for name, point in points.items():
            if self.heads and point.axes != "heads":
                yield Problem("heads", f"{name} has no heads; q, k, v and z have")
            if self.features and point.axes == "heads":
                yield Problem("features", f"{name} has heads; choose some by heads")
            if self.experts and not name.endswith(EXPERTS_AT):
                yield Problem("experts", f"{name} has no numbered experts; layers.*.{EXPERTS_AT} has")
            for key in ("heads", "features", "experts"):
                if point.size is not None and (highest := max(getattr(self, key), default=0)) >= point.size:
                    yield Problem(key, f"{name} has the numbers 0 to {point.size - 1}, and {highest} is named")
            # A vector would be added by each rank; zeros of all ranks sum to zero.
            if point.axes == "partial" and shares_tokens(layout) and not isinstance(self, Zero):
                yield Problem("point", f"each rank of tensor parallel has a part of the sum {name}; take mlp_out")
            if self.positions and name == "embed":
                yield Problem("positions", "generation does not tell embed which it has; take layers.0.resid_pre")
            if not point.differentiable:
                yield Problem("point", f"{name} has whole numbers, which are chosen and not computed")


@frozen(kw_only=True)
class Zero(SelectingEdit):
    """Sets activations to zero: an ablation. The weights of other experts stay as they are where one is zero."""

    def build(self, context: BuildContext, taps: TapsInfo) -> Edit:
        """Returns an edit whose replacement is zero."""
        from forge_plugin_taps.editing import Selected

        return Selected(self, context.device)


@frozen(kw_only=True)
class Add(SelectingEdit):
    """Adds a vector to activations: steering. The same at each position."""

    values: tuple[float, ...] = ()
    """The vector, by numbers."""
    file: FilePath = ""
    """Or a safetensors file with one tensor, of the shape of the activations behind positions."""
    factor: float = 1.0
    """Multiplies the vector."""

    def problems(self, job: Job, layout: object) -> Iterator[Problem]:
        """Checks that exactly one of `values` and `file` is given, and that the file is there."""
        yield from super().problems(job, layout)
        if bool(self.values) == bool(self.file):
            yield Problem("values", 'the vector is either values = [...] or file = "..."; give one of them')
        if self.file and not Path(self.file).is_file():
            yield Problem("file", f"{self.file!r} is no file")

    def build(self, context: BuildContext, taps: TapsInfo) -> Edit:
        """Reads the vector now, so that no step waits for a file."""
        from forge_plugin_taps.editing import Vector

        return Vector(self, context.device)


@frozen(kw_only=True)
class Mean(SelectingEdit):
    """Sets activations to their mean over all tokens of a store: an ablation that keeps what all tokens share."""

    store: FilePath = field(validator=min_len(1))
    """Folder of a store, with steps in it, or of one step."""

    def problems(self, job: Job, layout: object) -> Iterator[Problem]:
        """Checks that the folder has steps of a store."""
        yield from super().problems(job, layout)
        yield from _store_problems(self.store)

    def point_problems(self, points: Mapping[str, TapPoint], layout: Layout) -> Iterable[Problem]:
        """Checks that each point is in at least one step of the store."""
        from forge_plugin_taps.store_reader import steps_of

        yield from super().point_problems(points, layout)
        yield from _unstored_problems(self.store, steps_of(Path(self.store)), points)

    def build(self, context: BuildContext, taps: TapsInfo) -> Edit:
        """Computes the means now, from all steps of the store."""
        from forge_plugin_taps.editing import StoredMean

        return StoredMean(self, context.device)


@frozen(kw_only=True)
class Replace(SelectingEdit):
    """Sets the activations of every sequence to a stored sequence's at the same positions (patching).

    Positions that the store does not have stay as they are.
    """

    store: FilePath = field(validator=min_len(1))
    """Folder of a store, with steps in it, of which the last is taken, or of one step."""
    row: int = field(default=0, validator=ge(0))
    """Number of the sequence in the store."""

    def problems(self, job: Job, layout: object) -> Iterator[Problem]:
        """Checks that the folder has steps of a store."""
        yield from super().problems(job, layout)
        yield from _store_problems(self.store)

    def point_problems(self, points: Mapping[str, TapPoint], layout: Layout) -> Iterable[Problem]:
        """Checks that each point is in the last step of the store, which alone is read."""
        from forge_plugin_taps.store_reader import steps_of

        yield from super().point_problems(points, layout)
        yield from _unstored_problems(self.store, steps_of(Path(self.store))[-1:], points)

    def build(self, context: BuildContext, taps: TapsInfo) -> Edit:
        """Reads the sequence now, so that no step waits for a file."""
        from forge_plugin_taps.editing import StoredSequence

        return StoredSequence(self, context.device)


def _store_problems(folder: str) -> Iterator[Problem]:
    from forge_plugin_taps.store_reader import steps_of

    if not steps_of(Path(folder)):
        yield Problem(
            "store", f"{folder!r} has no step of a store; the sink `store` and forge-run inside extract make some"
        )


def _unstored_problems(folder: str, steps: Sequence[Path], points: Iterable[str]) -> Iterator[Problem]:
    """Yields a problem for each point that no step has; none without steps."""
    from forge_plugin_taps.store_reader import steps_with

    stored = steps_with(steps)
    for name in points if steps else ():
        if name not in stored:
            yield Problem("store", f"{folder!r} has no {name}; it has {', '.join(stored)}")
