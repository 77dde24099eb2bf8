"""Forge from a checkout, without installing it: for machines on which nothing can be installed.

    export PYTHONPATH=$(python tests/gpu/offline.py /tmp/forge-metadata)

Components are found through the metadata of installed distributions. Here it is written into a folder, from each
`pyproject.toml` of the checkout, and put on the path together with the sources. Needs Python alone. Packages that Forge
imports must be there or be unpacked on the path too.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]


def projects(checkout: Path = CHECKOUT) -> list[Path]:
    """The folders of all distributions."""
    return [checkout, *sorted(path.parent for path in checkout.glob("plugins/*/pyproject.toml"))]


def write_metadata(folder: Path, checkout: Path = CHECKOUT) -> list[Path]:
    """Write what importlib.metadata reads of each distribution; returns what belongs on the path."""
    sources = projects(checkout)
    for source in sources:
        project = tomllib.loads((source / "pyproject.toml").read_text("utf-8"))["project"]
        name = project["name"].replace("-", "_")
        info = folder / f"{name}-{project['version']}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("\n".join(_metadata(project)) + "\n", "utf-8")
        (info / "entry_points.txt").write_text("\n".join(_entry_points(project)) + "\n", "utf-8")
        (info / "RECORD").write_text("", "utf-8")
        (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}}))
    return [folder, *sources]


def _metadata(project: Mapping[str, Any]) -> Iterator[str]:
    yield "Metadata-Version: 2.1"
    yield f"Name: {project['name']}"
    yield f"Version: {project['version']}"
    yield from (f"Requires-Dist: {requirement}" for requirement in project.get("dependencies", ()))


def _entry_points(project: Mapping[str, Any]) -> Iterator[str]:
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    for group, entries in groups.items():
        yield f"[{group}]"
        yield from (f"{name} = {value}" for name, value in entries.items())


def search_path(folder: Path, before: str = "") -> str:
    """The value of PYTHONPATH with which the checkout is as if installed."""
    return os.pathsep.join([*map(str, write_metadata(folder)), *([before] if before else [])])


if __name__ == "__main__":
    print(search_path(Path(sys.argv[1]).resolve(), os.environ.get("PYTHONPATH", "")))
