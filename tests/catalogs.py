"""What is installed is read once: for `Catalog.installed()` when it has changed, and for the record of each run.

Every command of a test asks for the catalog, and reading six hundred distributions takes longer than most commands.
Forks remember it as well.
"""

from __future__ import annotations

import copy
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from forge_core.checkpoint import run_diff
from forge_core.plugins.catalog import CORE, Catalog, core_version

_scan = Catalog.installed.__func__
_read: dict[tuple[object, ...], Catalog] = {}
_listed: dict[tuple[object, ...], Sequence[str]] = {}
"""Paths of entry points in each folder of `sys.path`, by the folder's path, identity and time of change."""
_PACKAGES = sysconfig.get_path("purelib")
TICK_NS = 1_000_000_000
"""More than the resolution of the times of files."""


def install() -> None:
    """Make `Catalog.installed` and the record of installed versions remember, for the whole process."""
    Catalog.installed = classmethod(_remembered)
    core = Catalog.installed().distribution(CORE)
    core_version()
    if core is not None and core.editable_path is not None:
        _describe_once(core.editable_path)


def _describe_once(root: Path) -> None:
    """Call `git describe`, which takes 25 ms, once for all distributions in the repository at `root`."""
    describe = run_diff._commit
    describe(root)
    run_diff._commit = lambda path: describe(root if path.is_relative_to(root) else path)  # type: ignore[assignment]


def _remembered(cls: type[Catalog]) -> Catalog:
    found = (cls, metadata.distributions, *_files())
    if found not in _read:
        _read.clear()
        _read[found] = _scan(cls)
    catalog = copy.copy(_read[found])  # offers do not change, and sorting them takes as long as finding the files
    catalog._types, catalog.files = {}, {}
    return catalog


def _files() -> Iterator[tuple[object, ...]]:
    """Yields each file of entry points that Python finds, with its size and time.

    Those of installed packages are not looked at one by one: pip adds and removes whole folders, which changes the
    time of the folder above.
    """
    for folder in sys.path:
        if folder == _PACKAGES:
            yield folder, os.stat(folder).st_mtime_ns
            continue
        for path in _paths(folder or "."):
            try:
                stat = os.stat(path)
            except OSError:
                continue
            yield path, stat.st_size, stat.st_mtime_ns


def _paths(folder: str) -> Sequence[str]:
    """Returns the paths at which the distributions in a folder have entry points, if they have any."""
    try:
        stat = os.stat(folder)
    except OSError:  # it does not exist any more
        return ()
    key = (folder, stat.st_dev, stat.st_ino, stat.st_mtime_ns)
    if key not in _listed:
        began = time.time_ns()
        paths = _list_paths(folder)
        if began - stat.st_mtime_ns < TICK_NS:  # an entry that is added within the same tick leaves the time as it is
            return paths
        _listed[key] = paths
    return _listed[key]


def _list_paths(folder: str) -> Sequence[str]:
    try:
        names = os.listdir(folder)
    except OSError:  # a zip file
        names = []
    return [
        os.path.join(folder, name, "entry_points.txt")
        for name in sorted(names)
        if name.endswith((".dist-info", ".egg-info"))
    ]
