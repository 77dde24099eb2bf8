"""`dpo.py` and `pairs.py`: the loss and its gradient against the formula, from a run; what it learns; two ranks."""

from __future__ import annotations

import json
import math

import pytest
import torch
from attrs import define
from torch.nn.functional import cross_entropy, logsigmoid

from forge_core import TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_plugin_losses.teacher import load_trained
from forge_testing import curves
from forge_testing.curves import Difference
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming, refuses

HALVES = slice(0, 16), slice(16, 32)
MODEL = """
train = { seq_len = 32, precision = "fp64" }
data.tokenizer.type = "bytes"
eval.at_start = true

[model]
type = "transformer"
dim = 8
layers = 2
vocab_size = 258
attention.heads = 2
"""
TEXT = """
[[data.sources]]
type = "text"
path = "PROOFS/dpo.py"
"""
PREFERENCES = """
[checkpoint.load]
path = "PLACE/runs/base"
[loss]
type = "PROOFS/dpo.py:DPO"
reference = "PLACE/runs/base"
beta = 0.5
[[data.sources]]
type = "PROOFS/pairs.py:Pairs"
path = "PLACE/pairs.jsonl"
keep_out = 2
"""


@pytest.fixture
def preferences(tmp_path, job_of, train):
    """(name, overrides) -> a job that learns to prefer short answers to longer ones, from a model of other text."""
    pairs = [{"prompt": f"{n}? ", "chosen": "yes" * (n % 2 + 1), "rejected": f"no, {n}"} for n in range(10)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    model = job_of("base", (MODEL + TEXT).replace("PLACE", str(tmp_path)))
    train(model)
    text = (MODEL + PREFERENCES).replace("PLACE", str(tmp_path))
    return lambda name, *overrides, **options: job_of(name, text, *overrides, **options)


@define(kw_only=True, slots=False)
class Gradients(TrainingHook):
    """Compares the gradients of a step with those of the formula, and keeps the loss by the formula."""

    step: int
    reference: object
    expected = math.nan

    def on_gradients(self, context):
        if context.step != self.step:
            return
        rows = [{key: value[row] for key, value in batch.items()} for batch in context.batches for row in range(2)]
        losses = [self.formula(context.model, row) for row in rows]
        loss = torch.stack(losses).mean()
        names, parameters = zip(*context.model.named_parameters(), strict=True)
        found = [parameter.grad for parameter in parameters]
        for name, ours, theirs in zip(names, found, torch.autograd.grad(loss, parameters), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=name)
        self.expected = loss.item()

    def formula(self, model, row):
        """Equation 7 of the paper, each answer in a row of its own."""
        chosen, rejected = ({key: row[key][half][None] for key in ("input_ids", "labels")} for half in HALVES)
        ratios = [log_p(model, answer) - log_p(self.reference, answer).detach() for answer in (chosen, rejected)]
        return -logsigmoid(0.5 * (ratios[0] - ratios[1]))


def log_p(model, answer):
    logits = model.head.logits(model({"input_ids": answer["input_ids"]}))
    return -cross_entropy(logits[0], answer["labels"][0], ignore_index=-100, reduction="sum")


def test_loss_and_gradients_are_those_of_the_formula(preferences, train, build, records, run_folder):
    job = preferences("dpo", "--train.micro_batch_size=2")
    reference = load_trained(run_folder("base"), build(job).context).model
    gradients = Gradients(step=3, reference=reference)
    train(job, gradients)
    found = records("dpo", "loss/dpo")
    assert found[0] == pytest.approx(math.log(2), rel=1e-12)  # the model is the reference
    assert found[2] == pytest.approx(gradients.expected, rel=1e-12)
    assert found[2] != pytest.approx(math.log(2), rel=1e-3)


def test_it_learns_what_is_preferred(preferences, train, records):
    train(preferences("dpo", "--train.steps=12"))
    assert records("dpo", "dpo/accuracy")[-1] == 1
    assert records("dpo", "dpo/margin")[-1] > 1
    assert len(records("dpo", "eval/loss")) == 2  # of the answers that are kept out, before and after


def test_answers_are_learned_and_prompts_are_not(preferences, build):
    row = build(preferences("dpo")).datasets[0][1]
    learned = ["".join(chr(i) for i in row["labels"][half] if 0 <= i < 256) for half in HALVES]
    assert learned == ["yesyes", "no, 1"]
    assert bytes(row["input_ids"][:9].tolist()) == b"1? yesyes"


def test_two_ranks_train_like_one(preferences, catalog):
    expected = curves.train(preferences("one"), catalog)
    layouts = {"fsdp": [], "tp": ["--parallel.tp.degree=2"], "pp": ["--parallel.pp.degree=2"]}
    jobs = [
        preferences(name, f"--parallel.{name}.type={name}", "--train.micro_batch_size=2", *keys, ranks=2)
        for name, keys in layouts.items()
    ]
    for found_by_rank in run_on_ranks(2, lambda rank: [curves.train(job, catalog) for job in jobs]):
        for found, layout in zip(found_by_rank, layouts, strict=True):
            difference = Difference.between(found, expected)
            worst = max(difference.loss, difference.norm, difference.gradient, difference.evaluation)
            assert worst < 1e-9, (layout, difference)


def test_data_without_pairs_is_refused(preferences, train):
    with pytest.raises(ForgeError, match=naming("DPO", "document_ids")):
        train(preferences("other", '--data.sources=[{ type = "text", path = "' + __file__ + '" }]'))


def test_an_answer_that_does_not_fit_is_told(preferences, build, tmp_path):
    job = preferences("dpo", "--train.seq_len=16")
    with refuses("data.sources.0.path", "line 2", "8 tokens", "train.seq_len"):
        build(job)
