"""When to save: formulas against closed forms and scipy, the hook with a clock of its own and simulated failures."""

from __future__ import annotations

import json
import math
import random
from types import SimpleNamespace

import pytest
from scipy import optimize, stats

from forge_core.contracts.layout import Layout
from forge_plugin_resilience.goodput import Goodput, Interval
from forge_plugin_resilience.goodput.failure_rate import (
    YEAR,
    best_interval,
    effective_time,
    expected_mtbf,
    gamma_quantile,
    mtbf_interval,
    young,
)
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, naming, refuses

HOUR = 3600.0


@pytest.mark.parametrize("shape", [1, 2, 7, 419])
@pytest.mark.parametrize("probability", [0.001, 0.05, 0.5, 0.95, 0.999])
def test_quantiles_are_those_of_scipy(shape, probability):
    assert gamma_quantile(shape, probability) == pytest.approx(stats.gamma.ppf(probability, shape), rel=1e-9)


def test_bounds_of_the_time_between_failures_are_those_of_chi_square():
    low, high = mtbf_interval(54 * 24 * HOUR, 419)
    total = 2 * 54 * 24 * HOUR
    assert low == pytest.approx(total / stats.chi2.ppf(0.95, 2 * 419 + 2))
    assert high == pytest.approx(total / stats.chi2.ppf(0.05, 2 * 419))
    assert mtbf_interval(100.0, 0) == (pytest.approx(100 / -math.log(0.05)), math.inf)


def test_what_was_seen_takes_over_from_what_is_known_of_others():
    prior = 5.8 * YEAR / 16384
    assert prior == pytest.approx(3.1 * HOUR, rel=0.01)  # Llama 3: 419 in 54 days
    assert expected_mtbf(0.0, 0, 16384) == pytest.approx(prior)
    assert expected_mtbf(1000 * HOUR, 999, 16384) == pytest.approx(HOUR, rel=0.01)
    assert expected_mtbf(1000 * HOUR, 0, 16384) > 1000 * HOUR


def fail_at_random(draw, mtbf, ranks, rule, failures=30, blocked=3.0, restart=300.0):
    """The share of time in steps that count, of a run that ends with some failures; `rule` says what is expected."""
    total = useful = exposure = 0.0
    for number in range(failures):
        lived, at, asked_at = draw.expovariate(1 / mtbf), 0.0, -math.inf
        while True:
            if exposure + at >= 1.2 * asked_at:
                asked_at = exposure + at
                interval = best_interval(blocked, rule(asked_at, number, ranks), restart)
            if at + interval + blocked > lived:
                break
            at, useful = at + interval + blocked, useful + interval
        exposure, total = exposure + lived, total + lived + restart
    return useful / total


CLUSTERS = [(ranks, off) for ranks in (1, 8, 64, 1024, 16384) for off in (0.01, 0.1, 1.0, 10.0, 100.0)]


# Where failures are rarer than one a month, the limit of an hour decides
@pytest.mark.parametrize(
    ("ranks", "off"), [each for each in CLUSTERS if each[1] * 5.8 * YEAR / each[0] < 30 * 24 * HOUR]
)
def test_no_prior_that_is_wrong_costs_much(ranks, off):
    """True rates up to 100 times off the prior: 30 failures, of which the first are met without knowledge."""
    mtbf = off * 5.8 * YEAR / ranks
    learnt, known = (
        sum(fail_at_random(random.Random(seed), mtbf, ranks, rule) for seed in range(4)) / 4
        for rule in (expected_mtbf, lambda *_: mtbf)
    )
    assert 1 - learnt < 1.12 * (1 - known)


@pytest.mark.parametrize(("ranks", "hours", "failures"), [(8, 1, 10), (64, 1, 10), (8, 24, 10), (1, 1, 3)])
def test_a_small_cluster_that_fails_often_is_believed_after_a_few_failures(ranks, hours, failures):
    """Up to 50,000 times as often as the prior has it."""
    mtbf = hours * HOUR
    expected = expected_mtbf(failures * mtbf, failures, ranks)
    assert expected == pytest.approx(mtbf, rel=2 / failures)
    best = effective_time(best_interval(3.0, mtbf, 300.0), 3.0, 300.0, mtbf)
    assert effective_time(best_interval(3.0, expected, 300.0), 3.0, 300.0, mtbf) > best - 0.002


