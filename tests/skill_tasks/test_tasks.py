"""Judges of the tasks for assistants: a right outcome passes, a wrong one does not, and so does none at all."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from run_tasks import Result, judged, table
from skill_world import make_world
from tasks import Outcome, Task, digests, faults, read_tasks

from forge_plugin_author.skill_files import shipped_skills

TASKS = read_tasks()
SLOW = ("fit-on-a-node", "planted-add-a-router", "add-a-loss", "is-the-router-fit-to-merge")
"""Tasks whose judge plans, or runs the suite of a kind, in processes of its own."""
EACH = pytest.mark.parametrize(
    "task", [pytest.param(task, id=task.id, marks=[pytest.mark.thorough] * (task.id in SLOW)) for task in TASKS]
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def test_each_skill_has_three_tasks_and_there_are_three_planted_ones() -> None:
    assert {**Counter(task.skill for task in TASKS)} == {skill.name: 3 for skill in shipped_skills()}
    assert len({task.id for task in TASKS}) == len(TASKS)
    assert sum(task.id.startswith("planted-") for task in TASKS) == 3


@EACH
def test_a_judge_tells_right_from_wrong(
    task: Task, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start"
    shutil.copytree(world, start)
    monkeypatch.chdir(start)
    task.before.make()
    for number, outcome in enumerate([task.right, Outcome(), *task.wrong]):
        folder = tmp_path / str(number)
        shutil.copytree(start, folder)
        monkeypatch.chdir(folder)
        before = digests(task)
        outcome.make()
        found = faults(task, before)
        assert bool(found) == bool(number), found or f"wrong outcome {number} passes"


def test_a_result_is_kept_with_all_that_was_asked(world: Path, tmp_path: Path) -> None:
    """The assistant is a program that always answers the same."""
    [task] = [task for task in TASKS if task.id == "name-of-a-point"]
    results = [
        judged(
            task, world, tmp_path / str(with_skill), "echo final_norm > answer.txt; ls -a; echo {prompt}", with_skill
        )
        for with_skill in (False, True)
    ]
    assert [(each.task, each.with_skill, each.faults) for each in results] == [
        (task.id, False, []),
        (task.id, True, []),
    ]
    assert ".agents" not in results[0].output
    assert ".agents" in results[1].output
    assert task.prompt in results[0].output
    wrong = judged(task, world, tmp_path / "wrong", "true {prompt}", False)
    assert len(wrong.faults) == 1
    text = table([*results, wrong], "an assistant")
    assert "| look-inside | name-of-a-point | 1 of 2 | 1 of 1 |" in text


def test_an_assistant_that_takes_too_long_has_failed(world: Path, tmp_path: Path) -> None:
    result = judged(TASKS[0], world, tmp_path / "slow", "sleep 60; echo {prompt}", False, time_limit=0.5)
    assert isinstance(result, Result)
    assert "0.5 s" in result.faults[0]
