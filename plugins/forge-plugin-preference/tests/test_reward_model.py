"""Reward models: TRL's formula, packing, layouts, continued runs, and jobs as a user writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from attrs import define
from preference_runs import DENSE, pair_lines, preference_job, prepared, write_lines
from torch import Tensor
from torch.nn.functional import logsigmoid

from forge_core import TrainingHook
from forge_core.cli import main
from forge_core.contracts.errors import ForgeError
from forge_core.engine.build import build_context, build_tokenizer
from forge_core.engine.evaluation import evaluate
from forge_core.engine.step import Stepper, metrics
from forge_core.engine.trainer import Trainer
from forge_plugin_lora import LoRA
from forge_plugin_preference import DPO, BradleyTerry, Pairs, RewardHead
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, Training, same_curve
from forge_testing.laws import Case, Interrupted, layout_law, resumption_law
from forge_testing.refusals import refuses

LOSS = BradleyTerry(center_weight=0.01)
DRAWN = {"reward_head": RewardHead(init_std=0.3)}
"""A head that is not zero, so that the first step has gradients for all of the model."""


def reward_job(folder: Path, loss: BradleyTerry = LOSS, **changes: Any) -> Any:
    return preference_job(folder, loss, **{"plugins": DRAWN} | changes)


# --- layouts ---------------------------------------------------------------------------------------------------------


def observe(**settings: Any) -> Any:
    def observed(folder: Path, changes: Mapping[str, Any]) -> Curve:
        with Training.of(reward_job(folder, **settings | changes), installed()) as training:
            return training.curve(2)

    return observed


ADAPTED = DRAWN | {"lora": LoRA(rank=2, train=("head.*",), random_base=True)}
test_layouts = layout_law(
    Case(
        "dense",
        observe=observe(),
        compare=same_curve,
        layouts=("tp2", "pp2", "fsdp2_cp2"),
    ),
    Case("experts", observe=observe(experts=True), compare=same_curve, layouts=("fsdp2_ep2",)),
    Case("adapted", observe=observe(plugins=ADAPTED), compare=same_curve, layouts=("tp2",)),
    Case("tied", observe=observe(model=attrs.evolve(DENSE, tie_embeddings=True)), compare=same_curve, layouts=("pp2",)),
)


# --- formulas --------------------------------------------------------------------------------------------------------


def trl(chosen: Tensor, rejected: Tensor, margin: Tensor | None, center: float) -> Tensor:
    """`RewardTrainer.compute_loss` of TRL 1.16, after the model."""
    if margin is not None:
        loss = -logsigmoid(chosen - rejected - margin).mean()
    else:
        loss = -logsigmoid(chosen - rejected).mean()
    return loss + center * torch.mean((chosen + rejected) ** 2)


def whole_batch(folder: Path, loss: BradleyTerry, packed: bool, **changes: Any) -> Any:
    """A job whose batch has every pair once."""
    folder.mkdir(exist_ok=True)
    lines = [line | {"margin": 0.3 * n - 1} for n, line in enumerate(pair_lines(8))]
    source = Pairs(path=write_lines(folder / "few.jsonl", lines), packed=packed, row_examples=4)
    job = reward_job(folder, loss, steps=1, global_batch_size=1, **changes)
    data = attrs.evolve(job.data, sources=(source,))
    context = build_context(attrs.evolve(job, data=data), installed(), None)
    rows = len(source.build(attrs.evolve(context, tokenizer=build_tokenizer(job, context), job=job)))
    train = attrs.evolve(job.train, global_batch_size=rows, micro_batch_size=rows // 2 if rows % 2 == 0 else rows)
    return attrs.evolve(job, data=data, train=train)


def step_of(job: Any) -> tuple[dict[str, float], list[Tensor], Training]:
    """Metrics and gradients of the first step."""
    with Training.of(job, installed()) as training:
        _, sums = Stepper(training.run).gradients(training.loader.next_step(), 0)
        values = {name: float(value) for name, value in metrics(sums).items() if isinstance(name, str)}
    return values, [item.parameter.grad.clone() for item in training.run.parameters], training


def scores(run: Any, examples: list[Any]) -> tuple[Tensor, Tensor]:
    """Scores of chosen and rejected answers, every document by itself, from its last token."""

    def score(document: Any) -> Tensor:
        hidden = run.model({"input_ids": torch.from_numpy(document.ids).long()[None]})
        return hidden[0, -1] @ run.model.head.score.weight[0]

    chosen, rejected = zip(*[map(score, example.documents) for example in examples], strict=True)
    return torch.stack(chosen), torch.stack(rejected)


@pytest.mark.parametrize("with_margins", [False, True])
def test_a_step_on_packed_rows_gives_the_loss_of_trl_on_separate_documents(with_margins: bool, tmp_path: Path) -> None:
    job = whole_batch(tmp_path, BradleyTerry(center_weight=0.01, margins=with_margins), packed=True)
    values, gradients, training = step_of(job)
    examples = [example for row in training.run.datasets[0].rows for example in row]
    assert max(map(len, training.run.datasets[0].rows)) > 1
    chosen, rejected = scores(training.run, examples)
    margin = torch.tensor([0.3 * (example.line - 1) - 1 for example in examples], dtype=torch.float64)
    expected = trl(chosen, rejected, margin if with_margins else None, 0.01)
    assert values["loss/bradley_terry"] + 0.01 * values["loss/center"] == pytest.approx(expected.item(), rel=1e-9)
    wanted = torch.autograd.grad(expected, [item.parameter for item in training.run.parameters])
    torch.testing.assert_close(gradients, list(wanted), rtol=1e-9, atol=1e-13)
    assert values["loss"] == pytest.approx(values["loss/bradley_terry"], rel=1e-12)
    assert values["rewards/margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-9)
    assert values["rewards/accuracy"] == (chosen > rejected).double().mean().item()


def test_packed_rows_and_rows_of_one_pair_give_the_same(tmp_path: Path) -> None:
    loss = BradleyTerry(center_weight=0.01, margins=True)
    (packed, gradients, one), (values, expected, other) = (
        step_of(whole_batch(tmp_path / str(packed), loss, packed)) for packed in (True, False)
    )
    assert len(one.run.datasets[0]) < len(other.run.datasets[0])
    assert packed == pytest.approx(values, rel=1e-10)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-14)


def test_the_evaluation_is_the_formula_on_what_is_held_out(tmp_path: Path) -> None:
    """The last batch is filled with rows that do not count."""
    job = reward_job(tmp_path)
    with Training.of(job, installed()) as training:
        rows = training.run.held_out.datasets[0].rows
        assert len(rows) % job.train.global_batch_size
        found = evaluate(training.run, 0)
        with torch.no_grad():
            chosen, rejected = scores(training.run, [example for row in rows for example in row])
    assert found["eval/loss"] == pytest.approx(trl(chosen, rejected, None, 0.0).item(), rel=1e-10)
    assert found["eval/loss/bradley_terry"] == pytest.approx(found["eval/loss"], rel=1e-12)
    assert not {"eval/perplexity", "eval/bits_per_byte"} & set(found)
    assert found["eval/rewards/accuracy"] == pytest.approx((chosen > rejected).double().mean().item())
    assert found["eval/rewards/margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-10)


# --- runs ------------------------------------------------------------------------------------------------------------


def settings() -> dict[str, Any]:
    job = reward_job(Path("."), steps=6)
    return {
        **{name: getattr(job, name) for name in ("model", "loss", "plugins")},
        "evaluations": {},
        "data": {"tokenizer": job.data.tokenizer, "sources": job.data.sources},
        **{name: getattr(job.train, name) for name in ("precision", "global_batch_size", "seq_len")},
    }


test_resumption = resumption_law(Interrupted("bradley_terry", changes=settings))

JOB = """
job = { name = "rm", output = "runs" }
train = { steps = 12, global_batch_size = 4, seq_len = 64, precision = "fp64", device = "cpu" }
optimizer = { type = "adamw", lr = 2e-2 }
data.tokenizer.type = "bytes"
model = { type = "transformer", dim = 16, layers = 2, vocab_size = 258, attention = { heads = 4, kv_heads = 2 } }
checkpoint.load.path = "REFERENCE"
loss.type = "bradley_terry"
[plugins.reward_head]
[evaluations.preferences]
[[data.sources]]
type = "pairs"
path = "pairs.jsonl"
held_out_every = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user who has trained a language model."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "pairs.jsonl", pair_lines(20))
    (tmp_path / "rm.toml").write_text(JOB.replace("REFERENCE", prepared().reference))
    return tmp_path


