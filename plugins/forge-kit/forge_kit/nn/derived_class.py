"""Classes of modules that compute by a mixin and then by their own class."""

from __future__ import annotations

from functools import cache
from typing import Any


# One class for each pair: with a class for each module, equal blocks would be compiled separately
@cache
def derived(mixin: Any, base: Any) -> Any:
    """Returns the class of `mixin` and then `base`, named as `base`; equal modules share it, and one compiled graph."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})
