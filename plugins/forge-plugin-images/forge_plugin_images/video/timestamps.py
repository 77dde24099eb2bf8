"""Texts with the times of frames."""

from __future__ import annotations

from collections.abc import Sequence
from string import Formatter

FRAME = "{frame}"
"""Where the positions of a frame stand in a format."""


def format_problem(form: str) -> str:
    """Returns why a format cannot be used, with the fix; empty if it can."""
    before, _, after = form.partition(FRAME)
    if FRAME in after:
        return f"has {FRAME} twice; a frame stands at one place"
    try:
        names = {name for part in (before, after) for _, name, _, _ in Formatter().parse(part) if name is not None}
        _written(before, 1.0), _written(after, 1.0)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        return f"is no format ({type(error).__name__}: {error}); write it like '<{{seconds:.1f}} seconds>'"
    if names != {"seconds"}:
        return "does not write the time; put {seconds:.1f} where it should stand"
    return ""


def texts_between(form: str, seconds: Sequence[float]) -> list[str]:
    """Returns the texts before, between and behind the entries of a clip's time axis: one more than there are entries.

    Args:
        form: see `Frames.timestamp_format`.
        seconds: of each entry.
    """
    before, _, after = form.partition(FRAME)
    texts = [""]
    for each in seconds:
        # Joined to the text before it, so that both are encoded as one
        texts[-1] += _written(before, each)
        texts.append(_written(after, each))
    return texts


def _written(form: str, seconds: float) -> str:
    return form.format(seconds=seconds)
