"""Base of the suites of all kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from forge_core.contracts.components import TrainingHook
from forge_core.engine.build import build_context
from forge_core.engine.trainer import Summary, Trainer
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_core.plugins.manager import RunContext
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
        assert hasattr(self, "component"), f"{name} has nothing to test: set `component`, or override `make(folder)`"
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


def undeclared_waits(what: str, found: Mapping[tuple[str, str], int], declared: Mapping[str, int]) -> str:
    """Returns what is wrong with the host's waits for the pretended device; empty if they are as declared.

    Args:
        what: Whose they are: "a step of TestMine".
        found: How often the host waited, by (what for, file and line), as `forge_testing.pretend.waits` counts.
        declared: How often it may, by the name of the file.
    """
    counted = Counter(dict.fromkeys(declared, 0))
    for (_, where), count in found.items():
        counted[Path(where.rpartition(":")[0]).name] += count
    if counted == Counter(declared):
        return ""
    places = "; ".join(f"{where} ({count} times, for {what_for})" for (what_for, where), count in found.items())
    return (
        f"in {what} the host waits for the device at {places or 'no line'}; say so in the run's summary "
        f"and in `waits` of this class, which has {dict(declared)}, or compute it on the device"
    )


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns any exception within into an AssertionError that begins with `what`."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
