"""Runs the tasks of `tasks.toml` with an assistant, with and without the skill, and keeps the outcomes.

    python tests/skill_tasks/run_tasks.py --assistant 'claude -p {prompt}' --target claude --out results

The assistant is a command of a shell, which gets the prompt, quoted, in place of `{prompt}`, and works in a new folder
outside of the repository. Each task is run twice: with its skill installed there, and without. `results.jsonl` has a
line for each, with the output of the assistant, and `results.md` the table. A folder with results is continued.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import asdict, frozen

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "docs")]

from skill_world import make_world  # noqa: E402
from tasks import HEAD, Task, digests, faults, read_tasks  # noqa: E402

from forge_plugin_author.skill_files import install, select_skills, target_folder  # noqa: E402

LINES, TABLE = "results.jsonl", "results.md"
MOST = 20_000
"""Characters of an assistant's output that are kept, from its end."""


@frozen
class Result:
    """Outcome of a task."""

    task: str
    skill: str
    with_skill: bool
    assistant: str
    faults: list[str]
    """What the judge found; empty if the task is done."""
    seconds: float
    code: int | None
    """Exit code of the assistant; None if it took too long."""
    output: str


def judged(
    task: Task,
    world: Path,
    folder: Path,
    assistant: str,
    with_skill: bool,
    target: str = "agents",
    time_limit: float = 900,
) -> Result:
    """Run a task with an assistant in a folder that is made, and judge it.

    Args:
        task: the task.
        world: what the folder begins as.
        folder: where the assistant works.
        assistant: its command, with `{prompt}`.
        with_skill: whether the skill of the task is installed.
        target: for which assistant; see `forge-run skills install`.
        time_limit: seconds.
    """
    shutil.copytree(world, folder)
    with contextlib.chdir(folder):
        task.before.make()
        if with_skill:
            install(select_skills([task.skill]), target_folder(target))
        before, began = digests(task), time.monotonic()
        code, output = _answered(assistant.replace("{prompt}", shlex.quote(HEAD + task.prompt)), time_limit)
        seconds = round(time.monotonic() - began, 1)
        found = [f"it took longer than {time_limit:g} s"] if code is None else []
        found += faults(task, before)
    return Result(task.id, task.skill, with_skill, assistant, found, seconds, code, output[-MOST:])


def _answered(command: str, time_limit: float) -> tuple[int | None, str]:
    # A session of its own, so that whatever the assistant has started ends with it
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return _waited(process, time_limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _waited(process: subprocess.Popen[str], time_limit: float) -> tuple[int | None, str]:
    try:
        output, _ = process.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired as error:
        text = error.output or b""
        return None, text.decode(errors="replace") if isinstance(text, bytes) else text
    return process.returncode, output


def table(results: Sequence[Result], assistant: str) -> str:
    """Returns the results as a table in Markdown: how often each task was done, without the skill and with it."""
    lines = [
        f"Assistant: `{assistant}`.",
        "",
        "| skill | task | without the skill | with it |",
        "|---|---|---|---|",
    ]
    for skill, task in dict.fromkeys((each.skill, each.task) for each in results):
        of_task = [each for each in results if each.task == task]
        lines.append(f"| {skill} | {task} | {_share(of_task, False)} | {_share(of_task, True)} |")
    lines.append(f"| all | | {_share(results, False)} | {_share(results, True)} |")
    return "\n".join(lines) + "\n"


def _share(results: Iterable[Result], with_skill: bool) -> str:
    outcomes = [not each.faults for each in results if each.with_skill == with_skill]
    return f"{sum(outcomes)} of {len(outcomes)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assistant", required=True, help="command of a shell, with {prompt}")
    parser.add_argument("--target", default="agents", help="where it looks for skills (agents)")
    parser.add_argument("--task", action="append", help="one task; repeat it for more (all)")
    parser.add_argument("--repeat", type=int, default=1, help="how often each is run (1)")
    parser.add_argument("--time-limit", type=float, default=900, help="seconds of a task (900)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results (results)")
    options = parser.parse_args(argv)
    if "{prompt}" not in options.assistant:
        parser.error("--assistant has no {prompt}: the assistant would not know the task")
    tasks = {task.id: task for task in read_tasks()}
    if unknown := set(options.task or ()) - tasks.keys():
        parser.error(f"no such task: {', '.join(unknown)}; there are {', '.join(tasks)}")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / LINES
    results = [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    with tempfile.TemporaryDirectory() as scratch:
        world = make_world(Path(scratch, "world"))
        for name in options.task or tasks:
            for with_skill in (False, True):
                done = sum((each.task, each.with_skill) == (name, with_skill) for each in results)
                for number in range(done, options.repeat):
                    folder = Path(scratch, f"{name}-{with_skill:d}-{number}")
                    limits = {"target": options.target, "time_limit": options.time_limit}
                    result = judged(tasks[name], world, folder, options.assistant, with_skill, **limits)
                    results.append(result)
                    with file.open("a") as lines:
                        lines.write(json.dumps(asdict(result)) + "\n")
                    print(f"{name}, {'with' if with_skill else 'without'} skill: {result.faults or 'done'}", flush=True)
    (options.out / TABLE).write_text(table(results, options.assistant))


if __name__ == "__main__":
    main()