def lines(folder: Path, name: str = "rm") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def test_a_job_file_trains_a_reward_model_from_a_language_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "rm.toml"]) == 0
    assert main(["rm.toml"]) == 0
    out = capsys.readouterr().out
    assert "0.693147 (the head begins at zero; another one ends the run)" in out
    assert "1 new in this model: head.score.weight" in out
    assert "1 only in the checkpoint: head.weight" in out
    steps = [line for line in lines(folder) if "loss/bradley_terry" in line]
    assert steps[0]["loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert steps[0]["rewards/chosen"] == steps[0]["rewards/rejected"] == 0
    assert steps[-1]["loss"] < 0.3
    assert steps[-1]["rewards/accuracy"] > 0.9
    [evaluation] = [line for line in lines(folder) if "eval/rewards/accuracy" in line]
    assert evaluation["eval/rewards/accuracy"] == 1
    # Its checkpoint is one to start from, with its head: the first loss is then another one, and not checked
    assert main(["rm.toml", "--job.name=more", "--checkpoint.load.path=runs/rm", "--train.steps=1"]) == 0
    assert lines(folder, "more")[0]["loss"] < 0.3


def test_adapters_train_beside_the_head(folder: Path) -> None:
    keys = ["--plugins.lora.rank=2", '--plugins.lora.train=["head.*"]', "--job.name=adapted"]
    assert main(["rm.toml", "--optimizer.lr=3e-3", *keys]) == 0
    losses = [line["loss"] for line in lines(folder, "adapted") if "loss" in line]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-12)
    assert losses[-1] < 0.6


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["--plugins={}"],
            "loss: learns the score of an answer, for which the model has no head; add [plugins.reward_",
        ),
        (['--loss.type="simpo"'], "plugins.reward_head: leaves the model without logits, which [loss] (SimPO) needs"),
        (["--plugins.lora.rank=2"], 'which plugins.lora freezes; add "head.*" to plugins.lora.train'),
        (["--loss.margins=true"], "line 1: 'margin' is missing; with loss.margins it is a number"),
        (["--model.mtp.depth=1"], "plugins.reward_head: TransformerModel predicts several tokens by its head"),
    ],
)
def test_check_refuses(keys: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "rm.toml", *keys]) != 0
    assert message in capsys.readouterr().err


