"""Editable installs whose sources have gained entry points since they were installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from forge_core.plugins.catalog import PREFIX, Catalog, Distribution, declared_entry_points


def stale_entries(distributions: Iterable[Distribution], catalog: Catalog) -> Iterator[str]:
    """What is missing of each distribution, a line a kind, with the command that refreshes it."""
    for distribution in distributions:
        source = distribution.editable_path
        if source is None or not (source / "pyproject.toml").is_file():
            continue
        known = {(o.kind, o.type) for o in catalog.all_offers() if o.distribution == distribution}
        for group, entries in declared_entry_points(source / "pyproject.toml").items():
            kind = group.removeprefix(PREFIX)
            gained = [type_ for type_ in entries if group.startswith(PREFIX) and (kind, type_) not in known]
            if gained:
                fix = f"pip install --no-deps -e {source}"
                yield f"{distribution}: {kind} {', '.join(gained)} came after it was installed; refresh with: {fix}"
