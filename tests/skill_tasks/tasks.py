"""Tasks for an assistant, with an outcome that a program judges: what is asked, what is there, what must hold.

`tasks.toml` has them. A task begins in a folder with `job.toml`, `texts` and the run `runs/tiny`, to which its table
`before` adds. Its checks look at files, runs and jobs that are there afterwards, and at `answer.txt`, never at how an
assistant got there. `right` and `wrong` are outcomes that a test judges.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from forge_core import JobError, dump_job, load_job
from forge_core.cli import main
from forge_core.config.tree import read_text

FILE = Path(__file__).with_name("tasks.toml")
ANSWER = "answer.txt"
HEAD = f"Answers in words go to the file {ANSWER} in this folder. Work in this folder only. "
"""What every prompt begins with."""


@frozen(kw_only=True)
class Outcome:
    """Files to write, and lines of a shell to run after that."""

    files: Mapping[str, str] = {}
    run: str = ""

    def make(self) -> None:
        """Make it in the working directory.

        Raises:
            AssertionError: a line failed.
        """
        for name, text in self.files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        for line in filter(None, self.run.splitlines()):
            code, output = run(line)
            assert code == 0, f"{line}\n{output}"


@frozen(kw_only=True)
class Task:
    """One task. `checks` are tables, each with the name of its check and what that takes."""

    id: str
    skill: str
    prompt: str
    before: Outcome = Outcome()
    right: Outcome
    wrong: Sequence[Outcome]
    checks: Sequence[Mapping[str, Any]]
    unchanged: Sequence[str] = field(default=("runs/tiny",))
    """Folders and files that must be as they were."""


def read_tasks() -> list[Task]:
    """Returns all tasks."""
    return [_task(table) for table in tomllib.loads(FILE.read_text())["tasks"]]


def _task(table: Mapping[str, Any]) -> Task:
    outcomes = {key: Outcome(**table.get(key, {})) for key in ("before", "right")}
    return Task(**{**table, **outcomes, "wrong": [Outcome(**each) for each in table["wrong"]]})


def run(line: str) -> tuple[int, str]:
    """Run a line: a command of ours in this process, all else by a shell. Returns exit code and output."""
    words = shlex.split(line) if "forge-run" in line else []
    # A plan wants a process of its own
    if words[:1] == ["forge-run"] and words[1] != "plan" and not {"|", ">", ";", "&&"} & set(words):
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return main(words[1:]), output.getvalue()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


# --- checks ----------------------------------------------------------------------------------------------------------


def faults(task: Task, before: Mapping[str, str]) -> list[str]:
    """Returns what does not hold in the working directory; empty if the task is done.

    Args:
        task: the task.
        before: `digests(task)` before an assistant began.
    """
    found = [line for check in task.checks for line in _faults_of(check)]
    return found + [f"{name} was changed" for name, digest in digests(task).items() if digest != before[name]]


def digests(task: Task) -> dict[str, str]:
    """Returns SHA-256 of what must not change, by its name."""
    return {name: _digest(Path(name)) for name in task.unchanged}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        # Pictures and locks are not a run's record
        if file.is_file() and file.name != ".lock" and file.suffix not in (".png", ".html"):
            digest.update(str(file).encode() + file.read_bytes())
    return digest.hexdigest()


def _faults_of(check: Mapping[str, Any]) -> Iterator[str]:
    arguments = dict(check)
    name = arguments.pop("check")
    try:
        yield from CHECKS[name](**arguments)
    except (OSError, ValueError, KeyError, JobError) as error:
        yield f"{name}: {type(error).__name__}: {error}"


def _job(files: Sequence[str], keys: Mapping[str, Any] = {}, ranks: int = 1) -> Iterator[str]:
    """Job files pass the check on so many ranks, and have these keys when resolved."""
    yield from _lacking(dump_job(load_job(*files, world_size=ranks)), keys)


def _lacking(resolved: str, keys: Mapping[str, Any]) -> Iterator[str]:
    table = read_text(resolved, "job.toml")
    for key, value in keys.items():
        there = table.innermost(key)
        plain = there.plain()
        plain = plain.rpartition("/")[2] if key.endswith("type") and isinstance(plain, str) else plain
        if plain != value:
            yield f"{key} is {plain!r}, not {value!r}"


def _run(folder: str, steps: int, keys: Mapping[str, Any] = {}, first_step: int = 1) -> Iterator[str]:
    """A run has finished at this step, with these keys in its job; its first step is this."""
    end = json.loads(Path(folder, "end.json").read_text())
    if (end["cause"], end["step"]) != ("finished", steps):
        yield f"{folder} ended: {end['cause']} at step {end['step']}"
    records = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    first = next(record["step"] for record in records if "loss" in record)
    if first != first_step:
        yield f"{folder} begins at step {first}, not {first_step}"
    yield from _lacking(Path(folder, "job.toml").read_text(), keys)


def _answer(pattern: str) -> Iterator[str]:
    """The whole answer is this, but for case and blanks around it."""
    text = Path(ANSWER).read_text().strip().strip("`.\"'")
    if not re.fullmatch(pattern, text, re.IGNORECASE | re.DOTALL):
        yield f"the answer is {text[:200]!r}"


def _command(line: str, code: int = 0, output: str = "") -> Iterator[str]:
    """A command exits so, and prints something that has this."""
    got, text = run(line)
    if got != code or not re.search(output, text, re.DOTALL):
        yield f"{line} exits with {got}: {text[-300:]}"


def _file(name: str, has: Sequence[str]) -> Iterator[str]:
    """A text file has all of these patterns."""
    text = Path(name).read_text()
    yield from (f"{name} lacks {pattern}" for pattern in has if not re.search(pattern, text, re.MULTILINE))


def _kit(component: str, suite: str, body: str = "") -> Iterator[str]:
    """A component of a local file passes the suite of its kind, with these methods."""
    module, _, name = component.partition(":")
    test = Path("test_of_the_judge.py")
    head = f"from {Path(module).stem} import {name}\nfrom forge_testing.suites import {suite}\n"
    methods = textwrap.indent(body, "    ")
    test.write_text(f"{head}class TestIt({suite}):\n    component = {name}()\n{methods}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", ".", str(test)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    test.unlink()
    if done.returncode:
        yield f"the suite fails: {done.stdout[-600:]}"


CHECKS: Mapping[str, Callable[..., Iterator[str]]] = {
    "job": _job,
    "run": _run,
    "answer": _answer,
    "command": _command,
    "file": _file,
    "kit": _kit,
}
