"""How something public is announced to go: hooks, their arguments, keys, and whatever else a version promises.

A hook, or one argument of a hook, whoever implements it being warned when the plugin is registered:

    @hookspec(firstresult=True, warn_on_impl=deprecated("the hook forge_build_x", "0.4", "implement forge_build_y"))
    def forge_build_x(self, component, context): ...

    @hookspec(warn_on_impl_args={"layout": deprecated("the argument layout of forge_x", "0.4", "take job")})
    def forge_x(self, job, layout): ...

A key of a component or section, told to whoever sets it to something else than its default:

    beta: float = field(default=0.9, metadata=deprecated_key("0.4", "set betas"))
    mode: Literal["auto", "fast"] = field(default="fast", metadata=deprecated_value("auto", "0.4", "leave the key out"))
"""

from __future__ import annotations

from typing import Any

from attrs import Attribute

KEY = "deprecated"
VALUE = "deprecated value"


class ForgeDeprecation(FutureWarning):
    """Something that a job or a plugin uses will be removed. Shown by default, since who runs a job must know.

    Attributes:
        removed_in: the version of the distribution that removes it.
    """

    def __init__(self, message: str, removed_in: str) -> None:
        super().__init__(message)
        self.removed_in = removed_in


def deprecated(what: str, removed_in: str, instead: str) -> ForgeDeprecation:
    """The warning about something that is to go.

    Args:
        what: as a sentence begins with it: `the hook forge_build_x`.
        removed_in: version of the distribution that removes it.
        instead: what to do, as a command: `implement forge_build_y`.
    """
    message = f"{what} is deprecated, and version {removed_in} removes it; {instead}"
    return ForgeDeprecation(message, removed_in)


def deprecated_key(removed_in: str, instead: str) -> dict[str, Any]:
    """Metadata of a field whose key is to go; `when_resumed` may be joined to it by `|`. Arguments as above."""
    return {KEY: deprecated("this key", removed_in, instead)}


def deprecated_value(value: str, removed_in: str, instead: str) -> dict[str, Any]:
    """Metadata of a field one value of which is to go. Arguments as above."""
    return {VALUE: (value, deprecated(f"the value {value!r}", removed_in, instead))}


def deprecation_of(key: Attribute, value: Any = None) -> ForgeDeprecation | None:
    """The warning about a field's key, or about this value of it, if it is to go."""
    old, of_value = key.metadata.get(VALUE, (None, None))
    return of_value if value is not None and value == old else key.metadata.get(KEY)
