"""A stage: its phases by datatrove's executors, its folder, and when it is finished.

    filter/begun.json          arguments and inputs, written first
    filter/work/1-filter/      datatrove's logs, statistics and marks of tasks that are complete
    filter/removed/            records of removed documents, by task and step
    filter/documents.part/     kept documents, while tasks write them
    filter/documents/          the same, once all tasks are complete
    filter/summary.json        counts, written last

Tasks that are complete are not run again. A task that is not begins again, and replaces its files.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from attrs import field, frozen
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.logging import setup_default_logger
from datatrove.utils.stats import MetricStats, PipelineStats

from forge_core.contracts.errors import ForgeError, JobError
from forge_core.files import write_atomically
from forge_kit.data.cache import digest_of
from forge_kit.tools.outputs import free_folder
from forge_plugin_datatrove.table import DOCUMENTS, SUMMARY, Table
from forge_plugin_memmap.prepare.inputs import Input

BEGUN = "begun.json"
WORK = "work"
PARTIAL = DOCUMENTS + ".part"
LOCK = "lock"
"""File of a stage that the command holds while it runs."""
FORMAT = 1
"""Of `summary.json` and the records of removed documents."""


@frozen
class Phase:
    """Work that all tasks must have finished before the next phase begins."""

    name: str
    steps: Sequence[PipelineStep]
    tasks: int
    workers: int = 0
    """Tasks at the same time at most; 0: as many as there may be."""


@frozen(kw_only=True)
class Work:
    """What a command does, and everything that its result depends on."""

    name: str
    """Of the command and of its folder."""
    folder: Path
    inputs: Sequence[Input]
    arguments: Mapping[str, Any]
    phases: Sequence[Phase] = field(factory=tuple)
    writes_documents: bool = True

    def begun(self) -> dict[str, Any]:
        """Arguments and the identity of all inputs, as JSON."""
        identities = digest_of([input_.identity() for input_ in self.inputs])
        return {"format": FORMAT, "arguments": dict(self.arguments), "inputs": identities}


def document_writer(table: Table, stage: str) -> JsonlWriter:
    """Returns the step that writes a stage's documents: JSON lines with `text`, `id` and all other keys of each."""
    compression = table.cleaning.compression
    suffix = {"none": "", "gzip": ".gz", "zstd": ".zst"}[compression]
    # Keys of a document beside its text, not within `metadata`, as they were in the input
    return JsonlWriter(
        table.place(stage, PARTIAL),
        output_filename=f"${{rank}}.jsonl{suffix}",
        compression=None if compression == "none" else compression,
        expand_metadata=True,
    )


def finished(work: Work) -> Mapping[str, Any] | None:
    """Returns the summary of a stage that was finished with the same arguments; None if it is to be done.

    Raises:
        JobError: its folder was begun or finished with other arguments or inputs, or is another's.
    """
    # Before the table may be read: nothing of a user's is taken for ours
    free_folder(work.folder, "output", [BEGUN, SUMMARY, LOCK])
    # As JSON has it: tuples of the table would differ from the lists of the file
    begun = _read(work.folder / BEGUN)
    if begun is not None and begun != json.loads(json.dumps(work.begun())):
        changed = [key for key in ("arguments", "inputs", "format") if begun.get(key) != work.begun()[key]]
        raise JobError(
            f"{work.folder} was begun with other {' and '.join(changed)}; remove it to do this again, or name another "
            "output"
        )
    return _read(work.folder / SUMMARY)


def run_locally(work: Work, table: Table) -> None:
    """Run all phases on this machine. Tasks that are complete are not run again.

    Raises:
        ForgeError: another process is at work in the folder, or a task failed; names its log.
        JobError: an input changed.
    """
    with owned(work.folder):
        write_atomically(work.folder / BEGUN, json.dumps(work.begun(), indent=1))
        for phase in work.phases:
            logs = (work.folder / WORK / phase.name).absolute()
            # Processes without a task would only import
            workers = min(phase.workers or table.workers(), phase.tasks)
            executor = QuietExecutor(list(phase.steps), tasks=phase.tasks, workers=workers, logging_dir=str(logs))
            try:
                executor.run()
            # Refusals of a step are complete sentences, and no fault of a task
            except ForgeError:
                raise
            except Exception as error:
                failed = sorted({*range(phase.tasks)} - {int(name) for name in _completions(logs)})
                log = logs / "logs" / f"task_{failed[0]:05}.log" if failed else logs
                raise ForgeError(
                    f"data {work.name}, {phase.name}: {type(error).__name__}: {error}; see {log}; the same command "
                    "continues"
                ) from error


