"""The work of `data decontaminate`: documents with n-grams of the tasks that a job evaluates, by datatrove's steps."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import orjson
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter, NGramsDecontIndexer
from datatrove.utils.typeshelper import Languages

from forge_core.config.load import load_job
from forge_core.config.structure import structure
from forge_core.config.tree import Node
from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import DataError, JobError, Problem
from forge_core.plugins.catalog import install_line
from forge_plugin_datatrove.accounting import Accounted
from forge_plugin_datatrove.execution import WORK, Phase, Work, document_writer
from forge_plugin_datatrove.filtering import common_arguments, counts, plain_option, reader, removals, source_inputs
from forge_plugin_datatrove.hashes import demand_hashes
from forge_plugin_datatrove.options import placed, read_options
from forge_plugin_datatrove.steps import demand
from forge_plugin_datatrove.table import Table
from forge_plugin_evaluate.tasks import Tasks
from forge_plugin_evaluate.tasks.kinds import Item, TaskComponent

INDEX = "index"
OVERLAP = "overlap.json"
"""What was found of each task; the report of a run that trains on the documents shows it."""
TASK, NGRAM = "contaminated_task", "contaminated_ngram"
"""Keys in which datatrove's filter leaves what it found."""


@attrs.frozen(kw_only=True)
class Against:
    """Keys of `[decontaminate]` that name the tasks."""

    job: FilePath = ""
    """A job, relative to this file, whose evaluations have tasks."""
    tasks: Sequence[TaskComponent] = ()
    """`[[decontaminate.tasks]]`: further tasks, such as files of benchmarks that are evaluated later."""


@attrs.define
class Words:
    """Options of both steps."""

    language: str = Languages.english


