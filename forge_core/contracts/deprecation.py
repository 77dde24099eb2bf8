"""How the removal of something public is announced: of hooks, their arguments, keys, and names.

A hook, or one argument of a hook; plugins that implement it are warned when they are registered:

    @hookspec(firstresult=True, warn_on_impl=deprecated("the hook forge_build_x", "0.4", "implement forge_build_y"))
    def forge_build_x(self, component, context): ...

    @hookspec(warn_on_impl_args={"layout": deprecated("the argument layout of forge_x", "0.4", "take job")})
    def forge_x(self, job, layout): ...

A key of a component or section; jobs that set it to something else than its default are warned:

    beta: float = field(default=0.9, metadata=deprecated_key("0.4", "set betas"))
    mode: Literal["auto", "fast"] = field(default="fast", metadata=deprecated_value("auto", "0.4", "leave the key out"))
"""

from __future__ import annotations

from typing import Any

from attrs import Attribute

KEY = "deprecated"
VALUE = "deprecated value"


class ForgeDeprecation(FutureWarning):
    """Something that a job or a plugin uses will be removed in version `removed_in` of its distribution."""

    # A FutureWarning, which Python shows by default: the user who runs the job must know, not only plugin authors.

    def __init__(self, message: str, removed_in: str) -> None:
        super().__init__(message)
        self.removed_in = removed_in


def deprecated(what: str, removed_in: str, instead: str) -> ForgeDeprecation:
    """The warning about something that will be removed.

    Args:
        what: the start of the sentence, such as `the hook forge_build_x`.
        removed_in: version of the distribution that removes it.
        instead: the remedy, as a command: `implement forge_build_y`.
    """
    message = f"{what} is deprecated, and version {removed_in} removes it; {instead}"
    return ForgeDeprecation(message, removed_in)


def deprecated_key(removed_in: str, instead: str) -> dict[str, Any]:
    """Metadata of a field whose key will be removed; join `when_resumed` to it by `|`. Arguments as above."""
    return {KEY: deprecated("this key", removed_in, instead)}


def deprecated_value(value: str, removed_in: str, instead: str) -> dict[str, Any]:
    """Metadata of a field one value of which will be removed. Arguments as above."""
    return {VALUE: (value, deprecated(f"the value {value!r}", removed_in, instead))}


def deprecation_of(key: Attribute, value: Any = None) -> ForgeDeprecation | None:
    """The warning about a field's key, or about this value of it, if it will be removed."""
    old, of_value = key.metadata.get(VALUE, (None, None))
    return of_value if value is not None and value == old else key.metadata.get(KEY)
