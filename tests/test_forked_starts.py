"""A process of `forge-run` that tests start by a fork is what one started by `exec` is, and so are its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forked_starts
import pytest

from forge_testing import TINY_JOB

pytestmark = pytest.mark.slow

FACTS = """
import json, os, signal, sys
from attrs import define
from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Facts(TrainingHook):
    def on_step_end(self, context):
        if context.step < context.job.train.steps:
            return
        rank = os.environ.get("RANK", "0")
        facts = {
            "argv": sys.argv[1:],
            "path": sys.path[:2],
            "folder": os.getcwd(),
            "main": sys.modules["__main__"].__name__,
            "own session": os.getsid(0) == os.getpid(),
            "parent": os.getppid(),
            "streams": [os.path.basename(os.path.realpath(f"/proc/self/fd/{number}")) for number in range(3)],
            "stdout": [sys.stdout.encoding, sys.stdout.errors, getattr(sys.stdout, "write_through", None)],
            "variables": sorted(os.environ),
            "signals": [getattr(signal.getsignal(n), "__qualname__", str(n)) for n in signal.valid_signals()],
        }
        with open(f"facts-{rank}.json", "w") as file:
            json.dump(facts, file)
"""


def started(folder, **environment: str):
    """What the last rank of a run says of itself, its loss, and how the run ended."""
    folder.mkdir()
    (folder / "site").mkdir()
    (folder / "facts.py").write_text(FACTS)
    (folder / "job.toml").write_text('[job]\nname = "tiny"\n' + TINY_JOB)
    command = [
        sys.executable,
        "-m",
        "forge_core",
        "job.toml",
        "--hooks.facts.type=./facts.py:Facts",
        "--nproc=2",
    ]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | environment | {"PYTHONPATH": str(folder / "site")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert os.getsid(process.pid) == process.pid
    code = process.wait()
    facts = json.loads((folder / "facts-1.json").read_text())
    rows = [json.loads(line) for line in (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    child = facts.pop("parent") == process.pid
    places = {name: facts.pop(name) for name in ("path", "folder")}
    assert places == {"path": [str(folder), str(folder / "site")], "folder": str(folder)}
    facts["variables"] = set(facts["variables"]) - {forked_starts.REAL}
    return code, child, facts, [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def test_it_is_what_one_started_by_exec_is(tmp_path):
    forked = started(tmp_path / "forked")
    executed = started(tmp_path / "executed", **{forked_starts.REAL: "1"})
    assert forked == executed
    assert forked[:2] == (0, True)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED", forked_starts.REAL])
def test_what_an_interpreter_reads_once_is_not_forked(name):
    same = dict(os.environ)
    assert forked_starts._alike(same)
    assert not forked_starts._alike({**same, name: "3"})


@pytest.mark.parametrize(("file", "forks"), [("mine.py", True), ("attrs.py", False), ("sitecustomize.py", False)])
def test_a_path_is_taken_on_unless_it_has_what_is_imported_already(tmp_path, file, forks):
    (tmp_path / file).touch()
    assert forked_starts._alike(os.environ | {"PYTHONPATH": str(tmp_path)}) is forks


ENDINGS = ["", "raise SystemExit(3)", "raise SystemExit('no')", "raise KeyboardInterrupt", "raise ValueError('no')"]


@pytest.mark.parametrize("statement", ENDINGS)
def test_a_fork_ends_as_an_interpreter_does(tmp_path, statement):
    (tmp_path / "ending.py").write_text(f"print('out')\n{statement}\n")
    run = f"forked_starts._run_and_end(forked_starts.Start('ending', [], {str(tmp_path)!r}, {{}}, False))"
    environment = os.environ | {"PYTHONPATH": str(Path(forked_starts.__file__).parent)}
    ended = [
        subprocess.run([sys.executable, *line], cwd=tmp_path, env=environment, capture_output=True, text=True)
        for line in (("-m", "ending"), ("-c", f"import forked_starts; {run}"))
    ]
    first, second = ((done.returncode, done.stdout, done.stderr.splitlines()[-1:]) for done in ended)
    assert first == second
