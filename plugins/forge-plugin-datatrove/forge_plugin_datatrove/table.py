"""The TOML file: inputs, output, and a table for each command.

    inputs = ["web/*.jsonl"]
    output = "clean"

    [[filter]]
    type = "gopher_quality"
    min_doc_words = 20

    [dedup]
    type = "minhash"

Each command reads what the one before has kept, in the order of `STAGES`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import ge, min_len

from forge_core.config.structure import structure
from forge_core.config.tree import Node, read_job
from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import JobError, Problem
from forge_core.plugins.catalog import Catalog, install_line
from forge_plugin_memmap.prepare.inputs import Input, find_inputs

Stage = Literal["filter", "dedup", "decontaminate"]
STAGES: tuple[Stage, ...] = ("filter", "dedup", "decontaminate")
"""Commands that write documents, in the order in which each takes what the one before has kept."""
DOCUMENTS = "documents"
"""Folder of the documents that a stage has kept. It has this name once all of them are there."""
REMOVED = "removed"
"""Folder of a stage's records of removed documents."""
INPUTS = "inputs"
"""The source that no stage has written."""
TEXT, ID = "text", "id"
"""Keys in documents that a stage has written."""
SUMMARY = "summary.json"
"""Counts and arguments of a finished stage, written last."""


@attrs.frozen(kw_only=True)
class Cleaning:
    """A table, as its file has it; the steps are read by the command that runs them."""

    inputs: Sequence[str] = attrs.field(validator=min_len(1))
    """Files, folders and globs, in order: what `forge-run data prepare` reads."""
    output: FilePath = attrs.field(validator=min_len(1))
    """Folder of all that the commands write: `filter`, `dedup`, `decontaminate` and `stats` in it."""
    text_field: str = "text"
    """The key of a line, or the column, that holds the text."""
    id_field: str = "id"
    """The key or column that holds the id. A document without one gets its place as its id: file and byte, or row."""
    tasks: int = attrs.field(default=16, validator=ge(1))
    """Parts that the documents are divided into; each writes a file."""
    workers: int = attrs.field(default=0, validator=ge(0))
    """Tasks at the same time; 0: one for each core."""
    compression: Literal["none", "gzip", "zstd"] = "none"
    """Of the documents that are written."""
    download: bool = False
    """Whether steps may fetch models and lists of words from the internet."""
    memory_gb: float = attrs.field(default=0.0, validator=ge(0))
    """GB that deduplication may use; 0: what this machine, or its control group, has available."""
    filter: Sequence[Mapping[str, Any]] = ()
    """`[[filter]]`: steps of `forge-run data filter`, in order."""
    dedup: Mapping[str, Any] = attrs.field(factory=dict)
    """`[dedup]`: the method of `forge-run data dedup`, and its options."""
    decontaminate: Mapping[str, Any] = attrs.field(factory=dict)
    """`[decontaminate]`: the tasks that `forge-run data decontaminate` looks for."""
    stats: Sequence[Mapping[str, Any]] = ()
    """`[[stats]]`: what `forge-run data stats` counts."""
    slurm: Mapping[str, Any] = attrs.field(factory=dict)
    """`[slurm]`: options of datatrove's SLURM executor, which the tasks are queued by."""


@attrs.frozen
class Table:
    """A table that was read, with its nodes, which messages take their lines from."""

    path: Path
    root: Node
    cleaning: Cleaning
    catalog: Catalog

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read a file.

        Raises:
            JobError: it cannot be read, or has keys that there are not; lists every problem.
        """
        root, problems = read_job([path])
        catalog = Catalog.installed()
        cleaning, findings = structure(root, Cleaning, catalog)
        if problems := [*problems, *findings.problems]:
            raise JobError([*problems, *install_line(findings.missing)])
        return cls(path, root, cleaning, catalog)

    @property
    def output(self) -> Path:
        """Folder of all commands."""
        return Path(self.cleaning.output).expanduser()

    def folder(self, name: str) -> Path:
        """Folder of one command."""
        return self.output / name

    def place(self, name: str, *below: str) -> str:
        """A path in the folder of a command, as datatrove takes it.

        It is absolute: fsspec keeps a folder by its name, and would take it for the same after a change of directory.
        """
        return str(self.folder(name).joinpath(*below).absolute())

    def workers(self) -> int:
        """Processes at the same time."""
        # `sched_getaffinity` does not exist on macOS
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.cleaning.workers or cores

    def node(self, key: str) -> Node:
        """The node of a table of this file.

        Raises:
            JobError: the file does not have it.
        """
        node = self.root.child(key)
        if node is None or not node.value:
            header = f"[[{key}]]" if key in ("filter", "stats") else f"[{key}]"
            raise JobError([Problem(key, f"there is no table {header}; add one with a type", str(self.root.origin))])
        return node

    def stages(self) -> list[Stage]:
        """The stages that the file has."""
        return [stage for stage in STAGES if getattr(self.cleaning, stage)]

    def source_of(self, stage: Stage) -> str:
        """Returns what a stage reads: the stage before it in this file, or `inputs`."""
        # By the order of stages and not of the file, in which tables may stand in any order
        before = [each for each in self.stages() if STAGES.index(each) < STAGES.index(stage)]
        return before[-1] if before else INPUTS

    def documents_of(self, source: str) -> list[Input]:
        """Returns the files of a source: what a stage has kept, or the inputs.

        Raises:
            JobError: the stage is not finished, or an input cannot be used.
        """
        if source == INPUTS:
            return find_inputs(self.cleaning.inputs, self.cleaning.text_field, self.output)
        folder = self.folder(source)
        if not (folder / SUMMARY).is_file():
            raise JobError(f"{folder} is not finished; run forge-run data {source} {self.path} first")
        return find_inputs([str(folder / DOCUMENTS)], TEXT, folder / REMOVED)

    def fields_of(self, source: str) -> tuple[str, str]:
        """Returns the keys of text and id in a source."""
        return (self.cleaning.text_field, self.cleaning.id_field) if source == INPUTS else (TEXT, ID)
