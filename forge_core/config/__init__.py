"""The job: its tables, how they are read from TOML, checked, and written back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_core.config.load import load_job

__all__ = ["load_job"]


def __getattr__(name: str) -> Any:
    if name != "load_job":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forge_core.config.load import load_job  # late: listing components does not need it

    return load_job