@pytest.mark.parametrize(("blocked", "mtbf"), [(60.0, 3.09 * HOUR), (3.0, 3.09 * HOUR), (60.0, 99 * HOUR)])
def test_the_interval_wastes_hardly_more_than_the_best_by_the_exact_formula(blocked, mtbf):
    restart = 900.0
    found = optimize.minimize_scalar(
        lambda tau: -effective_time(tau, blocked, restart, mtbf), bounds=(1.0, 1e5), method="bounded"
    )
    chosen = young(blocked, mtbf, restart)
    assert chosen == pytest.approx(found.x, rel=0.15)
    assert effective_time(chosen, blocked, restart, mtbf) > -found.fun * 0.999


def test_the_exact_formula_is_what_a_simulation_has():
    mtbf, tau, blocked, restart = 3.09 * HOUR, 1114.0, 60.0, 1350.0
    draw, t, useful = random.Random(1), 0.0, 0.0
    failure = draw.expovariate(1 / mtbf)
    while t < 2e8:
        if t + tau + blocked <= failure:
            t, useful = t + tau + blocked, useful + tau
        else:
            t = failure + restart
            failure = t + draw.expovariate(1 / mtbf)
    assert useful / t == pytest.approx(effective_time(tau, blocked, restart, mtbf), rel=0.01)


def test_limits():
    assert best_interval(1.0, 1e9, 0.0) == HOUR
    assert best_interval(60.0, 100.0, 0.0) == 600.0
    assert best_interval(1000.0, 1e9, 0.0) == 10_000.0


# --- the hook ------------------------------------------------------------------------------------------------------


class Clock:
    """A run whose time passes as its test says: the hook's clock, its context, and the events of the run."""

    def __init__(self, folder, **keys):
        self.now, self.folder, self.keys = 0.0, folder, keys
        self.saves = []

    def begin(self, name, ready):
        line = {"event": "start", "start": name, "t": self.now, "began": self.now, "ranks": 1, "from_step": 0}
        self.note(**line)
        self.now += ready
        self.note(event="ready", start=name, t=self.now, s={"import": ready})
        self.name, self.spent = name, {}
        job = SimpleNamespace(checkpoint=SimpleNamespace(interval_minutes=0, interval=0))
        self.context = SimpleNamespace(job=job, folder=self.folder, seconds=self.spent, log=lambda *pair: None, step=0)
        self.hook = type("OnThisClock", (Interval,), {"clock": lambda hook: self.now})(**self.keys)
        self.hook.on_train_begin(self.context)
        self.saved_at = self.saves_from = self.now

    def step(self, seconds, blocked):
        """One step; returns whether a save followed it."""
        asked = []
        self.context.request_checkpoint = lambda: asked.append(True)
        self.hook.on_step_begin(self.context)
        self.now += seconds
        self.hook.on_step_end(self.context)
        if asked:
            self.hook.on_checkpoint_begin(self.context)
            self.saves.append(self.now - self.saved_at)
            self.spent["save"] = self.spent.get("save", 0.0) + blocked
            self.now += blocked
            self.saved_at = self.now
            self.note(event="save", start=self.name, t=self.now, step=0, s={"save": blocked})
        return bool(asked)

    def note(self, **line):
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def test_the_first_save_measures_and_the_others_follow_the_formula(tmp_path, capsys):
    clock = Clock(tmp_path, first_minutes=5, gpu_years=0.08)
    clock.begin("a", 100.0)
    while len(clock.saves) < 3:
        clock.step(1.0, blocked=2.0)
    expected = math.sqrt(2 * 2.0 * (0.08 * YEAR + clock.now + 100))
    assert clock.saves == [300.0, pytest.approx(expected, rel=0.05), pytest.approx(expected, rel=0.05)]
    assert " 53." in capsys.readouterr().out
    while len(clock.saves) < 7:  # the disk has become slow: now the limit of an hour is reached
        clock.step(1.0, blocked=20.0)
    assert clock.saves[-1] == HOUR
    assert capsys.readouterr().out == ""  # by less than a fifth


