"""Laws: what must not depend on the layout of a run, nor on its interruptions.

    test_layouts = layout_law(Case("lion", observe=curve, compare=near, layouts=("fsdp2", "tp2")))

is one test per case and layout. All cases of a session that need the same number of ranks share one start of ranks.
With pytest-xdist, name the plugin `forge_testing.fixtures` and run with `--dist loadfile`; otherwise each file starts
its own ranks.

    test_resumption = resumption_law(Interrupted("lion", changes=lambda: {"optimizer": Lion()}))

is one test per case and way of interrupting it, in one process; all of a case share the run that is not interrupted.
"""

from __future__ import annotations

import re
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

from forge_core.contracts.components import TrainingHook
from forge_core.engine.trainer import Summary, Trainer
from forge_core.plugins.catalog import Catalog
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.layouts import LAYOUTS, LayoutCase
from forge_testing.outcomes import PowerCut, Stop, metrics_differences, some, state_differences
from forge_testing.processes import run_in_turn_on_ranks

Observe = Callable[[Path, Mapping[str, Any]], Any]
TOGETHER = "forge_laws_together"
"""Key of an xdist worker's input: whether the tests of one number of ranks are all sent to the same worker."""


def _by_name(layouts: Sequence[str] | Mapping[str, LayoutCase]) -> Mapping[str, LayoutCase]:
    return layouts if isinstance(layouts, Mapping) else {name: LAYOUTS[name] for name in layouts}


@frozen(eq=False)
class Case:
    """A computation whose result must not depend on the layout."""

    name: str
    """Part of the ids of its tests."""
    observe: Observe = field(kw_only=True)
    """`observe(folder, changes)` runs on every rank and returns the picklable result to compare. `folder` is empty and
    shared by the ranks. `changes` are the settings of the layout for `tiny_job`: `parallel` and `micro_batch_size`, or
    none in one process."""
    compare: Callable[[Sequence[Any], Any], None] = field(kw_only=True)
    """`compare(ranks, alone)` asserts that the observations of all ranks agree with the one of a single process."""
    layouts: Mapping[str, LayoutCase] = field(kw_only=True, converter=_by_name)
    """Layouts by name, which is part of the ids of tests; or names in `forge_testing.layouts.LAYOUTS`."""
    catalog: Callable[[], Catalog] = field(kw_only=True, default=installed)
    """Returns the catalog with the stages of the layouts; by default, everything installed."""

    def cannot_have(self, layout: str) -> str:
        """Return why a layout cannot be tested; empty if it can."""
        missing = self.layouts[layout].missing(self.catalog())
        return f"no installed distribution offers the stage {' or '.join(missing)}" if missing else ""


def layout_law(*cases: Case) -> Callable[..., None]:
    """Return a test function, to be assigned to a name that starts with `test_`, of all layouts of the cases."""
    pairs = [
        pytest.param(case, name, id=f"{case.name}-{id_of(name, layout)}")
        for case in cases
        for name, layout in case.layouts.items()
    ]

    @pytest.mark.parametrize(("case", "layout"), pairs)
    def test_layout(request: pytest.FixtureRequest, case: Case, layout: str) -> None:
        if why := case.cannot_have(layout):
            pytest.skip(f"{layout}: {why}")
        found, alone = observed(request, case, layout)
        if isinstance(found, str):
            pytest.fail(found, pytrace=False)
        case.compare(found, alone)

    return test_layout


def id_of(name: str, layout: LayoutCase) -> str:
    """Return the last part of the id of a test under a layout, by which all of its number of ranks run together."""
    return f"{name}-{layout.ranks}ranks"


def observed(request: pytest.FixtureRequest | None, case: Case, layout: str) -> tuple[list[Any] | str, Any]:
    """Return what a case computed on all ranks of a layout, and in one process.

    Args:
        request: The running test, whose session's tests of as many ranks share one start; None: ranks start for it.
        case: The case.
        layout: Name of one of its layouts.

    Returns:
        The observations of the ranks, or the traceback if the case failed there; and the one of a single process.
    """
    observations = request.session.stash.setdefault(_OBSERVATIONS, Observations()) if request else Observations()
    if (case, layout) not in observations.ranks:
        others = _pairs_of(request, case.layouts[layout].ranks) if request else []
        # The pair may not be among them: the id of its test ends differently if the class adds parameters.
        pairs = dict.fromkeys([*others, (case, layout)])
        observations.collect([pair for pair in pairs if pair not in observations.ranks])
    return observations.ranks[case, layout], observations.alone.get(case)


def alone(request: pytest.FixtureRequest | None, case: Case) -> Any:
    """Return what a case computed in one process; see `observed`."""
    observations = request.session.stash.setdefault(_OBSERVATIONS, Observations()) if request else Observations()
    if case not in observations.alone:
        with tempfile.TemporaryDirectory() as folder:
            observations.alone[case] = case.observe(Path(folder), {})
    return observations.alone[case]


def ranks_of(nodeid: str) -> str:
    """Return which tests run in the same process as a test of a law; empty for any other test."""
    found = re.search(r"-(\d+)ranks\]$", nodeid)
    return f"laws, {found[1]} ranks" if found else ""


Pair = tuple[Case, str]


