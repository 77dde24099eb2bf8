"""Laws: one start of ranks for many cases; what an interruption must not change."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from attrs import define, field

from forge_core import TrainingHook
from forge_testing import fixtures, laws
from forge_testing.laws import Case, Interrupted, Observations, layout_law, ranks_of, resumption_law
from forge_testing.layouts import LayoutCase
from forge_testing.outcomes import Die, Stop
from forge_testing.refusals import naming


def rank_and_world(folder, changes):
    return (dist.get_rank(), dist.get_world_size()) if changes else (0, 1)


def process_and_rank(folder, changes):
    return (os.getpid(), dist.get_rank() if changes else 0)


def raises_on_one_rank(folder, changes):
    """The other rank waits in a collective for it."""
    if changes and dist.get_rank() == 1:
        raise ValueError("no such block")
    if changes:
        dist.all_reduce(torch.ones(1))


def dies_on_one_rank(folder, changes):
    if changes and dist.get_rank() == 1:
        os._exit(3)
    if changes:
        dist.all_reduce(torch.ones(1))


def fails_alone(folder, changes):
    raise KeyError("head")


def case(name, observe):
    return Case(name, observe=observe, compare=lambda ranks, alone: None, layouts=("replicate2",))


@pytest.fixture
def starts(monkeypatch):
    """The numbers of ranks that were started."""
    started = []
    run = laws.run_in_turn_on_ranks
    monkeypatch.setattr(laws, "run_in_turn_on_ranks", lambda ranks, of: [started.append(ranks), run(ranks, of)][1])
    return started


def test_cases_of_one_number_of_ranks_share_a_start(starts):
    observations = Observations()
    pairs = [(case(name, rank_and_world), "replicate2") for name in "ab"]
    observations.collect(pairs)
    assert starts == [2]
    assert [observations.ranks[pair] for pair in pairs] == [[(0, 2), (1, 2)]] * 2
    assert [*observations.alone.values()] == [(0, 1)] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(raises_on_one_rank, "ValueError: no such block"), (dies_on_one_rank, "died|by peer")],
)
def test_a_case_that_fails_is_named_and_the_others_count(starts, wrong, message):
    observations = Observations()
    pairs = [(case(o.__name__, o), "replicate2") for o in (process_and_rank, wrong, process_and_rank, process_and_rank)]
    observations.collect(pairs)
    assert starts == [2, 2]
    first, bad, third, fourth = (observations.ranks[pair] for pair in pairs)
    assert re.search(message, bad)
    assert [rank for _, rank in first] == [0, 1]
    assert third == fourth != first  # those before it are not observed again


def test_a_case_that_fails_in_one_process_is_not_started_on_ranks(starts):
    observations, pair = Observations(), (case("alone", fails_alone), "replicate2")
    observations.collect([pair])
    assert starts == []
    assert "KeyError: 'head'" in observations.ranks[pair]


def test_a_case_may_have_layouts_of_its_own():
    own = LayoutCase(ranks=2, parallel={"fsdp": {"reshard_after_forward": False}}, micro_batch_size=1)
    seen = Case("own", observe=settings, compare=lambda ranks, alone: None, layouts={"gathered": own})
    observations = Observations()
    observations.collect([(seen, "gathered")])
    assert observations.ranks[seen, "gathered"] == [(False, 1)] * 2


def settings(folder, changes):
    return changes and (changes["parallel"]["fsdp"].reshard_after_forward, changes["micro_batch_size"])


def test_one_process_is_observed_once_per_case():
    calls = []
    counted = case("counted", lambda folder, changes: calls.append(bool(changes)))
    observations = Observations()
    for layout in ("replicate2", "replicate2"):
        observations.collect([(counted, layout)])
    assert calls == [False]


def request_of(paths, config):
    items = [
        SimpleNamespace(
            path=path,
            nodeid=f"{path}::test_layouts[a-replicate2-2ranks]",
            get_closest_marker=lambda name: None,
            callspec=SimpleNamespace(params={"case": case(path, rank_and_world), "layout": "replicate2"}),
        )
        for path in paths
    ]
    return SimpleNamespace(config=config, path=paths[0], session=SimpleNamespace(items=items))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (SimpleNamespace(), ["one.py", "other.py"]),
        (SimpleNamespace(workerinput={laws.TOGETHER: True}), ["one.py", "other.py"]),
        (SimpleNamespace(workerinput={}), ["one.py"]),
    ],
)
def test_all_files_share_a_start_where_one_process_has_all_of_their_laws(config, names):
    pairs = laws._pairs_of(request_of(["one.py", "other.py"], config), 2)
    assert [one.name for one, _ in pairs] == names
    assert laws._pairs_of(request_of(["one.py"], config), 4) == []


def test_a_test_that_is_none_of_them_is_observed_and_the_others_once(starts):
    request = request_of(["one.py"], SimpleNamespace())
    request.session.stash = pytest.Stash()
    [(other, layout)] = laws._pairs_of(request, 2)
    for own in (case("first", rank_and_world), case("second", rank_and_world)):
        assert laws.observed(request, own, layout) == ([(0, 2), (1, 2)], (0, 1))
    assert laws.observed(request, other, layout) == ([(0, 2), (1, 2)], (0, 1))
    assert starts == [2, 2]


def test_xdist_sends_laws_by_ranks_and_other_tests_by_file():
    [mark] = layout_law(case("lion", rank_and_world)).pytestmark
    [param] = mark.args[1]
    assert param.id == "lion-replicate2-2ranks"
    assert ranks_of(f"a/test_x.py::test_layouts[{param.id}]") == "laws, 2 ranks"
    assert ranks_of("a/test_x.py::test_y[3ranks of 4]") == ""
    chosen = {"dist": "loadfile", "tx": ["2*popen"], "maxschedchunk": None, "loadscopereorder": False}
    config: Any = SimpleNamespace(getoption=chosen.__getitem__, getvalue=chosen.__getitem__)
    scheduler = fixtures.pytest_xdist_make_scheduler(config, MagicMock())
    assert scheduler._split_scope(f"a/test_x.py::test_layouts[{param.id}]") == "laws, 2 ranks"
    assert scheduler._split_scope("a/test_x.py::test_y") == "a/test_x.py"
    chosen["dist"] = "load"
    assert fixtures.pytest_xdist_make_scheduler(config, MagicMock()) is None


# --- resumption ------------------------------------------------------------------------------------------------------


@define(kw_only=True, slots=False)
class Fading(TrainingHook):
    """Scales gradients by a factor that falls from step to step, and that a checkpoint has."""

    factor: float = field(init=False, default=1.0)

    def on_gradients(self, context):
        self.factor *= 0.8
        for parameter in context.model.parameters():
            parameter.grad.mul_(self.factor)


@define(kw_only=True, slots=False)
class Forgetful(Fading):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@define(kw_only=True, slots=False)
class ForgetfulLog(TrainingHook):
    """Changes nothing, and logs a count that no checkpoint has."""

    def __attrs_post_init__(self):
        self.steps = 0

    def on_step_end(self, context):
        self.steps += 1
        context.log("count", self.steps)


@pytest.fixture
def follow(tmp_path_factory):
    """Try a law of one case as pytest does, an interruption after the other."""

    def run(interrupted):
        law = resumption_law(interrupted)
        for param in law.pytestmark[0].args[1]:
            law(tmp_path_factory, *param.values)

    return run


WAYS = ((Stop(step=2),), (Stop(step=1), Die(step=3, event="begin"), Die(step=4), Stop(step=5)))


def interrupted(hook, ways=WAYS, **options):
    return Interrupted("hook", changes=lambda: {"hooks": {"own": hook()}}, interruptions=ways, **options)


def test_a_run_with_all_of_its_state_equals_the_whole_that_runs_once(follow, monkeypatch):
    starts = []
    run = Interrupted.run
    monkeypatch.setattr(
        Interrupted, "run", lambda self, folder, ways=(): [starts.append(ways), run(self, folder, ways)][1]
    )
    follow(interrupted(Fading))
    assert starts == [(), *WAYS]


@pytest.mark.parametrize("ways", WAYS, ids=["once", "often"])
@pytest.mark.parametrize(("hook", "names"), [(Forgetful, ["the metrics", "loss"]), (ForgetfulLog, ["count"])])
def test_a_component_that_forgets_its_state_fails(follow, hook, names, ways):
    with pytest.raises(AssertionError, match=naming("hook", "stop", *names)):
        follow(interrupted(hook, (ways,)))


def test_metrics_may_be_ignored(follow):
    follow(interrupted(ForgetfulLog, ignored_metrics=["count"]))


def test_what_else_must_be_equal_is_compared(follow):
    with pytest.raises(AssertionError, match=naming("`also`")):
        follow(interrupted(Fading, also=lambda summary: str(summary.folder)))


def test_an_interruption_after_the_end_is_an_error(follow):
    with pytest.raises(AssertionError, match=naming("stop 7")):
        follow(interrupted(Fading, ((Stop(step=7),),)))
