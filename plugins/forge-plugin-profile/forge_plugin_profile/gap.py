"""The layer whose time exceeds its bound most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen


@frozen
class Gap:
    """Seconds that a layer takes above what it is measured by."""

    layer: str
    measured: float
    expected: float
    """Its bound, its FLOPs at the peak of the device; or, if that is not known, the time of all layers by its FLOPs."""
    by_peak: bool

    @property
    def seconds(self) -> float:
        return self.measured - self.expected


def computing(row: Mapping[str, Any]) -> float:
    """Returns the seconds in which a layer computes or copies, forward and backward."""
    return row["forward_s"] + row["backward_s"]


def gaps(layers: Sequence[Mapping[str, Any]]) -> list[Gap]:
    """Returns the gap of each layer with known FLOPs, the largest first."""
    known = [row for row in layers if row["flops"]]
    if not known:
        return []
    # One measure for all layers, since gaps by different ones cannot be compared
    by_peak = all(row["bound_s"] is not None for row in known)
    # Seconds per FLOP over all layers: slower ones have a gap
    pace = sum(map(computing, known)) / sum(row["flops"] for row in known)
    rows = [
        Gap(row["name"], computing(row), row["bound_s"] if by_peak else pace * row["flops"], by_peak) for row in known
    ]
    return sorted(rows, key=lambda gap: -gap.seconds)