def test_the_interval_is_that_of_all_ranks_together(tmp_path, monkeypatch):
    monkeypatch.setattr("forge_core.parallel.mesh.world_size", lambda: 1024)
    clock = Clock(tmp_path, first_minutes=1)
    clock.begin("a", 100.0)
    while len(clock.saves) < 2:
        clock.step(1.0, blocked=2.0)
    assert clock.saves[-1] == pytest.approx(math.sqrt(2 * 2.0 * (5.8 * YEAR / 1024)), rel=0.05)


def test_a_share_of_the_time_can_be_asked_for(tmp_path):
    clock = Clock(tmp_path, overhead=0.02, first_minutes=1)
    clock.begin("a", 100.0)
    while len(clock.saves) < 3:
        clock.step(1.0, blocked=10.0)
    assert clock.saves == [60.0, 500.0, 500.0]
    with pytest.raises(ValueError, match=naming("'overhead'", "'auto'", 0, 1, 3.0)):
        Interval(overhead=3.0)


def test_simulated_failures_lead_to_the_best_interval(tmp_path):
    """By a prior that is ten times too good, after some hundred failures."""
    mtbf, blocked, ready, step = 3.0 * HOUR, 60.0, 240.0, 60.0
    draw, clock, useful = random.Random(3), Clock(tmp_path, gpu_years=30 * HOUR / YEAR), 0.0
    failures, lived = 0, 0.0
    while failures < 150:
        clock.begin(f"start {failures}", ready)
        failure = clock.now + draw.expovariate(1 / mtbf)
        since = 0.0
        while clock.now < failure:
            since += step
            if clock.step(step, blocked) and clock.now <= failure:
                useful, since = useful + since, 0.0
        failures += 1
        lived += clock.now - clock.saves_from
        clock.note(event="steps", start=clock.name, t=clock.now, first=1, step=1, n=1, s={})
    best = young(blocked, lived / failures, ready)
    assert clock.hook._seconds == pytest.approx(best, rel=0.05)
    assert useful / clock.now == pytest.approx(effective_time(best, blocked, ready, lived / failures), rel=0.03)


def test_other_clocks_of_saves_are_refused(make_job):
    def problems(**checkpoint):
        job = make_job(hooks={"interval": Interval(), "goodput": Goodput()}, checkpoint=checkpoint)
        return list(Interval().problems(job, Layout()))

    assert problems(interval=0, interval_minutes=0) == []
    assert problems(interval=50, interval_minutes=0, keep_every=50) == []
    check_problems(
        problems(interval=50, interval_minutes=30),
        at("", "checkpoint.interval_minutes is 30", "checkpoint.interval_minutes = 0"),
        at("", "checkpoint.interval is 50", "checkpoint.interval = 0", "checkpoint.keep_every"),
    )
    with refuses("", "checkpoint.interval is 50"):  # a hook that comes from Python
        Interval().on_train_begin(SimpleNamespace(job=make_job(checkpoint={"interval": 50, "interval_minutes": 0})))
    alone = make_job(checkpoint={"interval": 0, "interval_minutes": 0})
    check_problems(Interval().problems(alone, Layout()), at("", "events.jsonl", "[hooks.goodput]"))


def test_ranks_save_when_the_first_asks(make_job, train):
    def rank(number):
        hooks = {"goodput": Goodput(), "interval": Interval(first_minutes=1e-9, longest_minutes=1e-9)}
        job = make_job(hooks=hooks, checkpoint={"interval": 0, "interval_minutes": 0})
        return sorted(path.name for path in (train(job).folder / "checkpoints").iterdir())

    first, second = run_on_ranks(2, rank)
    assert first == second
    assert "step-1" in first
