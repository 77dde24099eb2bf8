"""How the removal of something public is announced: of hooks, their arguments, keys, and names.

A hook by `@hookspec(warn_on_impl=deprecated(…))`, an argument by `warn_on_impl_args={name: deprecated(…)}`: plugins
that implement it are warned when they are registered. A key by `field(metadata=deprecated_key(…))`: jobs that set it to
something else than its default are warned. `docs/compatibility.md` has examples.
"""

from __future__ import annotations

from typing import Any

KEY = "deprecated"
"""Where the metadata of a field have the warning about its key."""


class ForgeDeprecation(FutureWarning):
    """Something that a job or a plugin uses will be removed in version `removed_in` of its distribution."""

    # A FutureWarning, which Python shows by default: the user who runs the job must know, not only plugin authors.

    def __init__(self, message: str, removed_in: str) -> None:
        super().__init__(message)
        self.removed_in = removed_in


def deprecated(what: str, removed_in: str, instead: str) -> ForgeDeprecation:
    """Return the warning `{what} is deprecated, and version {removed_in} removes it; {instead}`.

    `what` begins the sentence (`the hook forge_build_x`); `instead` is the remedy (`implement forge_build_y`).
    """
    return ForgeDeprecation(f"{what} is deprecated, and version {removed_in} removes it; {instead}", removed_in)


def deprecated_key(removed_in: str, instead: str) -> dict[str, Any]:
    """Metadata of a field whose key will be removed; join `when_resumed` to it by `|`. Arguments as above."""
    return {KEY: deprecated("this key", removed_in, instead)}
