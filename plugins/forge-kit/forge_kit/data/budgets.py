"""How many documents of a source need more room than a sequence has: `forge-run check --data`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attrs import evolve, field, frozen

from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.data_files import ListsFiles, left_out_note

if TYPE_CHECKING:
    from forge_core.contracts.components import DatasetComponent
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Documents
    from forge_core.job import Job
    from forge_core.plugins.catalog import Catalog
    from forge_kit.data.label_counts import LabelCounts


@frozen(kw_only=True)
class Budget:
    """One kind of room of a sequence, and what the documents of a source need of it."""

    name: str
    """The counted unit: `positions`, `patches`, …"""
    key: str
    """The job's key that sets the room: `train.seq_len`."""
    room: int
    """Of a sequence."""
    largest: int
    """The largest need of any document."""
    over: int
    """Documents that need more than `room`."""


@frozen(kw_only=True)
class Budgets:
    """Documents of a source beside the room of a sequence."""

    documents: int
    """Documents that were measured, held-out ones included."""
    over: int
    """Documents that need more of anything than a sequence has."""
    budgets: Sequence[Budget]
    outcome: str
    """What training does with those: `they are left out (too_long = "skip")`."""
    first: str = ""
    """Where the first of those is; empty: unknown, or there is none."""
    is_refused: bool = False
    """Whether training refuses to start with those."""
    left_out: Mapping[str, int] = field(factory=dict)
    """What the source's folders hold and is no data of it, with how often (`forge_kit.data.data_files`)."""
    labels: LabelCounts | None = None
    """Of the documents to train on, where only a part of their tokens is learned; None: all are, or it is unknown."""
    rows: str = ""
    """What became of the rows of the source, as its documents describe it; may be empty."""


@runtime_checkable
class Verifiable(Protocol):
    """Documents that can be compared with sums that were written with them."""

    def verify(self) -> None:
        """Read all of them.

        Raises:
            DataError: they are damaged.
        """


@runtime_checkable
class HasBudgets(Protocol):
    """A dataset component whose documents take more than positions, or must not be longer than a sequence."""

    def budgets(self, context: BuildContext) -> Budgets | None:
        """Measure all documents, or take their measurements from the cache; None: unknown until they are read.

        Args:
            context: as for `build`, with the tokenizer.

        Raises:
            JobError: they cannot be read, or do not match the job.
        """


def measured_sources(job: Job, catalog: Catalog) -> Iterator[tuple[str, Budgets | None]]:
    """Yields the name of each source and its budgets; None: it is a stream, or has sequences of the right length.

    Tokenised texts and measured images are kept in the cache, where training finds them.

    Raises:
        JobError: a source cannot be read.
    """
    for number, (name, source, context) in enumerate(sources_to_read(job, catalog)):
        try:
            budgets = source.budgets(context) if isinstance(source, HasBudgets) else _of_text(source, context)
            left_out = source.left_out() if isinstance(source, ListsFiles) else {}
            yield name, budgets and evolve(budgets, left_out=left_out)
        except JobError as error:
            # Problems of a source are relative to its table
            raise JobError(problem.below(f"data.sources.{number}") for problem in error.problems) from error


def sources_to_read(job: Job, catalog: Catalog) -> Iterator[tuple[str, DatasetComponent, BuildContext]]:
    """Yields the name of each source of a job, the source, and the context that it is built in."""
    import torch

    from forge_core.checkpoint.run_folder import run_folder
    from forge_core.config.mixture import source_names
    from forge_core.contracts.layout import Layout
    from forge_core.engine.build import build_tokenizer
    from forge_core.parallel.initialise import bare_context

    job = evolve(job, parallel={})  # no stage takes part in reading data
    context: BuildContext = evolve(bare_context(job, Layout(), catalog, torch.device("cpu")), folder=run_folder(job))
    context = evolve(context, tokenizer=build_tokenizer(job, context))
    for name, source in zip(source_names(job), job.data.sources, strict=True):
        yield name, source, context


def _of_text(source: DatasetComponent, context: BuildContext) -> Budgets | None:
    from forge_core.contracts.data import Documents, HasDescription

    built: object = context.build(source)
    if not isinstance(built, Documents):
        return None
    # Before their ends are used, which may be damaged too
    for documents in (built, built.held_out):
        if isinstance(documents, Verifiable):
            documents.verify()
    budgets = text_budgets(built, context.job.train.seq_len)
    rows = built.describe() if isinstance(built, HasDescription) else ""
    return budgets and evolve(budgets, labels=_labels(built), rows=rows)


def _labels(documents: Documents) -> LabelCounts | None:
    from forge_kit.data.label_counts import LabelCounts

    # One token shows whether the documents have a mask at all
    return None if documents.learned(0, 1) is None else LabelCounts.of_documents(documents)


def text_budgets(documents: Documents, seq_len: int) -> Budgets | None:
    """Returns the budget of tokenised documents; None where it is not known where documents end.

    Args:
        documents: the documents; a document of n tokens takes n - 1 positions.
        seq_len: positions of a sequence.
    """
    import numpy as np

    parts = [part for part in (documents, documents.held_out) if part is not None]
    try:
        # The last token of a document is a label only, and takes no position
        needs = np.concatenate([np.diff(part.ends(), prepend=0) - 1 for part in parts])
    except JobError:
        return None
    over = int((needs > seq_len).sum())
    largest = int(needs.max(initial=0))
    budget = Budget(name="positions", key="train.seq_len", room=seq_len, largest=largest, over=over)
    return Budgets(documents=len(needs), over=over, budgets=[budget], outcome="they are divided among sequences")


def report(name: str, budgets: Budgets | None) -> Iterator[str]:
    """Yields lines for a reader."""
    if budgets is None:
        yield f"source {name}: nothing is measured before training, since it is a stream or makes its own sequences"
        return
    yield f"source {name}: {budgets.documents:,} documents"
    if note := left_out_note(budgets.left_out):
        yield f"  {note}"
    if budgets.rows:
        yield f"  {budgets.rows}"
    # The description of rows may have this share already
    if budgets.labels is not None and str(budgets.labels) not in budgets.rows:
        yield f"  {budgets.labels}"
    for budget in budgets.budgets:
        room = f"{budget.key} = {budget.room:,}"
        count = f"{budget.over:,} need more than" if budget.over else "none needs more than"
        yield f"  {budget.name}: {count} {room} (the most is {budget.largest:,})"
    if budgets.over:
        first = f"; the first is {budgets.first}" if budgets.first else ""
        yield f"  {budgets.over:,} do not fit: {budgets.outcome}{first}"


def check_budgets(measured: Sequence[Budgets | None]) -> None:
    """Raise `JobError` for sources, in the job's order, with which training refuses to start."""
    problems = []
    for number, budgets in enumerate(measured):
        if budgets is not None and budgets.is_refused:
            keys = " and ".join(budget.key for budget in budgets.budgets if budget.over)
            message = f"{budgets.over:,} of {budgets.documents:,} documents do not fit into a row: {budgets.outcome}"
            problems.append(Problem(f"data.sources.{number}", f"{message}; raise {keys}, or leave such documents out"))
    if problems:
        raise JobError(problems)
