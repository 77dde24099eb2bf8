"""The work of `data filter` and `data stats`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict
from datatrove.pipeline.stats import STATS_MERGED_NAME, StatsMerger
from datatrove.utils.stats import MetricStats

from forge_core.contracts.errors import Problem
from forge_plugin_datatrove.accounting import Accounted, Removals
from forge_plugin_datatrove.execution import Phase, Work, document_writer, statistics_of
from forge_plugin_datatrove.reading import DocumentReader, column_problems
from forge_plugin_datatrove.steps import FILTERS, STATISTICS, Step, demand, read_step
from forge_plugin_datatrove.table import REMOVED, Table
from forge_plugin_memmap.prepare.inputs import Input

COUNTED = "counted"
"""Folder of datatrove's statistics, by group and name."""
GROUPS = ("summary", "histogram")
"""Statistics that need no URL of a document."""


def read_steps(table: Table, key: str, types: Mapping[str, str], **more: Any) -> list[Step]:
    """Returns the steps of `[[filter]]` or `[[stats]]`.

    Raises:
        JobError: a step cannot be used; names all of them.
    """
    node, steps, problems = table.node(key), list[Step](), list[Problem]()
    for number, entry in enumerate(node.value):
        step, found = read_step(entry, f"{key}.{number}", types, table.catalog, table.cleaning.download, **more)
        steps += [step] if step else []
        problems += found
    demand(problems)
    return steps


def filter_work(table: Table) -> Work:
    """Returns the work of `data filter`.

    Raises:
        JobError: the table, a step or an input cannot be used.
    """
    steps = read_steps(table, "filter", FILTERS)
    source, folder = table.source_of("filter"), table.folder("filter")
    inputs = source_inputs(table, source)
    accounted = [Accounted(step.build(), removals(folder, "filter", n, step.type)) for n, step in enumerate(steps, 1)]
    pipeline = [reader(table, source, inputs, folder), *accounted, document_writer(table, "filter")]
    # What the table states, so that a default which changes with datatrove is no change of the table
    arguments = common_arguments(table) | {"steps": [described(step) for step in steps]}
    phase = Phase("1-filter", pipeline, table.cleaning.tasks)
    return Work(name="filter", folder=folder, inputs=inputs, arguments=arguments, phases=[phase])


def source_inputs(table: Table, source: str) -> list[Input]:
    """Returns the files of a source; see `Table.documents_of`."""
    inputs = table.documents_of(source)
    demand(column_problems(inputs))
    return inputs


def reader(table: Table, source: str, inputs: Sequence[Input], folder: Path) -> DocumentReader:
    """Returns the first step of a pipeline, which reads a source; `folder` is the stage's."""
    return DocumentReader(inputs, *table.fields_of(source), removals(folder, folder.name, 0, "read"))


def removals(folder: Path, stage: str, number: int, step: str) -> Removals:
    """Returns where a step of a stage records what it removes."""
    # A type of the user's own is a path of Python
    return Removals(str((folder / REMOVED).absolute()), stage, number, step.rpartition(":")[2])


def common_arguments(table: Table) -> dict[str, Any]:
    """What the result of every stage depends on, beside its steps."""
    keys = ("text_field", "id_field", "tasks", "compression")
    return {key: value for key, value in asdict(table.cleaning).items() if key in keys}


def described(step: Step) -> dict[str, Any]:
    """A step as JSON, as the table has it."""
    return {"type": step.type, **{key: plain_option(value) for key, value in step.options.items()}}


def plain_option(value: Any) -> Any:
    """An option as JSON: configurations of datatrove are dataclasses."""
    return json.loads(json.dumps(value, default=vars))


def counts(work: Work) -> dict[str, Any]:
    """Returns the counts of a stage whose last phase reads, removes and writes: the body of `summary.json`."""
    # In the order of the pipeline; names would not tell two steps of one type apart
    read, *steps, written = statistics_of(work, work.phases[-1])
    rows = [
        {"step": step.removals.step, **_step_counts(figures)}
        for step, figures in zip(work.phases[-1].steps[1:-1], steps, strict=True)
        if isinstance(step, Accounted)
    ]
    return {
        **work.begun(),
        "stage": work.name,
        "documents": int(read.get("documents", 0)),
        "characters": int(read.get("characters", 0)),
        "unreadable": _reasons(read),
        "steps": rows,
        "kept": int(written.get("total", 0)),
        "kept_characters": int(written.get("doc_len", 0)),
    }


def _step_counts(figures: Mapping[str, float]) -> dict[str, Any]:
    names = {"documents": "documents", "removed": "removed", "changed": "changed"}
    counted = {name: int(figures.get(key, 0)) for name, key in names.items()}
    return {**counted, "characters_removed": int(figures.get("characters removed", 0)), "reasons": _reasons(figures)}


def _reasons(figures: Mapping[str, float]) -> dict[str, int]:
    reasons = {key.removeprefix("reason: "): int(n) for key, n in figures.items() if key.startswith("reason: ")}
    return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))


# --- statistics ------------------------------------------------------------------------------------------------------


def stats_work(table: Table, source: str) -> Work:
    """Returns the work of `data stats` on a source: the `inputs`, or what a stage has kept.

    Raises:
        JobError: the table, a step or an input cannot be used, or the stage is not finished.
    """
    folder = table.folder("stats") / source
    counted = table.place("stats", source, COUNTED)
    steps = read_steps(table, "stats", STATISTICS, output_folder=counted)
    inputs = source_inputs(table, source)
    built = [step.build(output_folder=counted, **_groups(step)) for step in steps]
    arguments = {**common_arguments(table), "steps": [described(step) for step in steps]}
    phases = [
        Phase("1-stats", [reader(table, source, inputs, folder), *built], table.cleaning.tasks),
        Phase("2-merge", [StatsMerger(counted, counted)], 1),
    ]
    return Work(name="stats", folder=folder, inputs=inputs, arguments=arguments, phases=phases, writes_documents=False)


def _groups(step: Step) -> dict[str, Any]:
    return {} if "groups_to_compute" in step.options else {"groups_to_compute": [*GROUPS]}


def merged_statistics(work: Work) -> dict[str, Any]:
    """Returns the summary of each statistic, as `summary.json` has it: datatrove's figures over all documents."""
    read = statistics_of(work, work.phases[0])[0]
    figures = {}
    # Merged by datatrove over the files of all tasks
    for path in sorted((work.folder / COUNTED / "summary").glob(f"*/{STATS_MERGED_NAME}")):
        stats = MetricStats.from_dict(json.loads(path.read_text())["summary"])
        figures[path.parent.name] = {
            "total": stats.total,
            "mean": stats.mean,
            "std": stats.standard_deviation,
            "min": stats.min,
            "max": stats.max,
        }
    # What could not be read is in no mean
    documents = {"documents": int(read.get("documents", 0)), "unreadable": _reasons(read)}
    return {**work.begun(), "source": work.folder.name, **documents, "statistics": figures}