def complete(work: Work, summary: Mapping[str, Any]) -> None:
    """Give the documents their name, and write the summary: from here on, the stage is finished.

    Raises:
        JobError: an input changed since it was read.
    """
    # Before the rename: the documents would be of no single state of the inputs
    for input_ in work.inputs:
        input_.demand_unchanged()
    if work.writes_documents:
        partial, documents = work.folder / PARTIAL, work.folder / DOCUMENTS
        # A process may have been killed between the rename and the summary
        if not documents.is_dir():
            # Writers make it with the first document, and there may be none
            partial.mkdir(exist_ok=True)
            partial.rename(documents)
    write_atomically(work.folder / SUMMARY, json.dumps(summary, indent=1))


def incomplete_tasks(work: Work) -> dict[str, int]:
    """Returns how many tasks of each phase are not complete; phases that are complete are left out."""
    counts = {phase.name: phase.tasks - len(_completions(work.folder / WORK / phase.name)) for phase in work.phases}
    return {name: count for name, count in counts.items() if count}


def statistics_of(work: Work, phase: Phase) -> list[dict[str, float]]:
    """Returns the counts of each step of a phase, summed over all tasks, in the order of the pipeline."""
    # Of files, and not of this process: tasks may have been complete before it started
    total = PipelineStats()
    for path in sorted((work.folder / WORK / phase.name / "stats").glob("*.json")):
        total = total + PipelineStats.from_json(json.loads(path.read_text()))
    return [{key: _total(value) for key, value in stats.stats.items()} for stats in total.stats]


def _total(value: Any) -> float:
    # datatrove leaves plain numbers where all values were equal
    stats = value if isinstance(value, MetricStats) else MetricStats.from_dict(value)
    return float(stats.total)


def _completions(logs: Path) -> list[str]:
    return [path.name for path in (logs / "completions").glob("*")]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
        return value
    except FileNotFoundError:
        return None


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Lock the folder while this context lasts. The kernel unlocks it when the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"output {folder}: {error.strerror}; name a folder that can be written") from error
    with _locked(folder / LOCK) as is_mine:
        if not is_mine:
            raise ForgeError(f"another forge-run data {folder.name} is at work in {folder}; wait for it")
        yield


@contextmanager
def _locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Lock a file, which is made if need be; yields whether this process has the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # A lock of the process, and not of the open file, as `flock` is: datatrove forks a manager, which outlives a
        # command that is killed, and would hold the lock for ever
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


class QuietExecutor(LocalPipelineExecutor):  # type: ignore[misc]  # datatrove has no types
    """datatrove's local executor, with its logs in files alone, and one process for each task.

    When a command is killed, processes of its pool may still be at work. A task that is started again waits for them,
    so that no two processes write the same files (datatrove#301: signatures that are cut off), and does not do again
    what they have completed.
    """

    def run(self) -> Any:
        """Run all tasks that are not complete."""
        with silence():
            return super().run()

    def _launch_run_for_rank(self, *arguments: Any, **more: Any) -> PipelineStats:
        # In the processes of the pool, each of which has another standard error
        with silence():
            return super()._launch_run_for_rank(*arguments, **more)

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        # A file for each task, as its process may live longer than the command
        path = Path(self.logging_dir.path) / "locks" / f"{rank:05}"
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the process of the task: the lock of the folder is the command's, and gone with it
        with _locked(path, wait=True):
            return super()._run_for_rank(rank, local_rank, node_rank)


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def silence() -> Iterator[None]:
    """While it is open, loguru and tqdm print nothing. datatrove adds standard error again at each task."""
    with redirect_stderr(_Nowhere()):
        # Takes standard error as it is now
        setup_default_logger()
        yield
    setup_default_logger()
