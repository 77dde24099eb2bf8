"""Laws of layouts: what a case computes under any layout is what one process computes.

    test_layouts = layout_law(Case("lion", observe=curve, compare=near, layouts=("fsdp2", "tp2")))

is one test per case and layout. All cases of a session that need the same number of ranks share one start of ranks.
With pytest-xdist, name the plugin `forge_testing.fixtures` and run with `--dist loadfile`; otherwise each file starts
its own ranks.
"""

from __future__ import annotations

import re
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from attrs import field, frozen

from forge_testing.catalogs import installed
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks

Observe = Callable[[Path, Mapping[str, Any]], Any]
TOGETHER = "forge_laws_together"
"""Key of an xdist worker's input: whether the tests of one number of ranks are all sent to the same worker."""


@frozen(eq=False)
class Case:
    """A computation whose result must not depend on the layout."""

    name: str
    """Part of the ids of its tests."""
    observe: Observe = field(kw_only=True)
    """`observe(folder, changes)` runs on every rank and returns what is compared; picklable. `folder` is empty and
    shared by the ranks. `changes` are the settings of the layout for `tiny_job`: `parallel` and `micro_batch_size`, or
    none in one process."""
    compare: Callable[[Sequence[Any], Any], None] = field(kw_only=True)
    """`compare(ranks, alone)` asserts that the observations of all ranks agree with the one of a single process."""
    layouts: Sequence[str] = field(kw_only=True)
    """Names in `forge_testing.layouts.LAYOUTS`."""


def layout_law(*cases: Case) -> Callable[..., None]:
    """Return a test function, to be assigned to a name that starts with `test_`, of all layouts of the cases."""
    pairs = [
        pytest.param(case, layout, id=f"{case.name}-{layout}-{LAYOUTS[layout].ranks}ranks")
        for case in cases
        for layout in case.layouts
    ]

    @pytest.mark.parametrize(("case", "layout"), pairs)
    def test_layout(request: pytest.FixtureRequest, case: Case, layout: str) -> None:
        if missing := LAYOUTS[layout].missing(installed()):
            pytest.skip(f"{layout}: no installed distribution offers the stage {' or '.join(missing)}")
        observations = request.session.stash.setdefault(_OBSERVATIONS, Observations())
        if (case, layout) not in observations.ranks:
            observations.collect(_pairs_of(request, LAYOUTS[layout].ranks))
        found = observations.ranks[case, layout]
        if isinstance(found, str):
            pytest.fail(found, pytrace=False)
        case.compare(found, observations.alone[case])

    return test_layout


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

        After an exception, ranks may wait in different collectives. So they are started again, without that case.
        """
        left = [pair for pair in pairs if self._has_alone(pair)]
        while left:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    by_rank = run_on_ranks(LAYOUTS[left[0][1]].ranks, lambda rank: _observe_all(left, Path(folder)))
                except AssertionError as error:
                    failed = left[_failed(Path(folder))]
                    self.ranks[failed] = str(error)
                    left.remove(failed)
                else:
                    self.ranks |= zip(left, map(list, zip(*by_rank, strict=True)), strict=True)
                    return

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
    params = [item.callspec.params for item in items if _is_chosen(item)]
    pairs = [(each["case"], each["layout"]) for each in params if isinstance(each.get("case"), Case)]
    return [pair for pair in pairs if LAYOUTS[pair[1]].ranks == ranks and not LAYOUTS[pair[1]].missing(installed())]


def _is_chosen(item: Any) -> bool:
    return bool(ranks_of(item.nodeid)) and hasattr(item, "callspec") and not item.get_closest_marker("skip")


def _observe_all(pairs: Sequence[Pair], folder: Path) -> list[Any]:
    return [_observe(pair, number, folder) for number, pair in enumerate(pairs)]


def _observe(pair: Pair, number: int, folder: Path) -> Any:
    case, layout = pair
    own = folder / str(number)
    own.mkdir(exist_ok=True)  # the last one tells which case a rank died in
    dist.barrier()  # no rank is in a later case than another, whose failure would be taken for one of that case
    try:
        return case.observe(own, LAYOUTS[layout].changes(installed()))
    except BaseException:
        (folder / f"{number}.failed").touch()
        raise


def _failed(folder: Path) -> int:
    """Return the number of the first case that raised, or in which a rank died without an exception."""
    raised = [int(path.stem) for path in folder.glob("*.failed")]
    return min(raised) if raised else max(int(path.name) for path in folder.iterdir())
