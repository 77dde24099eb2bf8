"""Runs and sections of a report: reads the runs and builds every installed section from them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core.contracts.errors import ForgeError, JobError, closest
from forge_core.plugins.catalog import Catalog, Offer
from forge_kit.tools.report_sections import Block, Paragraph, ReportRun, ReportSection
from forge_plugin_runs.facts import demand_run

KIND = ReportSection.kind


@frozen(kw_only=True)
class Section:
    """A section of a report with its blocks."""

    name: str
    """Its type, and the anchor in the page."""
    title: str
    blocks: Sequence[Block]


def runs_of(folders: Sequence[Path]) -> list[ReportRun]:
    """Returns the runs in folders. Runs of one name are distinguished by the folders above them.

    Raises:
        JobError: a folder is no run's, or is named twice.
    """
    folders = [demand_run(folder) for folder in folders]
    twice = [folder for folder, count in Counter(folder.resolve() for folder in folders).items() if count > 1]
    if twice:
        raise JobError(f"{twice[0]} is named twice; a report compares different runs")
    parts = 1
    # This ends: whole paths differ, as no folder is named twice
    while len({_name(folder, parts) for folder in folders}) < len(folders):
        parts += 1
    return [ReportRun(number=number, name=_name(folder, parts), folder=folder) for number, folder in enumerate(folders)]


def _name(folder: Path, parts: int) -> str:
    return "/".join(folder.resolve().parts[-parts:])


def sections_of(
    runs: Sequence[ReportRun],
    catalog: Catalog,
    *,
    chosen: Sequence[str] = (),
    make: Callable[[type[ReportSection]], ReportSection] = lambda cls: cls(),
) -> list[Section]:
    """Returns the sections that have something to show, in the order of their places.

    A section that fails is in the report with its reason, and in a warning: the others are of use without it.

    Args:
        runs: the runs.
        catalog: where sections are looked up.
        chosen: types of sections; empty: all that are installed.
        make: makes a section of its class.

    Raises:
        JobError: a chosen section is not installed.
    """
    offers = catalog.offers(KIND)
    names = {offer.type for offer in offers}
    for name in chosen:
        if name not in names:
            near = closest(name, names)
            hint = f"; did you mean {near!r}?" if near else ""
            raise JobError(f"--sections: there is no section {name!r}{hint}; there are {', '.join(sorted(names))}")
    found = [_section(offer, runs, catalog, make) for offer in offers if not chosen or offer.type in chosen]
    # Sorted by place alone: sections of the same place stay in the catalog's order
    return [section for _, section in sorted(found, key=lambda pair: pair[0]) if section.blocks]


def _section(
    offer: Offer, runs: Sequence[ReportRun], catalog: Catalog, make: Callable[[type[ReportSection]], ReportSection]
) -> tuple[float, Section]:
    # Title and place for a section whose class cannot even be loaded
    title, place = offer.type.replace("_", " ").capitalize(), ReportSection.place
    try:
        cls: Any = catalog.load(KIND, offer.qualified, ReportSection)
        title, place = cls.title, cls.place
        blocks = list(make(cls).blocks(runs))
        if others := [block for block in blocks if not isinstance(block, Block)]:
            raise TypeError(
                f"it made a {type(others[0]).__name__}; blocks must come from forge_kit.tools.report_sections"
            )
    # Sections are code of any plugin: one that fails must not cost the others
    except Exception as error:
        cause = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
        message = f"section {offer.type} of {offer.distribution} could not be made: {cause}"
        warnings.warn(message, stacklevel=2)
        blocks = [Paragraph(text=message)]
    return place, Section(name=offer.type, title=title, blocks=blocks)
