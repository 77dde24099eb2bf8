"""What components of a job may add to its plan: lines of the heading, and work before each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import torch
from attrs import evolve

from forge_core.checkpoint.run_folder import TOKENIZER, run_folder
from forge_core.config.keys import walk_components
from forge_core.config.mixture import source_names
from forge_core.contracts.contexts import BuildContext, StepContext
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.contracts.layout import Layout
from forge_core.job import Job
from forge_core.parallel.initialise import bare_context
from forge_core.plugins.catalog import Catalog

Line = tuple[str, str]
"""The title, of at most 10 characters, and the text."""


@runtime_checkable
class HasPlanLines(Protocol):
    """A component of a job, of any kind, that adds lines to the heading of its plan."""

    def plan_lines(self, job: Job) -> Iterable[tuple[str, str]]:
        """Returns the title (10 characters) and the text of each line; called after the model was built."""


@runtime_checkable
class HasPlanDataLines(Protocol):
    """A data source that adds lines about its data, of which a plan lets it read a small sample."""

    def plan_data_lines(self, context: BuildContext) -> Iterable[tuple[str, str]]:
        """Returns the title (10 characters) and the text of each line, within seconds and without the network.

        Args:
            context: as for `build`, of one process, with the tokenizer.

        Raises:
            ForgeError: the data are not there; the plan shows the message in place of the lines.
        """


@runtime_checkable
class PlayedInPlans(Protocol):
    """A training hook that computes something before each step, such as a forward pass of a reference."""

    played_in_plans: bool
    """A plan calls `on_step_begin`, and counts its memory, FLOPs and messages, if this is true. Micro-batches have the
    entries that the model needs and no values, and the context has `build`, `executor` and `model`."""

    def on_step_begin(self, context: StepContext) -> None:
        """See `TrainingHook`."""


@runtime_checkable
class BuildsLocally(Protocol):
    """A tokenizer component whose `build` may use the network."""

    def build_locally(self, context: BuildContext) -> Tokenizer:
        """Returns the tokenizer without using the network.

        Raises:
            ForgeError: it is not on this machine.
        """
        ...


def plan_lines(job: Job, catalog: Catalog) -> Iterator[Line]:
    """Yields the lines of all components of a job whose model was built, in the order of its keys."""
    for _, component in walk_components(job):
        if isinstance(component, HasPlanLines):
            yield from component.plan_lines(job)
    yield from _data_lines(job, catalog)


def _data_lines(job: Job, catalog: Catalog) -> Iterator[Line]:
    context: BuildContext | None = None
    for name, source in zip(source_names(job), job.data.sources, strict=True):
        if not isinstance(source, HasPlanDataLines):
            continue
        named = "" if len(job.data.sources) == 1 else f"source {name}: "
        try:
            context = context or _context(job, catalog)
            lines = [(title, named + text) for title, text in source.plan_data_lines(context)]
        except (ForgeError, OSError) as error:
            lines = [("rows", f"unknown: {named}{' '.join(str(error).split())}")]
        yield from lines


def _context(job: Job, catalog: Catalog) -> BuildContext:
    """Returns the surroundings of a source of data, with the tokenizer of the run's folder, or else a new one.

    Raises:
        ForgeError: the tokenizer cannot be loaded, or would first be trained on the data.
    """
    job = evolve(job, parallel={})  # no stage takes part in reading data
    context, component = bare_context(job, Layout(), catalog, torch.device("cpu")), job.data.tokenizer
    folder = run_folder(job) / TOKENIZER
    if component is None:
        return context
    if folder.is_dir():
        return evolve(context, tokenizer=component.load(context, folder))
    if isinstance(component, BuildsLocally):
        return evolve(context, tokenizer=component.build_locally(context))
    return evolve(context, tokenizer=context.build(component, documents=_not_trained))


def _not_trained() -> Iterable[str]:
    raise JobError("the tokenizer is trained on the data, which a plan does not do")
