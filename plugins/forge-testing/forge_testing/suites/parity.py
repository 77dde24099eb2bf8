"""One curve: a short run in float64 has the same numbers under every layout as in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch.distributed.fsdp  # noqa: F401  before ranks are forked, as most layouts need it and the import is slow

from forge_core.job import Job
from forge_testing import Numbers, SplittableModel
from forge_testing.curves import Curve, Difference, train
from forge_testing.layouts import LAYOUTS, LayoutCase
from forge_testing.processes import run_on_ranks
from forge_testing.suites.base import Suite

if TYPE_CHECKING:
    from _pytest.python import Metafunc


class ParitySuite(Suite):
    """Runs the component under layouts, on real processes, and compares with one process."""

    layouts: ClassVar[Sequence[str]] = ("replicate2", "fsdp2", "tp2", "pp2")
    """Names in `forge_testing.layouts.LAYOUTS`. A layout is skipped if one of its stages is not installed."""
    loss_tolerance: ClassVar[float] = 1e-9
    """Largest difference of losses, gradient norms, gradients and evaluation, absolute."""
    weights_tolerance: ClassVar[float] = 1e-7
    """Largest distance of the weights, relative to their change over the steps."""

    def parity_changes(self, folder: Path) -> Mapping[str, Any]:
        """Return the settings of the compared job, including the component; see `Suite.job`."""
        raise NotImplementedError

    def parity_job(self, folder: Path, case: LayoutCase | None) -> Job:
        """Build the job of the comparison under a layout; None: in one process."""
        changes: dict[str, Any] = {"precision": "fp64", "global_batch_size": 8, "steps": 3, "seq_len": 16}
        changes |= {"model": SplittableModel(), "data": {"sources": (Numbers(ignored=7, held_out=5),)}}
        changes |= self.parity_changes(folder)
        if case is not None:
            changes |= {"parallel": case.stages(self.catalog), "micro_batch_size": case.micro_batch_size}
        return self.tiny_job(folder, **changes)

    def pytest_generate_tests(self, metafunc: Metafunc) -> None:
        """Generate one test for each layout."""
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", self.layouts)

    def test_every_layout_trains_like_one_process(self, layout: str) -> None:
        """Loss, gradient norm, gradients, weights and evaluation are equal, from the same initial weights."""
        if why := self.cannot_have(layout):
            pytest.skip(f"{layout}: {why}")
        actual, expected = self._curves(layout)
        difference = Difference.between(actual, expected)
        near = max(difference.loss, difference.norm, difference.gradient, difference.evaluation)
        good = not difference.initial and near <= self.loss_tolerance and difference.weights <= self.weights_tolerance
        assert good, (
            f"{self._what()} trains differently under {layout} than in one process, by {difference}; allowed are "
            f"{self.loss_tolerance:g} and for weights {self.weights_tolerance:g}. What is computed from a part of a "
            "parameter, a gradient or the batch must be summed over the ranks that share it"
        )

    def cannot_have(self, layout: str) -> str:
        """Return why a layout cannot be tested; empty if it can."""
        missing = LAYOUTS[layout].missing(self.catalog)
        return f"no installed distribution offers the stage {' or '.join(missing)}" if missing else ""

    def _what(self) -> str:
        return type(self).__name__

    def _curves(self, layout: str) -> tuple[Curve, Curve]:
        """Return the curves under a layout and in one process. Layouts of one number of ranks run together, once."""
        cls = type(self)
        if "_found" not in vars(cls):
            cls._found = {}
        if layout not in cls._found:
            cls._found |= self._run_together(LAYOUTS[layout].ranks, layout)
        actual = cls._found[layout]
        if isinstance(actual, AssertionError):
            raise AssertionError(f"{self._what()} cannot train under {layout}: {actual}") from actual
        return actual

    _found: ClassVar[dict[str, Any]]

    def _run_together(self, ranks: int, wanted: str) -> dict[str, Any]:
        """Return the curves of all layouts of `ranks` ranks. After an error, run each separately, to name it."""
        names = [name for name in {**dict.fromkeys(self.layouts), wanted: None} if LAYOUTS[name].ranks == ranks]
        names = [name for name in names if not self.cannot_have(name)]
        with tempfile.TemporaryDirectory() as folder:
            try:
                return self._run(Path(folder), ranks, names)
            except AssertionError:
                return {name: self._run_alone(Path(folder), ranks, name) for name in names}

    def _run_alone(self, folder: Path, ranks: int, name: str) -> Any:
        try:
            return self._run(folder, ranks, [name])[name]
        except AssertionError as error:
            return error

    def _run(self, folder: Path, ranks: int, names: Sequence[str]) -> dict[str, Any]:
        jobs = [self.parity_job(folder, LAYOUTS[name]) for name in names]
        expected = train(self.parity_job(folder, None), self.catalog)  # first, so that ranks inherit its imports
        actual = run_on_ranks(ranks, lambda rank: [train(job, self.catalog) for job in jobs])[0]
        return {name: (curve, expected) for name, curve in zip(names, actual, strict=True)}
