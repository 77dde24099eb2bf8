"""Validators of attrs fields that many components have.

Each is passed as `field(validator=...)` and raises ValueError, which a job's error report shows under the key's path.
They need no torch: component modules are imported when a job is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs.validators import gt, le

DEPTH = (gt(0), le(10_000))
"""Numbers of layers: at most ten times the depth of the deepest published transformers (DeepNet, arXiv 2203.00555).
Each layer is a module, so that a mistyped count would be built for hours before memory is known not to suffice."""

TRAINING_ONLY: dict[str, bool] = {"training_only": True}
"""Metadata of a field of a model that shapes its training, and not what its weights compute: initial values, weights of
auxiliary losses, room in a batch. `[checkpoint.load]` does not compare it. Join it to `when_resumed` by `|`."""


def betas(_: object, _attribute: Any, value: Sequence[float]) -> None:
    """Decays of moving averages: each in [0, 1).

    Raises:
        ValueError: one is outside.
    """
    if not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"each must be >= 0 and < 1, got {list(value)}")


def betas_with_positive_first(_: object, _attribute: Any, value: Sequence[float]) -> None:
    """As `betas`, with the first in (0, 1) because it is a divisor.

    Raises:
        ValueError: one is outside.
    """
    if not (0 < value[0] < 1 and all(0 <= beta < 1 for beta in value[1:])):
        raise ValueError(f"the first must be > 0 and < 1, the second >= 0 and < 1, got {list(value)}")


def power_of_two(least: int = 1) -> Any:
    """Returns a validator of powers of two.

    Args:
        least: the smallest value that is allowed.
    """

    def validate(_: object, _attribute: Any, value: int) -> None:
        if value < least or value & (value - 1):
            raise ValueError(f"must be a power of two, {least} at least, got {value}")

    return validate
