"""The evaluation `tasks`: its numbers against the model itself, under every layout, and what it refuses."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.layout import Layout
from forge_core.engine.evaluation import evaluate
from forge_plugin_evaluate.tasks import Arithmetic, File, Item, Recall, TaskComponent, Tasks
from forge_plugin_evaluate.tasks import tasks as module
from forge_plugin_moe import MoE
from forge_plugin_text import Bytes
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers
from forge_testing.laws import Case, layout_law
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, naming, problems_of, refuses
from forge_testing.runs import tiny_run

# Initial weights that are far from uniform guesses, in float64.
MODEL = {"dim": 16, "layers": 2, "vocab_size": 258, "attention": GroupedQueryAttention(heads=2), "init_std": 0.5}
DATA = {"sources": (Numbers(),), "tokenizer": Bytes()}
EVALUATION = Tasks(tasks=(Recall(items=5, lengths=(4,)), Arithmetic(items=4, digits=(1,))))
CHANGES = {
    "model": Transformer(**MODEL),
    "data": DATA,
    "evaluations": {"downstream": EVALUATION},
    "seq_len": 64,
    "global_batch_size": 8,
    "precision": "fp64",
}


def log_probability(model, tokenizer, context, choice):
    """By the model alone, without padding."""
    head, tokens = tokenizer.encode(context), tokenizer.encode(context + choice)
    logits = model.head.logits(model({"input_ids": torch.tensor([tokens[:-1]])}))[0].log_softmax(-1)
    return sum(logits[place - 1, tokens[place]].item() for place in range(len(head), len(tokens)))


def test_numbers_are_those_of_the_model(make_job, build):
    run = build(make_job(**CHANGES))
    metrics = evaluate(run, 0)
    for task in EVALUATION.tasks:
        right, per_byte, bits = [], [], []
        for item in task.load():
            values = [log_probability(run.model, run.context.tokenizer, item.context, text) for text in item.choices]
            right.append(np.argmax(values) == item.answer)
            sizes = [len(choice) - 1 for choice in item.choices]
            per_byte.append(np.argmax(np.array(values) / sizes) == item.answer)
            bits.append(-values[item.answer] / math.log(2) / sizes[item.answer])
        assert metrics[f"downstream/{task.label}/acc"] == np.mean(right)
        assert metrics[f"downstream/{task.label}/acc_per_byte"] == np.mean(per_byte)
        assert metrics[f"downstream/{task.label}/bits_per_byte"] == pytest.approx(np.mean(bits), rel=1e-9)
        error = np.std(bits, ddof=1) / math.sqrt(len(bits))
        assert metrics[f"downstream/{task.label}/bits_per_byte_stderr"] == pytest.approx(error, rel=1e-9)


def measured(**ffn):
    model = Transformer(**MODEL, **ffn)
    return lambda folder, layout: evaluate(tiny_run(folder, **CHANGES | {"model": model} | layout), 0)


def the_same(ranks, alone):
    assert ranks == [pytest.approx(alone, rel=1e-9)] * len(ranks)


DENSE = ("fsdp2", "tp2", "pp2", "cp2")
test_layouts = layout_law(
    Case("tasks", observe=measured(), compare=the_same, layouts=DENSE),
    Case("tasks, experts", observe=measured(ffn=MoE(experts=4)), compare=the_same, layouts=("fsdp2_ep2",)),
)


def test_a_run_logs_the_metrics_that_are_asked_for_and_learns(make_job, train):
    evaluation = Tasks(tasks=(Arithmetic(items=8, digits=(1,), name="sums"),), metrics=("bits_per_byte",), prefix="t")
    data = {"sources": (Numbers(start=48),), "tokenizer": Bytes()}  # digits and signs among others
    job = make_job(**CHANGES | {"data": data, "evaluations": {"x": evaluation}, "eval": {"interval": 2}})
    records = [json.loads(line) for line in (train(job).folder / "metrics.jsonl").read_text().splitlines()]
    logged = [record for record in records if "t/sums/bits_per_byte" in record]
    assert [record["step"] for record in logged] == [2, 4]
    assert [{name for name in record if name.startswith("t/")} for record in logged] == [
        {"t/sums/bits_per_byte", "t/sums/bits_per_byte_stderr"}
    ] * 2
    assert logged[1]["t/sums/bits_per_byte"] < logged[0]["t/sums/bits_per_byte"]


def test_long_items_are_refused_before_the_first_step_or_left_out(make_job, train):
    long = Recall(items=3, lengths=(4, 16))

    def job(**keys):
        return make_job(**CHANGES | {"evaluations": {"downstream": Tasks(tasks=(long,), **keys)}})

    with refuses("evaluations.downstream", "recall", "item 1", "134 positions", "train.seq_len is 64"):
        train(job())
    assert train(job(too_long="leave_out")).evaluation["downstream/recall/left_out"] == 1


def test_what_a_check_refuses(make_job, tmp_path):
    file = tmp_path / "recall.jsonl"
    file.write_text("{}\n")
    evaluation = Tasks(tasks=(Recall(), File(path=str(file))))
    check_problems(
        problems_of(make_job(evaluations={"downstream": evaluation})),
        at("evaluations.downstream", "[data.tokenizer]"),
        at("evaluations.downstream.tasks", "2 tasks", "'recall'", "`name`"),
        at("evaluations.downstream.tasks.1.path", f"{file}:1", "context and choices and answer"),
    )


def test_a_build_without_a_tokenizer_is_refused(make_job):
    """Of an evaluation given from Python, which no check has seen."""
    context = SimpleNamespace(tokenizer=None, job=make_job(), layout=Layout())
    with refuses("", "[data.tokenizer]"):
        Tasks(tasks=(Recall(),)).build(context)


class Differs(TaskComponent):
    """Items that differ from rank to rank, as of another version of Python."""

    def load(self):
        from forge_core.parallel.mesh import global_rank

        return [Item("a", (" b", f" {global_rank()}"), 0)]


def test_ranks_with_different_items_are_refused(make_job, train):
    job = make_job(**CHANGES | {"evaluations": {"x": Tasks(tasks=(Differs(),))}})

    def rank(number):
        with pytest.raises(ForgeError, match=naming("different")):
            train(job)

    run_on_ranks(2, rank)


def test_tasks_are_encoded_once_a_run_and_anew_for_another(make_job, train, monkeypatch):
    evaluation, lengths, encode = Tasks(tasks=(Recall(items=2, lengths=(4,)),)), [], module.encoded_tasks

    def noted(*given):
        encoded = encode(*given)
        lengths.append(encoded.rows.length)
        return encoded

    monkeypatch.setattr(module, "encoded_tasks", noted)
    for seq_len in (64, 40):
        changes = {"evaluations": {"x": evaluation}, "seq_len": seq_len, "eval": {"interval": 1}}
        train(make_job(**CHANGES | changes | {"job": {"name": f"of-{seq_len}"}}))
    assert len(lengths) == 2
    assert lengths[1] == 40