def test_attention_may_be_bidirectional(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = '--model.attention.mask.type="bidirectional"'
    assert main(["check", "rm.toml", key]) == 0
    assert main(["check", "rm.toml", key, '--loss.type="cross_entropy"']) != 0
    assert "the next token, which CrossEntropy predicts" in capsys.readouterr().err


def test_no_text_is_generated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm.toml", '--hooks.samples.prompts=["1? "]']) != 0
    assert "by the head of [plugins.reward_head], and generates no text" in capsys.readouterr().err


@define(kw_only=True, slots=False)
class Draw(TrainingHook):
    """Changes the head before the first step."""

    def on_train_begin(self, context: Any) -> None:
        context.model.head.score.weight.data.fill_(0.3)


def test_a_reward_model_is_no_reference(tmp_path: Path) -> None:
    scores = Trainer(reward_job(tmp_path / "scores", steps=1), catalog=installed(), echo=len).run().folder
    with refuses("loss.reference", f"{scores}/checkpoints/step-1 is 1", "language model"):
        Trainer(preference_job(tmp_path, DPO(reference=str(scores))), catalog=installed(), echo=len).run()


def test_another_first_loss_ends_the_run_before_an_update(tmp_path: Path) -> None:
    job = reward_job(tmp_path, BradleyTerry(), steps=1, plugins={"reward_head": RewardHead()})
    trainer = Trainer(job, hooks=[Draw()], catalog=installed(), echo=lambda text: None)
    with pytest.raises(ForgeError, match=r"and must be 0.693147, as the reward head begins at zero.*check_first_loss"):
        trainer.run()
