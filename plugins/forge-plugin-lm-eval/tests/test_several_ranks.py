"""Several ranks that share a model have the scores and texts of one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from forge_core import ForgeError, Trainer, load_model
from forge_kit.ranks import executor_of
from forge_plugin_lm_eval.model import ForgeLM
from forge_plugin_lm_eval.shared_model import SharedLM
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming, refuses

LENGTH, ROWS = 48, 3
TEXT = "the cat sat on the mat and the dog sat on the log, and then the bird flew over the red tree\n"
MODEL = {
    "type": "transformer",
    "dim": 16,
    "layers": 4,
    "init_std": 0.3,
    "attention": {"heads": 4, "kv_heads": 2},
}
WITH_EXPERTS = {**MODEL, "ffn": {"type": "moe", "experts": 4}}
JOB = {
    "train": {"steps": 1, "global_batch_size": 3, "seq_len": LENGTH, "device": "cpu"},
    "data": {"tokenizer": {"type": "bpe", "vocab_size": 264}},
    "optimizer": {"type": "forge_testing:TinyAdamW"},
}
LAYOUTS = {
    "fsdp": {"fsdp": {}},
    "tp": {"tp": {"degree": 2}},
    "pp": {"pp": {"degree": 2}},
    "copies": {},
    "tp, whole": {"tp": {"degree": 2, "sequence_parallel": False, "loss_parallel": False}},
    "pp, interleaved": {"pp": {"degree": 2, "schedule": "interleaved_1f1b"}},
    "cp, ring": {"cp": {"degree": 2}},
    "cp, ulysses": {"cp": {"degree": 2, "method": "ulysses"}},
}
QUICK = ("fsdp", "tp", "pp")
OTHERS = tuple(name for name in LAYOUTS if name not in QUICK)
FOUR = {
    "fsdp x tp": {"fsdp": {}, "tp": {"degree": 2}},
    "fsdp x pp": {"fsdp": {}, "pp": {"degree": 2}},
    "tp x pp": {"tp": {"degree": 2}, "pp": {"degree": 2}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: `dense`, and `experts`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT * 20)
    source = {"type": "text", "path": f"{folder}/text.txt"}
    for name, model in (("dense", MODEL), ("experts", WITH_EXPERTS)):
        job = {**JOB, "job": {"name": name, "output": str(folder)}, "model": model}
        Trainer({**job, "data": {**JOB["data"], "sources": [source]}}, echo=lambda text: None).run()
    return folder


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


@pytest.fixture(scope="module")
def expected(runs):
    found = {}
    for name in ("dense", "experts"):
        trained = load_model(runs / name, device="cpu")
        found[name] = asked(ForgeLM(trained.model, trained.tokenizer, max_length=LENGTH, batch_size=ROWS))
    return found


def shared(run, parallel, **settings):
    trained = load_model(run, device="cpu", parallel=parallel)
    return SharedLM(trained, trained.tokenizer, **{"max_length": LENGTH, "batch_size": ROWS, **settings})


def check(found, expected):
    for subject in ("tokens", "rolling"):
        pairs = zip(found[subject], expected[subject], strict=True)
        for one, other in pairs:
            assert one == pytest.approx(other, abs=1e-5, rel=0)
    assert {flag for _, flag in expected["tokens"]} == {True, False}
    for subject in ("greedy", "drawn", "one", "size"):
        assert found[subject] == expected[subject]


def check_layouts(ranks, layouts, runs, expected):
    """Ranks, started once, have the answers of one process under each layout."""
    for of_rank in run_on_ranks(ranks, lambda rank: [asked(shared(runs / "dense", each)) for each in layouts]):
        for found in of_rank:
            check(found, expected["dense"])


@pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["quick", "others"])
def test_two_ranks(names, runs, expected):
    check_layouts(2, [LAYOUTS[name] for name in names], runs, expected)


@pytest.mark.thorough
def test_four_ranks(runs, expected):
    check_layouts(4, [*FOUR.values()], runs, expected)


@pytest.mark.thorough
def test_ranks_that_share_experts(runs, expected):
    parallel = {"fsdp": {}, "ep": {"degree": 2}}
    for found in run_on_ranks(2, lambda rank: asked(shared(runs / "experts", parallel))):
        check(found, expected["experts"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [{"plugins": {"ema": {"decay": 0.5, "warmup": False}}}, {"optimizer": {"type": "schedule_free_adamw", "lr": 0.05}}],
    ids=["ema", "schedule-free"],
)
def test_weights_are_those_that_evaluations_use(changes, runs):
    source = {"type": "text", "path": f"{runs}/text.txt"}
    job = {**JOB, "job": {"name": f"averaged-{next(iter(changes))}", "output": str(runs)}, "model": MODEL, **changes}
    job = {**job, "train": {**JOB["train"], "steps": 3}, "data": {**JOB["data"], "sources": [source]}}
    run = Trainer(job, echo=lambda text: None).run().folder
    ids = 30 + torch.arange(42).reshape(2, 21)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    logits = load_model(run, device="cpu")(batch["input_ids"])
    expected = cross_entropy(logits.mT, batch["labels"], reduction="none").sum(1)

    def rank(number):
        models = (load_model(run, device="cpu", parallel=LAYOUTS[name]) for name in QUICK)
        return [executor_of(model).evaluate([batch]).per_sequence[0].tolist() for model in models]

    for sums in run_on_ranks(2, rank):
        for found in sums:
            assert found == pytest.approx(expected.tolist(), rel=1e-6)


def test_what_ranks_cannot_do_is_refused(runs):
    def rank(number):
        with refuses("", 30, 4, "tp 2", 28):
            shared(runs / "dense", {"tp": {"degree": 2}}, max_length=30)
        with refuses("parallel", "tp 3 = 3", "2 ranks"):
            shared(runs / "dense", {"tp": {"degree": 3}})
        with refuses("parallel.ep.degree", 2, "shard 1 x cp 1 = 1", "[parallel.fsdp]"):
            shared(runs / "experts", {"ep": {"degree": 2}})
        lm = shared(runs / "dense", {"tp": {"degree": 2}})
        with pytest.raises(ForgeError, match=naming("tp 2", "forge_kit")):
            lm._trained([1, 2, 3])
        with pytest.raises(ForgeError, match=naming("different", "tasks")):
            lm._loglikelihood_tokens([(None, [1], [number])], disable_tqdm=True)

    run_on_ranks(2, rank)