class TaskReader(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Yields the items of tasks as datatrove's indexer takes them: the right answer, with the question as metadata."""

    type = "reader"
    name = "tasks"

    def __init__(self, items: Mapping[str, Sequence[Item]]) -> None:
        super().__init__()
        self.items = items

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yields one document for each item."""
        del data, rank, world_size
        for task, items in self.items.items():
            for number, item in enumerate(items):
                metadata = {"query": item.context, "task": task}
                yield Document(item.choices[item.answer], f"{task}/{number}", metadata=metadata)


class TaskIndexer(NGramsDecontIndexer):  # type: ignore[misc]  # datatrove has no types
    """datatrove's indexer, for documents alone.

    Its own `run` imports lighteval even where no task of lighteval is named, and its constructor refuses to be called
    without it. N-grams and hashes are its own; only the loop over documents and the file are here.
    """

    def __new__(cls, *arguments: Any, **more: Any) -> TaskIndexer:
        """Makes it without the check for lighteval."""
        return object.__new__(cls)

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Writes the hashes of each task, as `NGramsDecontFilter` reads them, and counts them."""
        hashes: dict[str, set[int]] = defaultdict(set)
        for document in data:
            task = document.metadata["task"]
            own = self.compute_hashes(document.text, document.metadata["query"])
            hashes[task].update(own)
            self.stat_update(f"items: {task}")
            # An item with fewer words than an n-gram has cannot be found
            if not own:
                self.stat_update(f"short: {task}")
        for task, own in hashes.items():
            # Sorted, so that the file does not depend on the order of a set
            array = np.array(sorted(own), dtype=self.config.hash_config.np_descr)
            with self.output_folder.open(f"{task}.index.hashes", mode="wb") as file:
                file.write(array.tobytes())
            self.stat_update(f"n-grams: {task}", value=len(own))


def decontaminate_work(table: Table) -> Work:
    """Returns the work of `data decontaminate`.

    Raises:
        JobError: the table, the job, a task or an input cannot be used.
    """
    node = table.node("decontaminate")
    demand_hashes()
    # One table for both: which tasks, and datatrove's options
    names = {field.name for field in attrs.fields(Against)}
    against, findings = structure(_part(node, names, inside=True), Against, table.catalog)
    [config_options, words], problems = read_options(
        _part(node, names, inside=False), [NGramsDecontConfig, Words], (), table.catalog
    )
    demand([*placed([*findings.problems, *problems], "decontaminate"), *install_line(findings.missing)])
    items = task_items(against, table, str(node.origin))
    source, folder = table.source_of("decontaminate"), table.folder("decontaminate")
    inputs = source_inputs(table, source)
    config, index = NGramsDecontConfig(**config_options), table.place("decontaminate", WORK, INDEX)
    remove = NGramsDecontFilter(index, config=config, **words)
    accounted = Accounted(remove, removals(folder, "decontaminate", 1, "n_grams"), [TASK, NGRAM])
    arguments = {
        **common_arguments(table),
        # By their items: a file of the same name may have changed
        "tasks_of": {task: _digest(own) for task, own in items.items()},
        **{key: plain_option(value) for key, value in {**config_options, **words}.items()},
    }
    phases = [
        Phase("1-index", [TaskReader(items), TaskIndexer(index, config=config, **words)], 1),
        Phase(
            "2-filter",
            [reader(table, source, inputs, folder), accounted, document_writer(table, "decontaminate")],
            table.cleaning.tasks,
        ),
    ]
    return Work(name="decontaminate", folder=folder, inputs=inputs, arguments=arguments, phases=phases)


def _part(node: Node, names: set[str], inside: bool) -> Node:
    """The keys of a table that are among the names, or the others."""
    return Node({key: child for key, child in node.value.items() if (key in names) == inside}, node.origin)


def _digest(items: Sequence[Item]) -> str:
    from forge_kit.data.cache import digest_of

    return digest_of([attrs.asdict(item) for item in items])


def task_items(against: Against, table: Table, origin: str) -> dict[str, Sequence[Item]]:
    """Returns the items of each task by its label: of the job's evaluations, and of the table.

    Raises:
        JobError: there is no task, two have one label, or items cannot be read.
    """
    tasks = list(against.tasks)
    if against.job:
        job = load_job(table.path.parent / Path(against.job).expanduser(), catalog=table.catalog, world_size=1)
        tasks += [
            task
            for evaluation in job.evaluations.values()
            if isinstance(evaluation, Tasks)
            for task in evaluation.tasks
        ]
    if not tasks:
        lacks = "there is no job"
        if against.job:
            lacks = f"{against.job} evaluates no tasks ([evaluations.NAME] of type tasks)"
        message = f"{lacks}, and there is no [[decontaminate.tasks]]; add one of them"
        raise JobError([Problem("decontaminate", message, origin)])
    items: dict[str, Sequence[Item]] = {}
    for task in tasks:
        if task.label in items and task not in tasks[: tasks.index(task)]:
            message = f"two tasks are called {task.label!r}; give one another name"
            raise JobError([Problem("decontaminate.tasks", message, origin)])
        try:
            items[task.label] = task.load()
        except DataError as error:
            raise JobError([Problem("decontaminate", str(error), origin)]) from error
    return items


def decontamination_counts(work: Work) -> dict[str, Any]:
    """Returns the body of a finished decontamination's summary, and writes the overlap next to it."""
    summary = counts(work)
    summary["tasks"] = _overlap(work)
    overlap = {"format": summary["format"], "documents": summary["documents"], "tasks": summary["tasks"]}
    (work.folder / OVERLAP).write_text(json.dumps(overlap, indent=1))
    return summary


def _overlap(work: Work) -> dict[str, dict[str, int]]:
    """Returns for each task its items and n-grams, and the documents and different n-grams that were found."""
    from forge_plugin_datatrove.execution import statistics_of

    indexed = statistics_of(work, work.phases[0])[-1]
    documents, ngrams = Counter[str](), defaultdict[str, set[str]](set)
    for path in (work.folder / "removed").glob("*-1-n_grams.jsonl"):
        with path.open("rb") as file:
            for line in file:
                record = orjson.loads(line)
                documents[record[TASK]] += 1
                ngrams[record[TASK]].add(record[NGRAM])
    tasks = [key.removeprefix("items: ") for key in indexed if key.startswith("items: ")]
    return {
        task: {
            "items": int(indexed[f"items: {task}"]),
            "short_items": int(indexed.get(f"short: {task}", 0)),
            "n_grams": int(indexed.get(f"n-grams: {task}", 0)),
            "documents": documents[task],
            "n_grams_found": len(ngrams[task]),
        }
        for task in tasks
    }
