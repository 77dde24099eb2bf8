"""What takes long shows that it moves: before the first step, and between steps."""

from __future__ import annotations

import threading
import time

import pytest
from rich.console import Console as Terminal

from forge_core import Trainer, TrainingHook, report_progress
from forge_core.contracts.phase import Phase
from forge_core.engine.build import build_context
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.metrics.console import Console, PlainLogger, showing_progress
from forge_testing.refusals import lacks


@pytest.fixture
def clock(monkeypatch):
    """The seconds that `time.monotonic` shows, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr("forge_core.launch.progress_beacon.time.monotonic", lambda: now[0])
    ProgressBeacon().enter(Phase.START)
    return now


def test_work_of_a_known_amount_says_how_long_it_will_take(clock):
    ProgressBeacon().enter(Phase.READING)
    clock[0] += 100
    report_progress("encoding text", 1, 4)
    clock[0] += 30
    report_progress("encoding text", 3, 4)
    assert ProgressBeacon.describe() == f"{Phase.READING}: encoding text, 75%, 0:00:30 so far, 0:00:10 left"
    report_progress()
    assert ProgressBeacon.describe() == f"{Phase.READING}: encoding text, 75%, 0:00:30 so far, 0:00:10 left"


def test_work_of_an_unknown_amount_says_how_long_it_has_taken(clock):
    ProgressBeacon().enter(Phase.BUILDING)
    clock[0] += 3700
    assert ProgressBeacon.describe() == f"{Phase.BUILDING}, 1:01:40 so far"
    report_progress("layer 7")
    assert ProgressBeacon.describe() == f"{Phase.BUILDING}: layer 7, 1:01:40 so far"


def test_batches_of_an_evaluation_are_one_phase(clock):
    beacon = ProgressBeacon()
    for number in range(1, 4):
        clock[0] += 10
        beacon.enter(Phase.EVALUATION, detail=f"batch {number}")
        report_progress(done=number, total=4)
    assert ProgressBeacon.describe() == "evaluation, 75%, 0:00:20 so far, 0:00:06 left"
    assert str(beacon.position) == "evaluation, batch 3"


def lines_within(capsys, words: str) -> str:
    """Standard output, once these words stand in it."""
    out = ""
    for _ in range(600):
        out += capsys.readouterr().out
        if words in out:
            return out
        time.sleep(0.05)
    raise AssertionError(out)


def test_a_phase_that_lasts_for_a_second_has_a_line(make_job, capsys):
    job = make_job(loggers={"console": Console(style="plain")})
    ProgressBeacon().enter(Phase.READING)
    with showing_progress(job.loggers):
        assert lines_within(capsys, "reading data, 0:00:01 so far\n").count("\n") == 1


def test_a_phase_that_comes_again_has_a_line_only_if_it_is_long(make_job, capsys):
    job, beacon = make_job(loggers={"console": Console(style="plain", every=2.5)}), ProgressBeacon()
    beacon.enter(Phase.EVALUATION)
    with showing_progress(job.loggers):
        assert lines_within(capsys, "so far\n") == "evaluation, 0:00:01 so far\n"
        beacon.enter(Phase.DATA, 2)
        beacon.enter(Phase.EVALUATION)
        assert lines_within(capsys, "so far\n") in ("evaluation, 0:00:02 so far\n", "evaluation, 0:00:03 so far\n")


def test_a_long_step_has_a_line_too_but_later(make_job, capsys):
    job = make_job(loggers={"console": Console(style="plain", every=2.0)})
    ProgressBeacon().enter(Phase.FORWARD_BACKWARD)
    with showing_progress(job.loggers):
        assert f"{Phase.FORWARD_BACKWARD}, 0:00:02 so far" in lines_within(capsys, "so far\n")


def test_nothing_is_shown_where_the_console_is_off(make_job, capsys):
    job = make_job(loggers={"console": Console(style="off", every=0.1)})
    ProgressBeacon().enter(Phase.READING)
    with showing_progress(job.loggers):
        time.sleep(1.5)
    assert capsys.readouterr().out == ""


def test_lines_of_progress_go_to_the_console_whose_line_is_redrawn(make_job, catalog, monkeypatch):
    console = Console(style="live")
    job, printed = make_job(loggers={"console": console}), threading.Event()
    logger = console.build(build_context(job, catalog, None))
    monkeypatch.setattr(logger._progress.console, "print", lambda *text, **how: printed.set())
    ProgressBeacon().enter(Phase.READING)
    with showing_progress(job.loggers):
        assert printed.wait(30)


def test_plain_output_has_a_line_after_some_time_whatever_the_step(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("forge_core.metrics.console.time.perf_counter", lambda: now[0])
    logger = PlainLogger(Terminal(), 100, 50, 60)
    logger.start(0)
    record = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens_per_second": 1.0}
    for step in (1, 2, 3):
        logger.log({"step": step, **record})
    now[0] += 61
    logger.log({"step": 4, **record})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/100", "4/100"]


def test_a_run_that_begins_again_from_nothing_says_so(make_job, train):
    class Fails(TrainingHook):
        def on_step_end(self, context):
            raise ValueError("no more")

    job = make_job(steps=2, checkpoint={"interval": 0})
    with pytest.raises(ValueError, match="no more"):
        train(job, Fails())
    told = []
    Trainer(job, echo=told.append).run()
    assert any(not lacks(text, "first checkpoint", "step 0") for text in told)
