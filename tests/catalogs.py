"""`Catalog.installed()` reads what is installed only when that has changed since the last call.

Every command of a test asks for the catalog, and reading six hundred distributions takes longer than most commands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import metadata

from forge_core.plugins.catalog import Catalog, Offer

_scan = Catalog.installed.__func__
_read: dict[tuple[object, ...], list[Offer]] = {}


def install() -> None:
    """Make `Catalog.installed` remember, for the whole process."""
    Catalog.installed = classmethod(_remembered)


def _remembered(cls: type[Catalog]) -> Catalog:
    found = (metadata.distributions, *_files())
    if found not in _read:
        _read.clear()
        _read[found] = _scan(cls).offers()
    return cls(_read[found])


def _files() -> Iterator[tuple[object, ...]]:
    """Yields each file of entry points that Python finds, with its size and time."""
    for folder in sys.path:
        try:
            names = sorted(name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info")))
        except OSError:  # a zip file, or gone
            names = []
        for name in names:
            try:
                stat = os.stat(path := os.path.join(folder, name, "entry_points.txt"))
            except OSError:
                continue
            yield path, stat.st_size, stat.st_mtime_ns
