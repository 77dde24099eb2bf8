"""Points of a ladder: what each run of it was, and the loss at which it ended."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import NOTHING, asdict, field, fields, frozen
from attrs.validators import deep_mapping, ge, gt, instance_of

from forge_core.contracts.errors import JobError, did_you_mean
from forge_core.files import write_atomically
from forge_kit.tools.outputs import MARK, output_file

SCHEMA = 1
"""Number of the file's layout."""
NUMBER = instance_of((int, float))
POSITIVE: Any = [NUMBER, gt(0)]
TEXT = instance_of(str)
NUMBERS = deep_mapping(TEXT, NUMBER, instance_of(dict))


@frozen(kw_only=True)
class Point:
    """The end of one run, or of one branch of a run."""

    run: str = field(validator=TEXT)
    """Name of the run."""
    parameters: float = field(validator=POSITIVE)
    """Parameters without embedding and head."""
    parameters_total: float = field(validator=POSITIVE)
    """All parameters."""
    tokens: float = field(validator=POSITIVE)
    """Tokens that the run was trained on."""
    flops: float = field(validator=POSITIVE)
    """FLOPs of the training, by the model's own count."""
    loss: float = field(default=math.nan, validator=NUMBER)
    """Loss at the end, in nats a token; NaN for a run that has none."""
    accuracy: float = field(default=math.nan, validator=NUMBER)
    """Of the task whose loss this is, a part of 1; NaN if the ladder has no second step."""
    held_out: bool = field(default=True, validator=instance_of(bool))
    """Whether the loss is of text that was not trained on, and not a mean of training losses."""
    budget: str = field(default="", validator=TEXT)
    """Its label in the ladder's file."""
    unique_tokens: float = field(default=math.inf, validator=POSITIVE)
    """Tokens of the data before any is repeated; infinite where none is."""
    seed: int = field(default=0, validator=[instance_of(int), ge(0)])
    trunk: str = field(default="", validator=TEXT)
    """Name of the run with which this one begins; empty: it is a whole run itself. Points of a trunk are resampled
    together, as branches share its noise."""
    tuned: Mapping[str, float] = field(factory=dict, validator=NUMBERS)
    """Values of the keys that are tuned; the law is of the best of each size and budget."""
    factors: Mapping[str, float] = field(factory=dict, validator=NUMBERS)
    """Factors of these keys on what the job or its rule gives; none: the values themselves are the grid."""
    failed: str = field(default="", validator=TEXT)
    """Why the point has no loss (`diverged`, `failed`, `unfinished`). Such points are listed and not fitted."""

    @property
    def source(self) -> str:
        """Name of the run whose noise the point has."""
        return self.trunk or self.run

    @property
    def usable(self) -> bool:
        """Whether the point takes part in a fit."""
        return not self.failed and math.isfinite(self.loss) and self.loss > 0


def write_points(path: Path, points: Sequence[Point], option: str = "--out") -> None:
    """Write points with every digit: `float.__repr__` is exact, and rounded values have biased published fits."""
    # JSON has no infinity, which is also the default.
    rows = [{name: value for name, value in asdict(point).items() if value != math.inf} for point in points]
    rows = [row | {name: None for name in ("loss", "accuracy") if not math.isfinite(row.get(name, 0))} for row in rows]
    text = json.dumps({"made_by": MARK, "schema": SCHEMA, "points": rows}, indent=1, allow_nan=False)
    write_atomically(output_file(path, option), f"{text}\n")


def read_points(path: Path) -> list[Point]:
    """Read what `write_points` wrote, or the same table by hand.

    Raises:
        JobError: the file cannot be read, or a point is not one; the message has its number and key.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(f"{path} cannot be read as a table of points: {error}") from None
    # Written by other programs too, so nothing is taken for granted
    rows = content.get("points") if isinstance(content, dict) else None
    if not isinstance(rows, list) or content.get("schema") != SCHEMA:
        raise JobError(f'{path} is no table of points: it needs "schema": {SCHEMA} and "points": [{{...}}]')
    return [_point(row, f"{path}: points[{number}]") for number, row in enumerate(rows)]


def _point(row: Any, where: str) -> Point:
    if not isinstance(row, dict):
        raise JobError(f"{where} is no table of a point's keys")
    keys = {each.name: each.default is NOTHING for each in fields(Point)}
    if unknown := [name for name in row if name not in keys]:
        raise JobError(
            f"{where}: unknown key {unknown[0]!r}{did_you_mean(unknown[0], keys)}; there are {', '.join(keys)}"
        )
    # All of them, for a table that is made by hand
    if missing := [name for name, needed in keys.items() if needed and name not in row]:
        raise JobError(f"{where} has no {', '.join(missing)}")
    # JSON has no NaN
    values: dict[str, Any] = row | {name: math.nan for name in ("loss", "accuracy") if row.get(name, 0) is None}
    try:
        return Point(**values)
    except (TypeError, ValueError) as error:
        raise JobError(f"{where}: {error.args[0]}") from None
