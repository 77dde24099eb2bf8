"""`forge-run watch`: lines of a run as they come, here and through ssh, and one picture of them."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_core.checkpoint.run_folder import owned
from forge_core.cli import main
from forge_core.metrics.jsonl import JsonLinesLogger
from forge_plugin_runs.watch import command as watch_command
from forge_plugin_runs.watch import remote
from forge_plugin_runs.watch.braille import curve, visible_range
from forge_plugin_runs.watch.follow import FollowedFile
from forge_plugin_runs.watch.run_state import LocalRun, RemoteRun, WatchedRun
from forge_testing.refusals import lacks

SSH = """#!{python} -SE
import pathlib, subprocess, sys, threading

home = pathlib.Path("{home}")
with (home / "hosts").open("a") as hosts:
    hosts.write(sys.argv[1] + "\\n")
if (home / "down").exists():
    print("ssh: connect to host: No route to host", file=sys.stderr)
    sys.exit(255)
if (home / "talks").exists():
    print("debug1: " * 40_000, file=sys.stderr, flush=True)  # more than a pipe holds
# With pipes of its own: when this process goes, they break, as a connection does
command = " ".join(sys.argv[2:])
child = subprocess.Popen(["sh", "-c", command], cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def copy(source, target):
    while part := source.read1():
        target.write(part)
        target.flush()


threads = [
    threading.Thread(target=copy, args=pair, daemon=True)
    for pair in ((child.stdout, sys.stdout.buffer), (child.stderr, sys.stderr.buffer))
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(child.wait())
"""
"""Runs here what it is given for a host; fails while there is a file `down`."""


def line(step: int, loss: float = 1.0, **more: Any) -> dict[str, Any]:
    known = {"tokens": 512 * step, "tokens_per_second": 512.0, "step_seconds": 1.0, "lr": 1e-3, "grad_norm": 0.5}
    return {"step": step, "loss": loss, "time": time.time() - 50 + step, **known, **more}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with ten steps of forty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    run = tmp_path / "runs/my run"
    (run / "logs").mkdir(parents=True)
    (run / "job.toml").write_text('[job]\nname = "run"\n[train]\nsteps = 40\n')
    (run / "provenance.json").write_text("{}")
    (run / ".lock").touch()
    logger = JsonLinesLogger(run / "metrics.jsonl")
    logger.start(0)
    for step in range(1, 11):
        logger.log(line(step, 5.0 - step / 10))
    logger.log({"step": 10, "eval/loss": 4.25, "time": time.time()})
    logger.close()
    return run


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `ssh` that runs what it is given here, in a home folder of its own."""
    fake = tmp_path / "bin/ssh"
    fake.parent.mkdir()
    fake.write_text(SSH.format(python=sys.executable, home=tmp_path))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def wait_for(run: WatchedRun, condition: Callable[[], bool]) -> None:
    """Poll until something holds, for ten seconds at most."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, f"not seen: step {run.step}, {run.state}, {run.problem}"
        run.poll()
        time.sleep(0.02)


def append(run: Path, *records: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


class TestFollowing:
    def test_a_line_is_taken_when_it_is_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        followed = FollowedFile(path)
        assert followed.lines() == []
        path.write_bytes(b"one\ntw")
        assert followed.lines() == [b"one"]
        with path.open("ab") as file:
            file.write(b"o\n")
        assert followed.lines() == [b"two"]

    def test_a_run_that_continues_takes_back_its_later_steps(self, folder: Path) -> None:
        run = LocalRun(folder)
        run.poll()
        assert (run.step, list(run.evaluations)) == (10, [10])
        resumed = JsonLinesLogger(folder / "metrics.jsonl")
        resumed.start(6)  # another file takes the name
        run.poll()
        resumed.log(line(7, 9.0))
        run.poll()
        assert (run.step, run.last["loss"], list(run.evaluations)) == (7, 9.0, [])
        assert list(run.steps) == [*range(1, 8)]
        resumed.close()

    def test_a_job_that_is_written_later_names_the_file(self, folder: Path) -> None:
        job = (folder / "job.toml").read_text()
        (folder / "job.toml").unlink()
        (folder / "metrics.jsonl").rename(folder / "lines.jsonl")
        run = LocalRun(folder)
        run.poll()
        assert not run.steps
        (folder / "job.toml").write_text(job + '[loggers.jsonl]\nfile = "lines.jsonl"\n')
        run.poll()
        assert run.step == 10

    def test_a_file_that_was_cut_is_read_again(self, folder: Path) -> None:
        run = LocalRun(folder)
        run.poll()
        (folder / "metrics.jsonl").write_text(json.dumps(line(1, 7.0)) + "\n")
        run.poll()
        assert list(run.steps) == [1]

    def test_only_the_end_of_a_large_file_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b"first\nsecond\nthird\n")
        assert FollowedFile(path, window=9).lines() == [b"nd", b"third"]


class TestOnce:
    def test_a_picture_has_step_loss_pace_what_is_left_and_signs_of_life(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with owned(folder):
            os.utime(folder / ".lock", (0, time.time() - 100))
            append(folder, *(line(step, 4.0, time=time.time() - (21 - step)) for step in range(11, 21)))
            append(folder, line(21, 4.0, time=time.time()))
            assert main(["watch", str(folder), "--once"]) == 0
        out = capsys.readouterr().out
        assert re.search(r"step 21 of 40 \(52%\)  about 4\d s left", out)
        assert re.search(r"alive, last line \d s ago", out)
        assert "loss 4.0000  grad norm 0.5  lr 0.001  512 tokens/s" in out
        assert "eval/loss 4.2500 at step 10" in out
        assert re.search(r"4\.9 │[⠀-⣿]+", out)

    def test_a_run_without_lines_for_long_is_silent(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with owned(folder):
            os.utime(folder / ".lock", (0, time.time() - 1000))
            append(folder, *(line(step, time=time.time() - 240 + step) for step in range(1, 11)))
            assert main(["watch", str(folder), "--once"]) == 0
        assert "silent for 3 min" in capsys.readouterr().out

    def test_several_runs_and_numbers_and_the_last_words_of_ranks(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "logs/rank-3.log").write_text("--- 2026\nrank 2 on node7 has been silent for 15 s\n")
        (folder / "logs/rank-1.log").write_text("--- 2026-11-25 process 12\n")
        other = folder.parent / "other"
        other.mkdir()
        (other / ".lock").touch()
        arguments = ["watch", str(folder), str(other), "--once", "--curve", "eval/loss", "--curve", "none"]
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert re.search(r"rank-3, \d s ago: rank 2 on node7 has been silent for 15 s", out)
        assert "rank-1" not in out  # the heading of a start
        assert out.count("none: ") == 2
        assert "died" in out  # nobody owns the folder, and 10 of 40 steps are made

    def test_what_is_no_run_is_refused(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["watch", "runs/nothing", "--once"]) == 2
        assert not lacks(capsys.readouterr().err, "runs/nothing", "runs/my run")


class TestLive:
    def test_pictures_follow_until_ctrl_c(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            append(folder, line(10 + len(slept)))
            if len(slept) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(watch_command.time, "sleep", sleep)
        assert main(["watch", str(folder), "--interval", "0.5"]) == 0
        assert slept == [0.5] * 3
        assert re.findall(r"step (\d+) of 40", capsys.readouterr().out) == ["10", "11", "12"]


class TestRemote:
    def test_one_picture_through_ssh(self, folder: Path, ssh: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "logs/rank-1.log").write_text("late in all_reduce\n")
        with owned(folder):
            os.utime(folder / ".lock", (0, time.time() - 100))
            assert main(["watch", "me@node1:~/runs/my run", "--once"]) == 0
        out = capsys.readouterr().out
        assert "me@node1:~/runs/my run" in out
        assert "step 10 of 40 (25%)" in out
        assert "alive, last line" in out
        assert re.search(r"rank-1, \d s ago: late in all_reduce", out)
        assert (ssh / "hosts").read_text() == "me@node1\n"

    def test_it_is_followed_through_a_resume_and_a_lost_connection(
        self, folder: Path, ssh: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote, "AGAIN_S", 0.1)
        run = RemoteRun("node1", "runs/my run")
        wait_for(run, lambda: run.step == 10 and run.total == 40)
        assert run.state == "not running"
        append(folder, line(11))
        wait_for(run, lambda: run.step == 11)
        resumed = JsonLinesLogger(folder / "metrics.jsonl")
        resumed.start(6)
        resumed.log(line(7, 9.0))
        wait_for(run, lambda: run.step == 7 and run.last["loss"] == 9.0)
        (ssh / "down").touch()
        run.close()  # as if the network had gone
        wait_for(run, lambda: "exit code 255: ssh: connect to host: No route to host" in run.problem)
        (ssh / "down").unlink()
        resumed.log(line(8))
        wait_for(run, lambda: run.step == 8 and not run.problem)
        resumed.close()
        run.close()

    def test_a_closed_connection_leaves_no_tail_behind(
        self, folder: Path, ssh: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote, "SCRIPT", remote.SCRIPT.replace("sleep 5", "sleep 0.1"))
        # GNU's notices itself that nobody reads; others wait for the next line of the run
        (ssh / "bin/tail").write_text("#!/bin/sh\ncat metrics.jsonl\nexec sleep 300\n")
        (ssh / "bin/tail").chmod(0o755)
        run = RemoteRun("node1", "runs/my run")
        wait_for(run, lambda: run.step == 10)
        assert list(tails(folder))
        run.close()
        end = time.monotonic() + 10
        while list(tails(folder)):
            assert time.monotonic() < end, "tail is still there"
            time.sleep(0.05)

    def test_an_ssh_that_talks_much_does_not_stop(
        self, folder: Path, ssh: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (ssh / "talks").touch()
        assert main(["watch", "node1:runs/my run", "--once"]) == 0
        assert "my run" in capsys.readouterr().out

    def test_what_ssh_says_is_the_error(self, folder: Path, ssh: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["watch", "node1:runs/none", "--once"]) == 1
        assert not lacks(capsys.readouterr().err, "node1:runs/none", "exit code 3")
        assert main(["watch", "node1:bin", "--once"]) == 1
        assert not lacks(capsys.readouterr().err, "bin", "run folder")


def tails(folder: Path) -> Iterator[str]:
    """Processes that the fake `tail` has become in this folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(folder) and b"sleep\x00300" in (process / "cmdline").read_bytes():
                yield process.name
        except OSError:
            continue


class TestCurve:
    def test_it_rises_from_lower_left_to_upper_right(self) -> None:
        lines, span = curve([0, 1, 2, 3], [0, 1, 2, 3], 2, 1)
        assert (lines, span) == (["⡠⠊"], (0, 3))

    def test_a_spike_is_seen_and_does_not_flatten_the_rest(self) -> None:
        values = [1 + (step % 7) / 10 for step in range(5000)]
        values[2500] = 1e6
        low, high = visible_range(values)
        assert (low, high) == (1.0, 1.6)
        values[2500] = 2.0
        lines, _ = curve(list(range(5000)), values, 40, 6)
        assert lines[0].strip("⠀") != ""
        assert len(lines[0].strip("⠀")) <= 2

    def test_values_that_are_not_finite_leave_a_gap(self) -> None:
        lines, _ = curve([0, 1, 2], [1.0, float("nan"), 1.0], 4, 1)
        assert len(lines[0]) == 4
        assert curve([0], [float("nan")], 3, 1)[0] == ["⠀⠀⠀"]
