"""Globs over the names of points."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from forge_core.contracts.errors import Problem, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from forge_kit.nn.taps import TapPoint


def sampled_points(model: nn.Module) -> dict[str, TapPoint]:
    """Returns the model's points by name, except points of images: their rows and positions are not the tokens'."""
    from forge_kit.nn.taps import tap_points  # brings torch, which a job that is checked does not need

    return {name: point for name, point in tap_points(model).items() if point.axes != "images"}


def matching(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Returns the names that some pattern matches, in their order. `*` also matches dots."""
    patterns = list(patterns)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def selection_problems(path: str, patterns: Sequence[str], names: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for each pattern that matches nothing, with names that were probably meant."""
    for number, pattern in enumerate(patterns):
        if not matching([pattern], names):
            yield Problem(
                f"{path}.{number}" if path else str(number), f"{pattern!r} matches no point{_hint(pattern, names)}"
            )


def _hint(pattern: str, names: Sequence[str]) -> str:
    forms = sorted({_form(name) for name in names})
    return did_you_mean(_form(pattern), forms) or f"; there are {', '.join(forms)}"


def _form(name: str) -> str:
    """A name with `*` for the number of its layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def with_gradients(points: Mapping[str, TapPoint]) -> list[str]:
    """Returns the names of points that have a gradient."""
    return [name for name, point in points.items() if point.differentiable]


def editable(points: Mapping[str, TapPoint]) -> list[str]:
    """Returns the names of points whose tensor is an input of later computations."""
    return [name for name, point in points.items() if point.side != "pattern"]


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names, layers by number."""
    # Numbers by length and digits, which is their order; 99 puts words behind numbers.
    return sorted(
        set(names), key=lambda name: [(len(part), part) if part.isdigit() else (99, part) for part in name.split(".")]
    )


def layer_of(name: str) -> int | None:
    """The number of a point's layer; None if it belongs to none."""
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None
