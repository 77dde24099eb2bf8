"""Documents as YAML that a person can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # of a module without types
    """Texts of several lines as such, and no `&id001` for a value that occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def as_yaml(document: Mapping[str, Any]) -> str:
    """Returns a document with its keys in the order in which they were made."""
    return yaml.dump(plain(document), Dumper=_Dumper, sort_keys=False, width=1_000_000, allow_unicode=True)


def plain(value: Any) -> Any:
    """A value with dicts and lists in the place of other mappings and tuples, as parsers of YAML return it."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def merged(document: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a document with the keys of `further` in addition, table by table."""
    # A copy: the tables of a cluster file are shared by all runs of an array
    result = dict(document)
    for key, value in further.items():
        earlier = result.get(key)
        is_table = isinstance(earlier, Mapping) and isinstance(value, Mapping)
        result[key] = merged(earlier, value) if is_table else value  # type: ignore[arg-type]  # both are mappings
    return result


def at(document: Any, path: str) -> Any:
    """The value at a path (`resources.infra`); None if there is none."""
    for key in path.split("."):
        document = document.get(key) if isinstance(document, Mapping) else None
    return document
