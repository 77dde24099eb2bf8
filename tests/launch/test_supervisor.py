"""The supervisor over commands that are not Forge: whose error it tells, with which exit code, and nobody is left."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_core.contracts.errors import ExitCode
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.supervisor import Supervisor
from forge_testing.refusals import lacks

from .conftest import alive, wait_until

RANK = """
import json, os, signal, socket, sys, time

rank = int(os.environ["RANK"])
launcher = socket.socket(fileno=int(os.environ["FORGE_LAUNCHER_FD"]))


def say(text, code, echo=False):
    words = {"rank": rank, "code": code, "text": text, "time": time.monotonic(), "echo": echo}
    launcher.sendall(json.dumps(words).encode() + b"\\n")
    sys.exit(code)


def finish():
    launcher.send(b".")


open(f"rank-{rank}", "w").write(str(os.getpid()))
while not (os.path.exists("rank-0") and os.path.exists("rank-1")):  # on a busy machine one starts long after the other
    time.sleep(0.01)
"""


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Run a script as two ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("forge_kit.tools.supervisor.FAREWELL_S", 0.5)

    def run(script, **limits):
        command = [sys.executable, "-c", RANK + textwrap.dedent(script)]
        return Supervisor(command, 2, tmp_path / "logs", **{"grace_s": 0.0, **limits}).run()

    yield run
    for rank in (0, 1):
        assert not alive(int((tmp_path / f"rank-{rank}").read_text()))


def test_ranks_know_their_number_and_share_an_address(supervise, tmp_path):
    script = """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    open(f"told-{rank}", "w").write(" ".join(os.environ[name] for name in names))
    finish()
    """
    assert supervise(script).code == 0
    first, second = ((tmp_path / f"told-{rank}").read_text().split() for rank in (0, 1))
    assert first[:5] == ["0", "0", "2", "2", "127.0.0.1"]
    assert second[:5] == ["1", "1", "2", "2", "127.0.0.1"]
    assert first[5:] == second[5:]


@pytest.mark.parametrize("code", [1, 2, 76])
def test_the_exit_code_is_that_of_the_rank_that_failed(supervise, code):
    ended = supervise(f"say('why', {code}) if rank else time.sleep(600)")
    assert (ended.code, ended.message) == (code, "why")


def test_the_first_to_fail_is_told_not_what_it_caused(supervise):
    ended = supervise("time.sleep(0 if rank else 0.1); say(f'error of {rank}', 1)")
    assert ended.message == "error of 1"


def test_an_echo_is_never_the_cause(supervise):
    ended = supervise("say('ended by the other', 76, echo=True) if rank else (time.sleep(0.1), say('cause', 76))")
    assert (ended.code, ended.message) == (76, "cause")


def test_a_lost_rank_comes_before_those_that_lost_the_connection_to_it(supervise):
    ended = supervise("time.sleep(0.1), os.kill(os.getpid(), 9) if rank else say('connection closed by peer', 1)")
    assert ended.code == 1
    assert not lacks(ended.message, "rank 1", "SIGKILL")


def test_an_abort_is_not_the_cause(supervise):
    ended = supervise("os.abort() if rank else (time.sleep(0.1), say('cause', 1))")
    assert ended.message == "cause"


def test_ranks_that_have_saved_end_with_75(supervise):
    assert supervise("sys.exit(75)").code == ExitCode.STOPPED


def test_a_rank_that_leaves_with_0_before_its_work_is_done_is_the_cause(supervise):
    ended = supervise("os._exit(0) if rank else (time.sleep(0.1), say('connection reset by peer', 1))")
    assert ended.code == 1
    assert not lacks(ended.message, "rank 1", "exit code 0")


def test_a_rank_says_that_its_work_is_done_before_it_can_exit(supervise):
    """On a busy machine, it may have exited before its thread that watches the exit runs."""
    script = """
        import threading
        from forge_core.launch.rank_process import RankProcess

        threading.Thread.start = lambda thread: None
        process = RankProcess()
        with process.stoppable():
            process.finish()
            os._exit(0)
    """
    assert supervise(script).code == ExitCode.FINISHED


def test_a_rank_that_is_frozen_at_its_exit_is_named_once_another_has_finished(supervise):
    script = "time.sleep(0.2); finish(); rank or sys.exit(0); os.kill(os.getpid(), signal.SIGSTOP)"
    ended = supervise(script, silence_s=0.5)
    assert ended.code == 1
    assert not lacks(ended.message, "rank 1", "exit", "0.5 s (launch.silence_timeout_s)")


def test_a_rank_that_gives_signs_of_life_at_its_exit_is_waited_for(supervise):
    assert supervise("for _ in range(15 * rank + 1): finish(), time.sleep(0.1)", silence_s=1.0).code == 0


@pytest.mark.parametrize("text", ["\u6587" * 60_000, "x" * 3_000_000, "\udc80" * 60_000])
def test_a_long_error_reaches_the_launcher_with_its_head_and_its_end(supervise, text):
    """Nobody reads the socket before the rank has exited: what is larger than its buffer would never arrive."""
    script = f"""
    from forge_core.launch.failure_report import report_of
    if rank:
        try:
            raise ValueError("begins" + {text[:1]!r} * {len(text)} + "ends")
        except ValueError as error:
            report = report_of(1, error)
        launcher.sendall(report.to_json().encode() + b"\\n")
        sys.exit(1)
    time.sleep(600)
    """
    ended = supervise(script)
    head, left_out, tail = ended.message.partition("bytes left out")
    assert "forge-run: rank 1 failed:\nTraceback" in head
    assert "ValueError: begins" in head
    assert left_out
    assert "ends\n" in tail or tail.endswith("ends")
    assert len(ended.message.encode()) < 30_000


def later(seconds, *signals):
    def send():
        assert wait_until(lambda: Path("rank-0").exists() and Path("rank-1").exists())
        for number in signals:
            time.sleep(seconds)
            os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


def test_a_signal_is_passed_on_by_the_socket_and_not_as_a_signal(supervise, tmp_path):
    later(1, signal.SIGUSR1)
    script = "open(f'told-{rank}', 'w').write(str(launcher.recv(64)[-1])); sys.exit(75)"
    assert supervise(script).code == ExitCode.STOPPED
    assert {(tmp_path / f"told-{rank}").read_text() for rank in (0, 1)} == {str(int(signal.SIGUSR1))}


def test_a_second_signal_kills(supervise):
    later(1, signal.SIGTERM, signal.SIGINT)
    assert supervise("time.sleep(600)").code == ExitCode.SECOND_SIGNAL


def test_after_the_grace_period_ranks_are_killed(supervise):
    later(1, signal.SIGTERM)
    ended = supervise("time.sleep(600)", grace_s=1.0)
    assert ended.code == 1
    assert not lacks(ended.message, "rank 0, 1", "launch.grace_s = 1 s")


def test_one_rank_that_stops_before_training_stops_the_others(supervise):
    ended = supervise("sys.exit(75) if rank else sys.exit(75 if launcher.recv(64) else 1)")
    assert (ended.code, ended.message) == (ExitCode.STOPPED, "")


def test_a_rank_that_dies_of_a_request_to_stop_has_stopped(supervise):
    ended = supervise("os.kill(os.getpid(), signal.SIGTERM) if rank else time.sleep(600)")
    assert (ended.code, ended.message) == (ExitCode.STOPPED, "")


def test_the_children_of_a_rank_are_killed_with_it(supervise, tmp_path):
    script = """
    import subprocess
    if rank:
        child = subprocess.Popen(["sleep", "600"])
        open("child", "w").write(str(child.pid))
        time.sleep(600)
    while not os.path.exists("child"):
        time.sleep(0.05)
    time.sleep(0.1)
    say("why", 1)
    """
    assert supervise(script).code == 1
    child = int((tmp_path / "child").read_text())
    assert wait_until(lambda: not alive(child))


def test_a_stopped_process_of_a_rank_that_died_is_killed(supervise, tmp_path):
    """As a data worker is that is frozen: the rank ends by itself, since it hangs."""
    script = """
    import subprocess
    if rank:
        child = subprocess.Popen(["sleep", "600"])
        child.send_signal(signal.SIGSTOP)
        open("child", "w").write(str(child.pid))
        say("why", 1)
    time.sleep(600)
    """
    assert supervise(script).code == 1
    child = int((tmp_path / "child").read_text())
    assert wait_until(lambda: not alive(child), 10)


def test_a_rank_starts_no_ranks(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "job.toml", "--nproc=2"]) == ExitCode.BAD_JOB
    assert not lacks(capsys.readouterr().err, "--nproc", "4 ranks")


def test_ranks_start_no_further_ranks(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "job.toml", "--nproc=2"]) == ExitCode.BAD_JOB
    assert not lacks(capsys.readouterr().err, "--nproc", "one of 2 ranks already")


def test_without_a_launcher_nproc_names_what_installs_one(monkeypatch, capsys):
    others = [offer for offer in Catalog.installed().offers() if offer.distribution.name != "forge-kit"]
    monkeypatch.setattr(Catalog, "installed", lambda: Catalog(others))
    assert main(["run", "job.toml", "--nproc=2"]) == ExitCode.BAD_JOB
    assert not lacks(capsys.readouterr().err, "'launch local'", "pip install forge-kit")
