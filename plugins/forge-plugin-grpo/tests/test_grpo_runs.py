"""Runs beside other parts of a job: each alone could make completions come from other weights, or the run end early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from grpo_runs import lines_of, logged

from forge_core.contracts.errors import ForgeError
from forge_plugin_compile import Compile
from forge_plugin_ema import EMA
from forge_plugin_grpo import Answer, RewardComponent, Rewards
from forge_plugin_parallel import FSDP
from forge_testing.outcomes import Stop
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming

NAMES = ("loss", "grad_norm", "loss/policy", "policy/clipped", "reward", "completions/tokens")


def close(lines: Any, expected: Any) -> bool:
    assert len(lines) == len(expected)
    return all(
        [line.get(name, 0) for name in NAMES]
        == pytest.approx([other.get(name, 0) for name in NAMES], rel=1e-9, abs=1e-12)
        for line, other in zip(lines, expected, strict=True)
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run of 4 steps logs, with two updates for each draw."""
    return lines_of(tmp_path_factory.mktemp("plain"), {}, updates=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 2},
        {"plugins": {"ema": EMA(decay=0.5)}},
        {"parallel": {"compile": Compile(backend="eager")}},
        {"checkpoint": {"interval": 1, "async_save": True}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_curve_does_not_depend_on_other_parts(tmp_path, plain, changes):
    """Completions come from the weights in training: not from an average, which evaluations would take."""
    lines = lines_of(tmp_path, changes, updates=2)
    assert close(lines, plain)
    drawn = lines[0], lines[2]
    assert all(line["rollout/log_p_difference"] < 1e-12 for line in drawn)


@pytest.mark.parametrize("first", [1, 2])
def test_a_run_continues_between_two_updates_on_another_number_of_ranks(tmp_path, plain, first):
    def start(ranks: int, *hooks: Any) -> None:
        shared: dict[str, Any] = {"checkpoint": {"async_save": True}}
        changes = {**shared, "parallel": {"fsdp": FSDP()}, "micro_batch_size": 2} if ranks == 2 else shared
        if ranks == 1:
            lines_of(tmp_path, changes, *hooks, updates=2)
        else:
            run_on_ranks(2, lambda rank: lines_of(tmp_path, changes, *hooks, updates=2))

    start(first, Stop(step=3))
    assert len(logged(tmp_path)) == 3
    start(3 - first)
    assert close(logged(tmp_path), plain)


@frozen(kw_only=True)
class Fails(RewardComponent):
    """Scores nothing."""

    value: Any = None

    def score(self, completion: Any) -> float:
        return completion.row["solution"] if self.value is None else self.value


@pytest.mark.parametrize(("value", "facts"), [(None, ["KeyError", "solution"]), (float("nan"), ["nan"]), ("x", ["x"])])
def test_a_reward_that_fails_is_named(tmp_path: Path, value: Any, facts: list[str]) -> None:
    with pytest.raises(ForgeError, match=naming("loss.rewards.mine", *facts)):
        lines_of(tmp_path, {}, rewards={"mine": Fails(value=value)})


def test_the_best_checkpoint_is_the_one_of_the_largest_reward(tmp_path):
    changes = {"evaluations": {"rewards": Rewards()}, "eval": {"interval": 1}}
    lines_of(
        tmp_path, {**changes, "checkpoint": {"interval": 1, "keep_best": 1, "best_metric": "eval/negative_reward"}}
    )
    [path] = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rewards = {line["step"]: line["eval/reward"] for line in lines if "eval/reward" in line}
    assert all(line["eval/negative_reward"] == -line["eval/reward"] for line in lines if "eval/reward" in line)
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert (path.parent / "checkpoints" / f"step-{best}").is_dir()


def test_a_start_from_which_nothing_is_learned_is_reported(tmp_path):
    """As with a model whose texts never end: without an end, no answer is right."""
    with pytest.warns(UserWarning, match=naming("0", "loss.max_tokens", "1")):
        lines = lines_of(tmp_path, {"steps": 2}, max_tokens=1, rewards={"sum": Answer()})
    assert lines[0]["reward/equal"] == 1
    assert lines[0]["completions/tokens"] == 1
    assert lines[0]["grad_norm"] == 0
