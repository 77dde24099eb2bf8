"""Finds outdated and incomplete installs: sources that changed since, and remains of other installs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from forge_core.plugins.catalog import PREFIX, Catalog, Distribution, declared_entry_points, has_metadata


def stale_entries(distributions: Iterable[Distribution], catalog: Catalog) -> Iterator[str]:
    """Yield the entry points that an editable install lacks, a line a kind, with the command that refreshes it."""
    for distribution in distributions:
        known = {(o.kind, o.type) for o in catalog.offers() if o.distribution == distribution}
        for group, entries in declared_entry_points(distribution).items():
            kind = group.removeprefix(PREFIX)
            gained = [type_ for type_ in entries if group.startswith(PREFIX) and (kind, type_) not in known]
            if gained:
                command = f"pip install --no-deps -e {distribution.editable_path}"
                yield f"{distribution}: {kind} {', '.join(gained)} came after it was installed; refresh with: {command}"


def left_overs() -> Iterator[str]:
    """Yield the installs that the catalog ignores.

    These are folders left by an interrupted uninstall, and copies of a distribution that an earlier one on the path
    hides.
    """
    known: dict[str, tuple[str, Path]] = {}
    for dist in metadata.distributions():
        entries = [entry for entry in dist.entry_points if entry.group.startswith(PREFIX)]
        place = Path(str(dist.locate_file(""))).resolve()
        if not entries:
            continue
        if not has_metadata(dist):
            names = ", ".join(f"{entry.group.removeprefix(PREFIX)} {entry.name}" for entry in entries)
            yield f"an uninstall in {place} was interrupted, and {names} is left; delete its .dist-info folder"
            continue
        version, first = known.setdefault(dist.metadata["Name"], (dist.version, place))
        if first != place:
            hidden = f"{dist.metadata['Name']} {dist.version} in {place} is hidden by {version} in {first}"
            yield f"{hidden}; uninstall one of them"
