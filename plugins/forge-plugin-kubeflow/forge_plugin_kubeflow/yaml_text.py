"""Documents as YAML that a person can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # without stubs it is Any
    """Writes texts of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        """No `&id001` for a value that occurs twice."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # A script or a job file in one line with \n in it could not be read
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def as_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """Returns documents one after the other, with their keys in the order in which they were made."""
    # The width: a command that is folded could not be copied
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1_000_000, explicit_start=True)
