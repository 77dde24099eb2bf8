"""The reward `reward_model`: scores of a trained reward model, alike in every layout, and what it refuses."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import frozen
from grpo_runs import MODEL, lines_of, logged

from forge_core import Trainer
from forge_core.contracts.errors import CheckpointError, ForgeError, JobError
from forge_kit.tools.trained_model import load_model
from forge_plugin_grpo import Completion, RewardComponent, RewardModel
from forge_plugin_grpo.model_scores import ModelScorer, scorer_of
from forge_plugin_grpo.reward_model import LoadsRewardModel
from forge_plugin_preference import BradleyTerry, Pairs, RewardHead
from forge_plugin_preference.encoding import encode
from forge_plugin_preference.lines import parse
from forge_plugin_text import Bytes
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming


@functools.cache
def trained() -> str:
    """The folder of a run that has trained a reward model, once a session."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "?" * (n % 3 + 1)} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
    settings: dict[str, Any] = {
        "steps": 4,
        "precision": "fp64",
        "global_batch_size": 4,
        "seq_len": 32,
        "model": MODEL,
        "loss": BradleyTerry(),
        "plugins": {"reward_head": RewardHead()},
        "data": {"tokenizer": Bytes(), "sources": (Pairs(path=str(folder / "pairs.jsonl")),)},
        "job": {"name": "rm", "seed": 3},
    }
    Trainer(tiny_job(str(folder), installed(), **settings), catalog=installed(), echo=lambda line: None).run()
    return str(folder / "rm")


def rewards(**keys: Any) -> dict[str, RewardComponent]:
    return {"model": RewardModel(path=trained(), **keys)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run of 4 steps in one process logs."""
    return lines_of(tmp_path_factory.mktemp("alone"), {}, rewards=rewards())


NAMES = ("loss", "grad_norm", "reward", "reward/model", "reward/std", "completions/tokens")


@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "pp2"])
def test_runs_on_ranks_log_what_one_process_logs(layout: str, alone: Any, tmp_path: Path) -> None:
    trained()  # before the ranks, which inherit it
    changes = LAYOUTS[layout].changes(installed())
    run_on_ranks(2, lambda rank: lines_of(tmp_path, changes, rewards=rewards(batch_size=3)))
    found = logged(tmp_path)
    assert any(line["reward/std"] > 1e-3 for line in alone)
    assert [[line[name] for name in NAMES] for line in found] == [
        pytest.approx([line[name] for name in NAMES], rel=1e-9, abs=1e-12) for line in alone
    ]


def test_the_score_is_the_one_that_training_gives_a_document_of_pairs(alone: Any) -> None:
    model = load_model(trained(), device="cpu")
    assert model.tokenizer is not None
    end = model.tokenizer.end_of_text
    line = {"prompt": "3+1=", "chosen": "4", "rejected": "no, 17"}
    completions = [
        Completion(prompt="3+1=", text="4", ids=[*b"4", end], ended=True, row=line),
        Completion(prompt="3+1=", text="no, 17", ids=[*b"no, 17"], ended=False, row=line),
    ]
    [documents] = encode([parse(json.dumps(line), 1)], model.tokenizer, "pairs.jsonl")
    own = attrs.evolve(RewardModel(path=trained()), batch_size=2)
    scores = ModelScorer(model, model.tokenizer, own.batch_size).scores(completions)
    expected = [model(document.ids.tolist())[-1, 0].item() for document in documents]
    assert abs(expected[0] - expected[1]) > 1e-3
    assert scores == pytest.approx(expected, rel=1e-12)


class Chats:
    """A tokenizer with a template."""

    end_of_text = 0

    def chat(self, messages: Any, tools: Any = None) -> Any:
        return attrs.make_class("Chat", ["ids"])([len(message["content"]) for message in messages])


def test_chats_are_scored_as_the_template_writes_them() -> None:
    row = {"prompt": [{"role": "user", "content": "question"}]}
    scorer: Any = ModelScorer(None, Chats(), 1)  # type: ignore[arg-type]
    completion = Completion(prompt="question", text="yes", ids=[1, 2], ended=True, row=row)
    assert scorer._document(completion) == [8, 3]


@frozen(kw_only=True)
class Short(RewardComponent):
    """One score for however many completions."""

    def scores(self, completions: Any) -> list[float]:
        return [1.0]


@frozen(kw_only=True)
class Breaks(RewardComponent):
    """Scores together, and fails."""

    def scores(self, completions: Any) -> list[float]:
        raise KeyError("nothing")


@pytest.mark.parametrize(
    ("reward", "facts"), [(Short(), ["1 scores for 32"]), (Breaks(), ["32 completions, the first", "KeyError"])]
)
def test_a_reward_that_scores_together_is_named(reward: Any, facts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=naming("loss.rewards.mine", *facts)):
        lines_of(tmp_path, {}, rewards={"mine": reward})


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    lines_of(tmp_path, {"steps": 1, "job": {"name": "lm"}})
    facts = ["loss.rewards.lm.path", "is no reward model", "258", "[plugins.reward_head]"]
    with pytest.raises(JobError, match=naming(*facts)):
        lines_of(tmp_path, {}, rewards={"lm": RewardModel(path=str(tmp_path / "lm"))})


def test_another_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trained()
    tokenizer = load_model(path, device="cpu").tokenizer
    monkeypatch.setattr(type(tokenizer), "fingerprint", lambda self: "of another one")
    with pytest.raises(JobError, match=naming("loss.rewards.rm.path", "was trained with another tokenizer")):
        lines_of(tmp_path, {}, rewards={"rm": RewardModel(path=path)})


def test_a_path_that_does_not_exist_is_refused_by_check(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=naming("loss.rewards.lm.path", "nowhere does not exist")):
        lines_of(tmp_path, {}, rewards={"lm": RewardModel(path="nowhere")})


def test_another_checkpoint_of_the_model_is_refused_in_a_continued_run(alone: Any, tmp_path: Path) -> None:
    [hook] = RewardModel(path=trained()).training_hooks(None)  # type: ignore[arg-type]
    assert isinstance(hook, LoadsRewardModel)
    hook.load_state_dict({"path": trained(), "checkpoint": str(tmp_path / "older")})
    with pytest.raises(CheckpointError, match=naming("was", "older", "when this run began", "--resume-with-changes")):
        lines_of(tmp_path, {}, hook, rewards=rewards())


def test_a_model_that_no_run_has_loaded_is_named() -> None:
    with pytest.raises(ForgeError, match="is loaded when a run begins"):
        scorer_of(RewardModel(path="elsewhere"))
