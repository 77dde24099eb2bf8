"""Durations, sizes and shares as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Returns a duration in its two largest units: `3 d 4 h`, `5.2 min`, `0.31 s`."""
    if seconds < 0.9995:
        return f"{seconds:.2g} s" if seconds >= 1e-4 else "0 s"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} h"
    if seconds < 730 * 86400:
        return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"
    return f"{seconds / 86400 / 365:.1f} years"


def share(part: float, whole: float) -> str:
    """Returns a share in percent."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def size(count: float) -> str:
    """Returns bytes in a unit: `12.5 MB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: `1 restart`, `2 restarts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
