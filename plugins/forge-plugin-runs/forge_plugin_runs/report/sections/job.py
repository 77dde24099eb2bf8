"""The section `job`: keys in which the jobs of the runs differ, or a single one from its defaults."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_core.plugins.catalog import Catalog
from forge_kit.tools.report_sections import Block, Cell, Paragraph, ReportRun, ReportSection, Table
from forge_plugin_runs.show import changed_keys

OWN = ("job.name", "job.output")
"""Keys in which all runs differ."""
LONGEST = 200
"""Characters of a value."""


@frozen(kw_only=True)
class JobSection(ReportSection):
    """Keys of the job: where the runs differ; of one run, where it differs from the defaults. Versions, likewise."""

    title: ClassVar[str] = "Job"
    place: ClassVar[float] = 20.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """A table of keys and one of versions, and below them all versions of each run, folded."""
        if len(runs) == 1:
            yield from _of_one(runs[0])
        else:
            yield from _differing("Keys that differ", runs, [dict(flat(run.job)) for run in runs])
            yield from _differing("Versions that differ", runs, [dict(_versions(run)) for run in runs])
        for run in runs:
            versions = dict(_versions(run))
            if versions:
                rows: list[list[Cell]] = [[name, version] for name, version in versions.items()]
                yield Table(title=f"Versions of {run.name}", head=["distribution", "version"], rows=rows, folded=True)


def _of_one(run: ReportRun) -> Iterator[Block]:
    # A single run has none to compare with, so its defaults are left out
    keys = changed_keys(run.folder, Catalog.installed())
    components = run.provenance().get("components", {})
    rows: list[list[Cell]] = [[f"{path}.type", type_] for path, type_ in components.items()]
    rows += [[path, text_of(value)] for path, value in keys.items()]
    if rows:
        yield Table(
            title="Keys that differ from the defaults, and types", head=["key", run], rows=sorted(rows, key=str)
        )


def _differing(title: str, runs: Sequence[ReportRun], tables: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    names = dict.fromkeys(name for table in tables for name in table if name not in OWN)
    # A component that some runs lack is one row, of its type: its other keys differ from nothing
    alone = [name for name in names if name.endswith(".type") and any(name not in table for table in tables)]
    inner = {name for name in names for type_ in alone if name != type_ and name.startswith(type_.removesuffix("type"))}
    rows: list[list[Cell]] = []
    for name in names:
        values = [table.get(name) for table in tables]
        if name not in inner and any(value != values[0] for value in values[1:]):
            rows.append([name, *(None if value is None else text_of(value) for value in values)])
    if rows:
        yield Table(title=title, head=["key", *runs], rows=rows)
    elif any(tables):
        yield Paragraph(text=f"{title}: none.")


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the keys of a job by path. Tables of an array are called by their names, else by their numbers."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from flat(item, f"{path}.{item.get('name') or number}")
    else:
        yield path, value


def text_of(value: Any) -> str:
    """Returns a value much as the job file has it, without quotes around a text, and cut if it is long."""
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _versions(run: ReportRun) -> Iterator[tuple[str, str]]:
    provenance = run.provenance()
    for name, about in provenance.get("distributions", {}).items():
        commit = about.get("commit")
        yield name, about["version"] + (f" at {commit}" if commit else "")
    for name, digest in provenance.get("files", {}).items():
        # The beginning of a digest is enough to distinguish versions of a file
        yield name, str(digest)[:16]
    yield from ((name, provenance[name]) for name in ("torch", "python") if name in provenance)
