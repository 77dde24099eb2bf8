"""Makes the index of first-party components when the core is built or installed: a hook of hatchling.

The index lets the core name the distribution to install for a component that is missing, without knowing any plugin.
It is made from the entry points in `plugins/*/pyproject.toml`, and is no file of the repository.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INDEX = Path("forge_core", "plugins", "first_party.json")
PREFIX = "forge."
REPLACES = "forge_replaces"


def index_text(root: Path) -> str:
    """The index as JSON: kind -> type -> distribution, and the old names that each distribution replaces.

    Args:
        root: of the repository.

    Raises:
        ValueError: two distributions offer the same type of a kind.
    """
    index: dict[str, dict[str, str]] = {}
    for pyproject in sorted((root / "plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(pyproject.read_text())["project"]
        for group, entries in project.get("entry-points", {}).items():
            for type_ in entries if group.startswith((PREFIX, REPLACES)) else ():
                owner = index.setdefault(group.removeprefix(PREFIX), {}).setdefault(type_, project["name"])
                if owner != project["name"]:
                    raise ValueError(f"{owner} and {project['name']} both offer {group} {type_!r}")
    return json.dumps(index, indent=1, sort_keys=True) + "\n"


class FirstPartyIndex(BuildHookInterface):
    """Writes the index before files are collected, for editable installs too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See `BuildHookInterface`. A source distribution has the index, and no plugins to make it from."""
        root = Path(self.root)
        if (root / "plugins").is_dir():
            (root / INDEX).write_text(index_text(root))