class Observations:
    """What cases computed: on all ranks of each layout, and in one process."""

    def __init__(self) -> None:
        self.alone: dict[Case, Any] = {}
        self.ranks: dict[Pair, list[Any] | str] = {}
        """Observations of all ranks; the traceback where the case failed."""

    def collect(self, pairs: Sequence[Pair]) -> None:
        """Observe cases under layouts of the same number of ranks, by one start of ranks if none fails.

        After an exception, ranks may wait in different collectives. So they are started again, for the cases after it.
        """
        left = [pair for pair in pairs if self._has_alone(pair)]
        while left:
            with tempfile.TemporaryDirectory() as folder:
                observers = [partial(_observe, pair, Path(folder) / str(n)) for n, pair in enumerate(left)]
                done, error = run_in_turn_on_ranks(_layout(left[0]).ranks, observers)
            self.ranks |= zip(left, done, strict=False)
            left = left[len(done) :]
            if error:
                self.ranks[left.pop(0)] = error

    def _has_alone(self, pair: Pair) -> bool:
        """Compute the observation of one process, before the fork, so that ranks inherit what it imports."""
        case = pair[0]
        if case not in self.alone:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    self.alone[case] = case.observe(Path(folder), {})
                except Exception:
                    self.ranks[pair] = f"in one process: {traceback.format_exc()}"
        return case in self.alone


_OBSERVATIONS = pytest.StashKey[Observations]()


def _pairs_of(request: pytest.FixtureRequest, ranks: int) -> list[Pair]:
    """Return the cases and layouts of so many ranks that this process tests."""
    worker = getattr(request.config, "workerinput", None)
    whole_session = worker is None or worker.get(TOGETHER, False)
    items: list[Any] = [item for item in request.session.items if whole_session or item.path == request.path]
    pairs = [pair for item in items if (pair := _pair_of(item))]
    return [pair for pair in pairs if _layout(pair).ranks == ranks and not pair[0].cannot_have(pair[1])]


def _layout(pair: Pair) -> LayoutCase:
    case, name = pair
    return case.layouts[name]


def _pair_of(item: Any) -> Pair | None:
    """Return the case and the layout of a test; None of one that is no law's, or is skipped."""
    if not ranks_of(item.nodeid) or not hasattr(item, "callspec") or item.get_closest_marker("skip"):
        return None
    params: Mapping[str, Any] = item.callspec.params
    of_suite: Any = getattr(item, "cls", None)
    case = of_suite.layout_case() if hasattr(of_suite, "layout_case") else params.get("case")
    return (case, params["layout"]) if isinstance(case, Case) else None


def _observe(pair: Pair, folder: Path, _rank: int) -> Any:
    folder.mkdir(exist_ok=True)
    return pair[0].observe(folder, _layout(pair).changes(pair[0].catalog()))


@frozen(eq=False)
class Interrupted:
    """A job that must end with the same bits however often it is interrupted."""

    name: str
    """Part of the ids of its tests."""
    changes: Callable[[], Mapping[str, Any]] = field(kw_only=True)
    """Returns the settings of the job for `tiny_job`; of 6 steps, if it does not name `steps`. Called for each start
    of the run, as a process does not have the objects of the one before."""
    interruptions: Sequence[Sequence[TrainingHook]] = field(kw_only=True, default=((Stop(step=3),),))
    """Ways of interrupting it, one test each: a hook for each start but the last one, `Stop` or `Die` of
    `forge_testing.outcomes`."""
    hooks: Callable[[], Sequence[TrainingHook]] = field(kw_only=True, default=tuple)
    """Returns further hooks for each start, which are not of the job file."""
    ignored_metrics: Collection[str] = field(kw_only=True, default=())
    """Metrics that differ by design, for example because a plugin logs them in its first step."""
    also: Callable[[Summary], Any] = field(kw_only=True, default=lambda summary: None)
    """What else must be equal: a value read from the files of a finished run."""

    def run(self, folder: Path, interruptions: Sequence[TrainingHook] = ()) -> Summary:
        """Run the job to its end, with interruptions."""
        for interruption in interruptions:
            try:
                summary = self._start(folder, interruption)
            except PowerCut:
                continue
            assert summary.stopped, f"the run was over before it could {interruption}"
        return self._start(folder)

    def _start(self, folder: Path, *interruption: TrainingHook) -> Summary:
        settings: Mapping[str, Any] = {"steps": 6, "gc_interval": 0, **self.changes()}
        job = tiny_job(str(folder), installed(), **settings)
        hooks = [*self.hooks(), *interruption]
        return Trainer(job, hooks=hooks, catalog=installed(), echo=lambda text: None).run()


def resumption_law(*cases: Interrupted) -> Callable[..., None]:
    """Return a test function, to be assigned to a name that starts with `test_`, of all interruptions of the cases.

    Metrics lines without times, and the whole last checkpoint (weights, state of the optimizer, of hooks and of
    plugins, and progress), must be bitwise equal to the lines and the checkpoint of an uninterrupted run.
    """
    wholes: dict[Interrupted, Summary] = {}
    pairs = [
        pytest.param(case, interruptions, id=f"{case.name}-{', '.join(map(str, interruptions))}")
        for case in cases
        for interruptions in case.interruptions
    ]

    @pytest.mark.parametrize(("case", "interruptions"), pairs)
    def test_resumption(
        tmp_path_factory: pytest.TempPathFactory, case: Interrupted, interruptions: Sequence[TrainingHook]
    ) -> None:
        if case not in wholes:
            wholes[case] = case.run(tmp_path_factory.mktemp("whole"))
        whole, parts = wholes[case], case.run(tmp_path_factory.mktemp("parts"), interruptions)
        # Lines after the first one that differs say little.
        differ = metrics_differences(parts, whole, case.ignored_metrics)[:1] + state_differences(parts, whole)
        assert not differ, (
            f"{case.name}: interrupted ({', '.join(map(str, interruptions))}), a run ends with other values of "
            f"{some(differ)}; what a component remembers from step to step must be in its state"
        )
        assert case.also(parts) == case.also(whole), f"{case.name}: `also` returns another value after interruptions"

    return test_resumption
