"""Base of the suites of all kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import define
from torch import Tensor

from forge_core.checkpoint.run_folder import RunFolder, storage_of
from forge_core.checkpoint.storage import read_manifest
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.contexts import StepContext
from forge_core.engine.build import build_context
from forge_core.engine.trainer import Summary, Trainer
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_core.plugins.manager import RunContext
from forge_kit.checkpoints import stored_tensors
from forge_kit.whole_tensors import read_whole
from forge_testing import tiny_job
from forge_testing.catalogs import installed


class Suite:
    """Tests of one component.

    A subclass names the component; pytest collects it if its name starts with `Test`:
        class TestLion(OptimizerSuite):
            component = Lion(lr=1e-3)

    Suites use no fixtures but pytest's own.
    """

    component: ClassVar[Any]
    """The component, with the settings to test."""
    job: ClassVar[Mapping[str, Any]] = {}
    """Further settings of its job, as `forge_testing.tiny_job` takes them: `{"seq_len": 32}`. It runs on the CPU unless
    these name another device."""

    def make(self, folder: Path) -> Any:
        """Return the component.

        Override it if the component needs files, which belong into `folder`, or if each run needs an object of its
        own, as hooks with state do.
        """
        name = type(self).__name__
        assert hasattr(self, "component"), f"{name} says not what it tests: set `component`, or override `make(folder)`"
        return self.component

    @property
    def catalog(self) -> Catalog:
        """Catalog of stages and default components: by default, everything installed."""
        return installed()

    def tiny_job(self, folder: Path, **changes: Any) -> Job:
        """Build the job of a component, with changes that override `job`. Runs go to `folder`."""
        merged = {"device": "cpu", "gc_interval": 0, **self.job}  # a collection takes longer than the steps
        for name, value in changes.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
            merged[name] = {**merged[name], **value} if both else value
        return tiny_job(str(folder), self.catalog, **merged)

    def context(self, job: Job, folder: Path | None = None) -> RunContext:
        """Return the context that components of the job are built with. `folder`: the run folder."""
        return build_context(job, self.catalog, folder)

    def train(self, job: Job, *hooks: TrainingHook) -> Summary:
        """Run a job to its end, silently."""
        return Trainer(job, hooks=hooks, catalog=self.catalog, echo=lambda text: None).run()


@define(kw_only=True, slots=False)
class Stop(TrainingHook):
    """Requests a stop after a step."""

    step: int

    def on_step_end(self, context: StepContext) -> None:
        if context.step == self.step:
            context.request_stop("a test of continuing")


def losses_of(summary: Summary) -> list[float]:
    """Return the training losses of a finished run."""
    records = map(json.loads, RunFolder(summary.folder).metrics_file().read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def saved_state(summary: Summary) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Return tensors and plain values of a run's last checkpoint, without those that describe the run."""
    folder = storage_of(summary.folder).path(summary.step)
    stored = stored_tensors(folder)
    values = read_manifest(folder)
    return read_whole(folder, stored, stored), {key: values[key] for key in ("progress", "optimizer", "extras")}


def state_differences(actual: Summary, expected: Summary) -> list[str]:
    """Return the names that differ, by any bit, in the last checkpoints of two runs."""
    (tensors, values), (expected_tensors, expected_values) = saved_state(actual), saved_state(expected)
    names = [*expected_tensors, *(name for name in tensors if name not in expected_tensors)]
    differ = [name for name in names if not _same(tensors.get(name), expected_tensors.get(name))]
    return differ + [key for key in values if values[key] != expected_values[key]]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def some(names: list[str]) -> str:
    """Return some of the names as text for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns any exception within into an AssertionError that begins with `what`."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
