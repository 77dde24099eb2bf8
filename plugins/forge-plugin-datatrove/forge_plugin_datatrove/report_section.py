"""The section `contamination` of `forge-run report`: texts of tasks that were found in a run's documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

from forge_kit.tools.report_sections import Block, Cell, Paragraph, ReportRun, ReportSection, Table

OVERLAP = "overlap.json"
STAGE = "decontaminate"


@frozen(kw_only=True)
class Contamination(ReportSection):
    """The overlap of a run's documents with tasks, from `overlap.json` of `forge-run data decontaminate`."""

    title: ClassVar[str] = "Contamination"
    place: ClassVar[float] = 45.0

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        """Yields a table for each run with decontaminated sources; nothing if there is none."""
        for run in runs:
            rows: list[list[Cell]] = []
            covered: set[str] = set()
            for folder, overlap in _overlaps(run):
                covered |= overlap["tasks"].keys()
                rows += [[str(folder), task, *_figures(figures)] for task, figures in overlap["tasks"].items()]
            if not rows:
                continue
            head = ["documents", "task", "items", "too short to find", "documents removed", "n-grams found"]
            yield Table(title=run.name, head=head, rows=rows)
            if missing := sorted(_evaluated(run.job) - covered):
                yield Paragraph(text=f"{run.name} evaluates {', '.join(missing)}, which no source was searched for.")


def _figures(figures: Mapping[str, Any]) -> list[Cell]:
    return [figures[name] for name in ("items", "short_items", "documents", "n_grams_found")]


def _overlaps(run: ReportRun) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yields the folder and the overlap of each decontamination that the sources of a run come from."""
    # Several sources may come from one folder
    folders: dict[Path, None] = {}
    for source in run.job.get("data", {}).get("sources", []):
        for path in _files(Path(str(source.get("path", "")))):
            # `clean/decontaminate/documents`, or a file in it
            folders |= dict.fromkeys(folder for folder in (path, *path.parents) if folder.name == STAGE)
    for folder in folders:
        try:
            yield folder, json.loads((folder / OVERLAP).read_text())
        except (OSError, ValueError):
            # The documents may have been removed once their tokens were written
            continue


def _files(path: Path) -> Iterator[Path]:
    """Yields a source's path, and the inputs of `data prepare` where it is a folder of tokens."""
    yield path
    try:
        inputs = json.loads((path / "inputs.json").read_text())
    except (OSError, ValueError):
        return
    yield from (Path(each["name"]) for each in inputs)


def _evaluated(job: Mapping[str, Any]) -> set[str]:
    """Returns the labels of the tasks that a job evaluates, by its tables alone."""
    labels = set()
    for table in job.get("evaluations", {}).values():
        for task in table.get("tasks", []):
            file = Path(task["path"]).name.split(".")[0] if "path" in task else ""
            labels.add(task.get("name") or file or str(task["type"]).rpartition("/")[2])
    return labels
