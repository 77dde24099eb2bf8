"""Sections of reports on runs: the kind `report_section`, and the blocks that one is made of.

A section defines the content; `forge-run report` (forge-plugin-runs) renders it, in HTML and in Markdown. Text is
plain everywhere: the report escapes it, so that no section can break the page or put a script into it.

    @frozen(kw_only=True)
    class Temperature(ReportSection):
        \"\"\"Temperature of the machine room.\"\"\"

        title = "Temperature"

        def blocks(self, runs):
            for run in runs:
                if text := run.text("room.txt"):
                    yield Preformatted(title=run.name, text=text)

and in the distribution's pyproject.toml, which is all that a section needs to be part of every report:

    [project.entry-points."forge.report_section"]
    temperature = "my_package.report_section:Temperature"
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge

from forge_core.checkpoint.run_folder import RunFolder
from forge_core.contracts.components import Component
from forge_core.contracts.errors import ForgeError, JobError
from forge_kit.tools.metrics import Metrics, read_metrics

if TYPE_CHECKING:
    import numpy as np


@frozen(kw_only=True, slots=False)
class ReportRun:
    """One of the runs that a report is about, read from its folder. What the folder does not have is empty."""

    number: int
    """Its place among the runs, from 0: it has the same colour in all sections."""
    name: str
    """Name in this report, unique in it."""
    folder: Path

    @cached_property
    def job(self) -> Mapping[str, Any]:
        """The resolved job."""
        try:
            return RunFolder(self.folder).job()
        except JobError:
            return {}

    @cached_property
    def metrics(self) -> Metrics:
        """Rows of steps, and in `evaluations` the rows of evaluations, in the order of steps."""
        try:
            return read_metrics(self.folder)
        except ForgeError:
            return Metrics()

    def text(self, name: str) -> str:
        """Returns the text of a file in the run folder; empty if there is none."""
        try:
            # Replaced and not refused: a process that was killed may have left half a character
            return (self.folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def json(self, name: str) -> Mapping[str, Any]:
        """Returns the object in a JSON file of the run folder; empty if there is none, or it cannot be read."""
        try:
            value = json.loads(self.text(name))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def plan(self) -> str:
        """Returns the summary that the last start of the run printed; empty if there is none."""
        return RunFolder(self.folder).plan()

    def provenance(self) -> Mapping[str, Any]:
        """Returns versions and digests of the run; empty if there are none, or they cannot be read."""
        try:
            return RunFolder(self.folder).provenance()
        except ValueError:
            return {}

    def lines(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Yields the objects in a file of JSON lines, without one that was truncated when a run was killed."""
        for line in self.text(name).splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


# --- what a section shows ------------------------------------------------------------------------------------------

Cell = str | float | ReportRun | None
"""Content of a table: a number is aligned and shortened, a run is its name with its colour, None is empty."""


@frozen(kw_only=True)
class Paragraph:
    """Some sentences."""

    text: str


@frozen(kw_only=True)
class Table:
    """Rows of cells below a row of titles."""

    head: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    folded: bool = False
    """Whether the reader has to open it."""


@frozen(kw_only=True)
class Preformatted:
    """Text whose lines stay as they are: output of a program, a sample."""

    text: str
    title: str = ""
    folded: bool = False


@frozen(kw_only=True)
class Line:
    """A curve of one run. Values that are not finite are marked where they stand."""

    run: ReportRun
    # Compared as tuples: arrays of NumPy compare by element, and the result has no truth value
    x: Sequence[float] | np.ndarray = field(eq=tuple)
    """Rising."""
    y: Sequence[float] | np.ndarray = field(eq=tuple)

    @x.validator
    def _as_long(self, _: Any, x: Sequence[float] | np.ndarray) -> None:
        if len(x) != len(self.y):
            raise ValueError(f"a line has {len(x)} places and {len(self.y)} values")


@frozen(kw_only=True)
class Chart:
    """Curves over steps, of several runs; the reader may look at them over tokens and time instead.

    A long line is reduced to the least, mean and largest value of each column of the picture, so that a spike of one
    step in a million is seen.
    """

    title: str
    lines: Sequence[Line]
    name: str = ""
    """Key in the metrics, where the title is not enough to find it."""
    x: str = "step"
    """What `x` is. Anything but `step` stays as it is when the reader chooses tokens or time."""
    axis: Literal["auto", "linear", "log"] = "auto"
    """The axis of the values. auto: logarithmic where they are noisy, positive, and over a wide range."""


@frozen(kw_only=True)
class HeatMap:
    """A grid of colours: blue below `middle`, red above it."""

    title: str
    values: Sequence[Sequence[float]]
    """Rows; a shorter one ends in nothing, and a value that is not finite is left empty."""
    rows: Sequence[str]
    """Names of the rows."""
    row: str = "layer"
    """What a row is."""
    column: str = "expert"
    """What a column is."""
    middle: float = 0.0
    reach: float = field(default=1.0, validator=ge(0))
    """Distance from the middle at which the colours are full."""


@frozen(kw_only=True)
class Bars:
    """Bars of parts that are stacked, each scaled to its sum."""

    title: str
    parts: Mapping[str, str]
    """Names of the parts in order, each with a colour: `#2563eb`."""
    rows: Sequence[tuple[Cell, Sequence[float]]]
    """Label, and size of each part."""


Block = Paragraph | Table | Preformatted | Chart | HeatMap | Bars


@frozen(kw_only=True)
class ReportSection(Component):
    """A section of reports on runs. Its fields have defaults: no file configures it.

    Sections of all installed distributions are in every report that has something for them.
    """

    kind = "report_section"

    title: ClassVar[str]
    place: ClassVar[float] = 50.0
    """Sections come in rising order: overview 0, curves 10, job 20, plan 30, data 40, experts 50, training 54,
    activations 55, checkpoints 60, goodput 70, profile 75, samples 80."""

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """Returns what the section shows of the runs; nothing leaves the section out.

        Raises:
            ForgeError: a file of a run cannot be used. The report shows this in place of the section.
        """
        raise NotImplementedError


def finite(value: Any) -> float | None:
    """A number of the metrics, or None: it is no number, or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
