"""A planned run of a ladder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen

STEPS = "train.steps"


@frozen(kw_only=True)
class Planned:
    """One run of a ladder."""

    name: str
    """Of its folder, too."""
    size: str
    budget: str
    seed: int | None
    parameters: int
    parameters_total: int
    steps: int
    tokens: int
    flops: float
    settings: Mapping[str, str]
    """Keys of the job that differ from the base, values as in TOML."""
    warnings: Sequence[str]
    factors: Mapping[str, float] = field(factory=dict)
    """By key that is tuned, this run's factor on what the job or its rule gives."""
    tuned: Mapping[str, float] = field(factory=dict)
    """The values of these keys."""
    trunk: str = ""
    """Name of the longer run with which it begins, to the bit; empty: none."""
    branch_step: int = 0
    """The last step that both have in common."""
    branch_points: Sequence[int] = ()
    """Steps after which shorter runs branch from this one."""

    memory: int | None = None
    """Bytes at the peak of the fullest rank; None: not estimated."""
    hours: float | None = None
    """At least, for the steps that it makes itself; None: not estimated."""
    remark: str = ""
    """Why it does not fit the hardware, or why its memory is unknown; empty: neither."""

    @property
    def trained(self) -> float:
        """The part of its steps that a branch makes itself."""
        return 1 - self.branch_step / self.steps


def overrides(settings: Mapping[str, str]) -> list[str]:
    """Returns settings as options of `forge-run`."""
    return [f"--{key}={value}" for key, value in settings.items()]
