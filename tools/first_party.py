"""Writes the index of first-party components that the core ships: `python tools/first_party.py`.

The index lets the core name the distribution to install for a component that is missing, without knowing any plugin.
It is made from the entry points in `plugins/*/pyproject.toml`; a test compares the two.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "forge_core" / "plugins" / "first_party.json"
PREFIX = "forge."
REPLACES = "forge_replaces"


def index_text() -> str:
    """The index as JSON: kind -> type -> distribution, and the old names that each distribution replaces.

    Raises:
        ValueError: two distributions offer the same type of a kind.
    """
    index: dict[str, dict[str, str]] = {}
    for pyproject in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(pyproject.read_text())["project"]
        for group, entries in project.get("entry-points", {}).items():
            for type_ in entries if group.startswith((PREFIX, REPLACES)) else ():
                owner = index.setdefault(group.removeprefix(PREFIX), {}).setdefault(type_, project["name"])
                if owner != project["name"]:
                    raise ValueError(f"{owner} and {project['name']} both offer {group} {type_!r}")
    return json.dumps(index, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    INDEX.write_text(index_text())
