"""The keys of a table, as `explain` and `schema` present them."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import Attribute, frozen

from forge_core.config.describe import toml_text
from forge_core.config.docs import field_docs
from forge_core.config.leaves import Mismatch
from forge_core.config.structure import resolved_fields
from forge_core.config.validators import Demand, demands
from forge_core.config.walk import default_of
from forge_core.contracts.components import DefaultType
from forge_core.contracts.deprecation import deprecation_of
from forge_core.contracts.errors import PluginError


@frozen
class Key:
    """One key of a table: a field of its class."""

    name: str
    type: Any
    default: Any
    """The value, a `DefaultType`, or `attrs.NOTHING` for a required key."""
    demands: tuple[Demand, ...]
    doc: str

    @property
    def required(self) -> bool:
        return self.default is attrs.NOTHING

    @property
    def default_text(self) -> str:
        """The default as one would write it; empty if there is none to write."""
        if isinstance(self.default, DefaultType):
            return f'type = "{self.default.type}"'
        if self.required or self.default is None or attrs.has(type(self.default)):
            return ""
        return _text(self.default)


def keys_of(cls: type) -> list[Key]:
    """The keys of an attrs class, in order.

    Raises:
        PluginError: the types of its fields cannot be resolved.
    """
    docs = field_docs(cls)
    try:
        fields = resolved_fields(cls)
    except Mismatch as mismatch:
        raise PluginError(str(mismatch)) from mismatch
    return [
        Key(key, f.type, _default(f), tuple(demands(f.validator)), _doc(f, docs.get(f.name, "")))
        for key, f in fields.items()
    ]


def _doc(f: Attribute, text: str) -> str:
    warning = deprecation_of(f)
    notice = "" if warning is None else str(warning)
    return " ".join(filter(None, [text, f"{notice[:1].upper()}{notice[1:]}." if notice else ""]))


def _default(f: Attribute) -> Any:
    depends = f.default is not attrs.NOTHING and default_of(f) is attrs.NOTHING
    return None if depends else default_of(f)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(_text(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_text(item)}' for key, item in value.items())}}}"
    return toml_text(value if isinstance(value, str | bool | int | float) else str(value))
