"""The file of a fit: the law with every digit, its resamples, and the points from which it was made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict

from forge_core.contracts.errors import JobError
from forge_core.files import write_atomically
from forge_kit.tools.outputs import MARK, output_file
from forge_plugin_ladder.accuracy import Curve
from forge_plugin_ladder.fitting import Fit
from forge_plugin_ladder.intervals import Resampled
from forge_plugin_ladder.law import Law
from forge_plugin_ladder.points import Point

SCHEMA = 1


def write_fit(
    path: Path, resampled: Resampled, points: Sequence[Point], count: str, law: str, accuracy: str = ""
) -> None:
    """Write a fit; `count`, `law` and `accuracy` are as in the ladder's file. JSON's numbers are exact."""
    # Resamples too: intervals of any quantity follow from them later
    fit = resampled.fit
    content = {
        "made_by": MARK,
        "schema": SCHEMA,
        "law": law,
        "count": count,
        "accuracy": accuracy,
        "points": digest(points),
        "values": fit.values(),
        "threshold": fit.threshold,
        "cost": fit.cost,
        "widened": resampled.widened,
        "failed_resamples": resampled.failed,
        "residuals": resampled.residuals.tolist(),
        "curve": _curve_content(resampled.curve),
        "resamples": np.concatenate([resampled.coefficients, resampled.exponents], axis=1).tolist(),
    }
    write_atomically(output_file(path, "ladder fit:"), json.dumps(content, allow_nan=False) + "\n")


def _curve_content(curve: Curve | None) -> dict[str, Any] | None:
    if curve is None:
        return None
    # JSON has no NaN, which marks resamples without a curve
    rows = [None if np.isnan(row).any() else row for row in curve.resamples.tolist()]
    return {"values": curve.values.tolist(), "resamples": rows, "spread": curve.spread}


def _curve(content: dict[str, Any] | None) -> Curve | None:
    if content is None:
        return None
    rows = [[np.nan] * 4 if row is None else row for row in content["resamples"]]
    return Curve(values=np.array(content["values"]), resamples=np.array(rows), spread=content["spread"])


def read_fit(path: Path, law: Law, points: Sequence[Point], count: str, type_: str, accuracy: str = "") -> Resampled:
    """Read what `write_fit` wrote.

    Raises:
        JobError: there is none, it cannot be read, or it is of other points, another law or count.
    """
    again = "run `forge-run ladder fit` again"
    if not path.is_file():
        raise JobError(f"{path} is not there: run `forge-run ladder fit` first")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        # A later version's file is not read with this version's meaning
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}, and this version has {SCHEMA}")
        now = {"law": type_, "count": count, "accuracy": accuracy, "points": digest(points)}
        if changed := [name for name, value in now.items() if content[name] != value]:
            raise JobError(f"{path} was made with other {' and '.join(changed)}; {again}")
        values, rows = content["values"], np.array(content["resamples"], dtype=np.float64)
        split = len(law.coefficients)
        fit = Fit(
            law=law,
            coefficients=np.array([values[name] for name in law.coefficients]),
            exponents=np.array([values[name] for name in law.exponents]),
            threshold=content["threshold"],
            cost=content["cost"],
            converged=True,
        )
        return Resampled(
            fit=fit,
            coefficients=rows[:, :split],
            exponents=rows[:, split:],
            residuals=np.array(content["residuals"]),
            widened=content["widened"],
            failed=content["failed_resamples"],
            curve=_curve(content["curve"]),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise JobError(f"{path} cannot be read ({error}); {again}") from None


def digest(points: Sequence[Point]) -> str:
    """Returns SHA-256 of the points, every digit of them."""
    # Sorted, as a table may be written again in another order
    rows = sorted(json.dumps(asdict(point), sort_keys=True) for point in points)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()
