"""Formatted figures of a plan."""

from __future__ import annotations


def flops(value: float) -> str:
    """Returns floating-point operations with a unit."""
    if value >= 1e16:
        return f"{value / 1e15:,.2f} PFLOP"
    return f"{value / 1e12:,.1f} TFLOP" if value >= 1e12 else f"{value / 1e9:,.1f} GFLOP"


def seconds(value: float) -> str:
    """Returns a duration with a unit."""
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.2f} ms"


def size(value: float) -> str:
    """Returns bytes in decimal units."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= bytes_:
            return f"{value / bytes_:,.2f} {unit}"
    return f"{value:,.0f} B"
