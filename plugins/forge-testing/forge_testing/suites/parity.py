"""One curve: a short run in float64 has the same numbers under every layout as in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401  before ranks are forked, as most layouts need it and the import is slow
from attrs import frozen

from forge_core.job import Job
from forge_testing import Numbers, SplittableModel
from forge_testing.curves import Curve, Difference, train
from forge_testing.laws import Case, alone, id_of, observed
from forge_testing.layouts import LAYOUTS
from forge_testing.pretend import NAME, on_device
from forge_testing.suites.base import Suite, undeclared_waits

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
    waits: ClassVar[Mapping[str, int]] = {}
    """How often the host waits for the device in a step, by the file of the code that does, where the component says in
    a run's summary that it does: `{"soap.py": 1}`. A wait leaves a GPU idle until the host has queued more work."""

    needs_cpu: ClassVar[str] = ""
    """Why the compared job cannot train on another device than the CPU, if it cannot: it names a kernel of CPUs."""

    def parity_changes(self, folder: Path) -> Mapping[str, Any]:
        """Return the settings of the compared job, including the component; see `Suite.job`."""
        raise NotImplementedError

    def parity_job(self, folder: Path, layout: Mapping[str, Any]) -> Job:
        """Build the job of the comparison. `layout`: settings of the layout; none: in one process."""
        # The second step uses what the first one changed: weights, states, the biases of routers. More would repeat it.
        changes: dict[str, Any] = {"precision": "fp64", "global_batch_size": 8, "steps": 2, "seq_len": 16}
        changes |= {"model": SplittableModel(), "data": {"sources": (Numbers(ignored=7, held_out=5),)}}
        return self.tiny_job(folder, **{**changes, **self.parity_changes(folder), **layout})

    def pytest_generate_tests(self, metafunc: Metafunc) -> None:
        """Generate one test for each layout."""
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", self.layouts, ids=[id_of(name, LAYOUTS[name]) for name in self.layouts])

    @pytest.fixture(autouse=True)
    def _share_starts(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    _request: pytest.FixtureRequest | None = None
    """The running test; None if a check is called by itself, which then starts its own ranks."""

    def test_every_layout_trains_like_one_process(self, layout: str) -> None:
        """Loss, gradient norm, gradients, weights and evaluation are equal, from the same initial weights."""
        case, what = self.layout_case(), type(self).__name__
        if why := case.cannot_have(layout):
            pytest.skip(f"{layout}: {why}")
        found, of_one = observed(self._request, case, layout)
        assert not isinstance(found, str), f"{what} cannot train under {layout}: {found}"
        self._compare_as(f"{what} trains differently under {layout} than in one process", found, of_one)

    def test_it_trains_on_a_device_and_waits_only_where_it_says(self, tmp_path: Path) -> None:
        """On the device of `forge_testing.pretend`, numbers are the CPU's, and waits are counted by file and line."""
        if self.needs_cpu:
            pytest.skip(self.needs_cpu)
        found: Curve = on_device(type(self).curve_on_device, str(tmp_path))
        case, what = self.layout_case(), type(self).__name__
        self._compare_as(f"{what} trains differently on a device than on the CPU", [found], alone(self._request, case))
        wrong = undeclared_waits(f"a step of {what}", found.waits, self.waits)
        assert not wrong, wrong

    @classmethod
    def curve_on_device(cls, folder: str) -> Curve:
        """In a process with the pretended device: the curve on it."""
        suite = cls()
        return train(suite.parity_job(Path(folder), {"device": NAME, "non_finite": "ignore"}), suite.catalog).on_host()

    @classmethod
    def layout_case(cls) -> Case:
        """Return the comparison of this class as a case of `forge_testing.laws`, the same at each call."""
        if "_case" not in vars(cls):
            suite = cls()
            options: dict[str, Any] = {"layouts": LAYOUTS, "catalog": lambda: suite.catalog}
            cls._case = _OfSuite(cls.__name__, suite, observe=suite._observe, compare=suite._compare, **options)
        return cls._case

    _case: ClassVar[Case]

    def cannot_have(self, layout: str) -> str:
        """Return why the component cannot be tested under a layout; empty if it can."""
        return ""

    def _observe(self, folder: Path, layout: Mapping[str, Any]) -> Curve | None:
        curve = train(self.parity_job(folder, layout), self.catalog)
        return None if layout and dist.get_rank() else curve  # all ranks have the same whole tensors

    def _compare_as(self, summary: str, ranks: Sequence[Curve], alone: Curve) -> None:
        try:
            self._compare(ranks, alone)
        except AssertionError as error:
            raise AssertionError(f"{summary}, {error}") from error

    def _compare(self, ranks: Sequence[Curve], alone: Curve) -> None:
        difference = Difference.between(ranks[0], alone)
        near = max(difference.loss, difference.norm, difference.gradient, difference.evaluation)
        good = not difference.initial and near <= self.loss_tolerance and difference.weights <= self.weights_tolerance
        assert good, (
            f"by {difference}; allowed are {self.loss_tolerance:g} and for weights {self.weights_tolerance:g}. A value "
            "computed from a part of a parameter, a gradient or the batch must be summed over the ranks that share it"
        )


@frozen(eq=False)
class _OfSuite(Case):
    suite: ParitySuite

    def cannot_have(self, layout: str) -> str:
        return super().cannot_have(layout) or self.suite.cannot_have(layout)
