"""Several ranks that share a model have the scores and texts of one process."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from forge_core import ForgeError, Trainer, load_model
from forge_core.config.load import to_toml
from forge_kit.tools.ranks import executor_of
from forge_plugin_evaluate.harness.model import ForgeLM
from forge_plugin_evaluate.harness.shared_model import SharedLM
from forge_testing.catalogs import installed
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LayoutCase
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming, refuses

LENGTH = 48
SETTINGS = {"max_length": LENGTH, "batch_size": 3}
TEXT = "the cat sat on the mat and the dog sat on the log, and then the bird flew over the red tree\n"
MODEL = {
    "type": "transformer",
    "dim": 16,
    "layers": 4,
    "init_std": 0.3,
    "attention": {"heads": 4, "kv_heads": 2},
}
JOB = {
    "train": {"steps": 1, "global_batch_size": 3, "seq_len": LENGTH, "device": "cpu"},
    "data": {"tokenizer": {"type": "bpe", "vocab_size": 264}},
    "optimizer": {"type": "forge_testing:TinyAdamW"},
    "model": MODEL,
}
AVERAGED = {**JOB, "train": {**JOB["train"], "steps": 3}}
RUNS = {
    "dense": JOB,
    "experts": {**JOB, "model": {**MODEL, "ffn": {"type": "moe", "experts": 4}}},
    "ema": {**AVERAGED, "plugins": {"ema": {"decay": 0.5, "warmup": False}}},
    "schedule-free": {**AVERAGED, "optimizer": {"type": "schedule_free_adamw", "lr": 0.05}},
}
QUICK = ("fsdp2", "tp2", "pp2")


def layout_of(ranks=2, **parallel):
    return LayoutCase(ranks=ranks, parallel=parallel)


OTHERS = {
    "copies": layout_of(),
    "tp, whole": layout_of(tp={"degree": 2, "sequence_parallel": False, "loss_parallel": False}),
    "pp, interleaved": layout_of(pp={"degree": 2, "schedule": "interleaved_1f1b"}),
    "cp, ring": layout_of(cp={"degree": 2}),
    "cp, ulysses": layout_of(cp={"degree": 2, "method": "ulysses"}),
    "fsdp x tp": layout_of(4, fsdp={}, tp={"degree": 2}),
    "fsdp x pp": layout_of(4, fsdp={}, pp={"degree": 2}),
    "tp x pp": layout_of(4, tp={"degree": 2}, pp={"degree": 2}),
}


@cache
def trained(name):
    """The folder of a run, which is trained once: by the process that forks the ranks that read it."""
    folder = Path(mkdtemp())  # a law has no fixtures
    atexit.register(rmtree, folder, ignore_errors=True)
    (folder / "text.txt").write_text(TEXT * 20)
    source = {"type": "text", "path": f"{folder}/text.txt"}
    job = {**RUNS[name], "job": {"name": name, "output": str(folder)}}
    return Trainer({**job, "data": {**job["data"], "sources": [source]}}, echo=lambda text: None).run().folder


def loaded(name, parallel):
    return load_model(trained(name), device="cpu", parallel=parallel)


def shared(model, **settings):
    return SharedLM(model, model.tokenizer, **{**SETTINGS, **settings})


def asked(lm):
    """Answers to requests of every type: of one token and of many, that share a row, that are cut, that are drawn."""
    ids = lm.tok_encode
    pairs = [(ids(TEXT[:count]), ids(TEXT[count : count + count // 3 + 1])) for count in range(1, 40, 6)]
    pairs += [(ids("the cat"), [token]) for token in (32, 99, likeliest(lm))]
    given = {"until": ["at"], "max_gen_toks": 6}
    drawn = {"max_gen_toks": 4, "do_sample": True, "temperature": 1.0, "top_k": 20}
    prompts = [TEXT[start : start + 5 + start] for start in range(0, 8, 2)]
    return {
        "tokens": lm._loglikelihood_tokens([(None, *pair) for pair in pairs], disable_tqdm=True),
        "rolling": lm.loglikelihood_rolling([request(TEXT[:n]) for n in (3, 60)], disable_tqdm=True),
        "greedy": lm.generate_until([request(text, given) for text in prompts], disable_tqdm=True),
        "drawn": lm.generate_until([request(text, drawn) for text in prompts], disable_tqdm=True),
        "one": lm.generate_until([request("the", given)], disable_tqdm=True),
        "size": lm.get_model_info()["model_num_parameters"],
    }


def likeliest(lm):
    [text] = lm.generate_until([request("the cat", {"max_gen_toks": 1})], disable_tqdm=True)
    return (lm.tok_encode(text) or [32])[0]


def request(*args):
    return SimpleNamespace(args=args)


def stages(changes):
    return to_toml(changes.get("parallel", {}), installed())


def answers(name):
    def observe(folder, changes):
        model = loaded(name, stages(changes))
        return asked(shared(model) if changes else ForgeLM(model.model, model.tokenizer, **SETTINGS))

    return observe


def the_same(ranks, alone):
    assert {flag for _, flag in alone["tokens"]} == {True, False}
    for of_rank in ranks:
        for subject in ("tokens", "rolling"):
            for one, other in zip(of_rank[subject], alone[subject], strict=True):
                assert one == pytest.approx(other, abs=1e-5, rel=0)
        for subject in ("greedy", "drawn", "one", "size"):
            assert of_rank[subject] == alone[subject]


def sums(name):
    """Sums of the losses of sequences: of averaged weights, as evaluations use them."""

    def observe(folder, changes):
        ids = 30 + torch.arange(42).reshape(2, 21)
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        model = loaded(name, stages(changes))
        if changes:
            return executor_of(model).evaluate([batch]).per_sequence[0].tolist()
        return cross_entropy(model(batch["input_ids"]).mT, batch["labels"], reduction="none").sum(1).tolist()

    return observe


def the_same_sums(ranks, alone):
    assert ranks == [pytest.approx(alone, rel=1e-6)] * len(ranks)


test_layouts = layout_law(Case("dense", observe=answers("dense"), compare=the_same, layouts=QUICK))
test_further_layouts = pytest.mark.thorough(
    layout_law(
        Case("dense", observe=answers("dense"), compare=the_same, layouts=OTHERS),
        Case("experts", observe=answers("experts"), compare=the_same, layouts=("fsdp2_ep2",)),
        Case("ema", observe=sums("ema"), compare=the_same_sums, layouts=QUICK),
        Case("schedule-free", observe=sums("schedule-free"), compare=the_same_sums, layouts=QUICK),
    )
)


def test_what_ranks_cannot_do_is_refused():
    def rank(number):
        with refuses("", 30, 4, "tp 2", 28):
            shared(loaded("dense", {"tp": {"degree": 2}}), max_length=30)
        with refuses("parallel", "tp 3 = 3", "2 ranks"):
            loaded("dense", {"tp": {"degree": 3}})
        with refuses("parallel.ep.degree", 2, "shard 1 x cp 1 = 1", "[parallel.fsdp]"):
            loaded("experts", {"ep": {"degree": 2}})
        lm = shared(loaded("dense", {"tp": {"degree": 2}}))
        with pytest.raises(ForgeError, match=naming("tp 2", "forge_kit")):
            lm._trained([1, 2, 3])
        with pytest.raises(ForgeError, match=naming("different", "tasks")):
            lm._loglikelihood_tokens([(None, [1], [number])], disable_tqdm=True)

    for name in ("dense", "experts"):
        trained(name)
    run_on_ranks(2, rank)
