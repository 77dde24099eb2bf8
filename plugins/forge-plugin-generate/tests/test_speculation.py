"""A model proposes tokens by its modules of multi-token prediction: the text is the one without proposals."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import pytest
import torch

from forge_core import Trainer, load_model
from forge_core.cli import main
from forge_core.contracts.errors import ForgeError
from forge_plugin_generate.chat import Chat
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_generate.speculation import speculate
from forge_plugin_generate.stops import Stops
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_text.bytes import ByteTokenizer
from forge_plugin_transformer import Canon, GroupedQueryAttention, MultiTokenPrediction, SwiGLU, Transformer
from forge_plugin_transformer.modules.attention import KVCache
from forge_plugin_transformer.modules.cache import LayerCaches
from forge_testing.refusals import lacks, naming
from forge_testing.runs import tiny_run

ATTENTION = GroupedQueryAttention(heads=4, kv_heads=2)
LATENT = MultiHeadLatentAttention(heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7]]
MODELS: dict[str, dict[str, Any]] = {
    "one": {"mtp": MultiTokenPrediction(depth=1)},
    "three": {"mtp": MultiTokenPrediction(depth=3)},
    "positions": {"mtp": MultiTokenPrediction(depth=2), "learned_positions": 64},
    "latent": {"mtp": MultiTokenPrediction(depth=2), "attention": LATENT},
    "wide": {
        "mtp": MultiTokenPrediction(depth=2),
        "head_precision": "fp32",
        "tie_embeddings": True,
        "canon": Canon(points=("A", "B", "C", "D")),
    },
}


def component(**keys: Any) -> Transformer:
    settings = {"vocab_size": 32, "dim": 16, "layers": 2, "attention": ATTENTION, "ffn": SwiGLU(hidden=24)}
    return Transformer(**{"init_std": 0.4, **settings, **keys})


@pytest.fixture
def make_network(tmp_path):
    def make(**keys: Any) -> Any:
        return tiny_run(tmp_path, model=component(**keys), seq_len=16, precision="fp64").model.eval()

    return make


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=1.5, top_p=0.9)], ids=["0", "1.5"])
def test_the_tokens_are_those_without_proposals(make_network, name, sampling):
    network = make_network(**MODELS[name])
    for prompt in PROMPTS:
        for stops in ([31], [31, 7, 12]):
            [expected] = generate(network, [prompt], 24, stops[0], sampling, stop=stops, seed=5)
            result = speculate(network, [prompt], 24, stops, sampling, seed=5)
            assert result.rows == [expected]
            assert result.calls >= len(expected) / (1 + network.draft_length)
    if not sampling.temperature:
        assert speculate(network, PROMPTS, 9, [31], sampling).rows == generate(network, PROMPTS, 9, 31, sampling)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_proposals_are_the_likeliest_tokens_of_the_modules_on_the_whole_row(make_network, depth):
    """Each module reads the states of the one before, and the tokens ahead, as in training; without a cache here."""
    network = make_network(mtp=MultiTokenPrediction(depth=depth))
    made, drafter_of = [], network.new_drafter

    def recorded(length):
        drafter = drafter_of(length)

        def propose(hidden, ids):
            made.append((list(ids), drafter(hidden, ids)))
            return made[-1][1]

        return propose

    network.new_drafter = recorded
    speculate(network, [PROMPTS[0]], 12, [31], Sampling(temperature=0))
    assert len(made) > 3
    for ids, proposals in made:
        tokens = list(ids)
        state = network({"input_ids": torch.tensor([ids[:-1]])})
        for distance, block in enumerate(network.mtp.blocks, 1):
            state = block(state, network.embedding(torch.tensor([tokens[distance : len(ids) - 1 + distance]])), {})
            tokens.append(int(network.head.logits(state[:, -1]).argmax()))
        assert proposals == tokens[len(ids) :]


def test_a_row_ends_within_the_tokens_that_a_call_gives(make_network):
    network = make_network(mtp=MultiTokenPrediction(depth=3))
    ended = speculate(network, [PROMPTS[0]], 24, [31], Sampling(temperature=0), until=lambda ids: len(ids) == 5)
    assert [len(row) for row in ended.rows] == [5]
    assert speculate(network, [PROMPTS[0]], 0, [31]).rows == [[]]


def test_a_text_that_just_fits_learned_positions_needs_no_room_for_proposals(make_network):
    network = make_network(mtp=MultiTokenPrediction(depth=3), learned_positions=16)
    greedy = Sampling(temperature=0)
    for prompt, count in ((PROMPTS[0], 11), ([1] * 15, 1)):
        assert speculate(network, [prompt], count, [31], greedy).rows == generate(network, [prompt], count, 31, greedy)


WINDOW = GroupedQueryAttention(heads=4, kv_heads=2, window=4)


@pytest.mark.parametrize(
    ("keys", "prompts", "facts"),
    [
        ({}, [[1]], ["TransformerModel", "[model.mtp]"]),
        ({"mtp": MultiTokenPrediction(), "attention": WINDOW}, [[1]], ["'0'", "window of 4", "forgotten"]),
        ({"mtp": MultiTokenPrediction()}, [[1], [2]], ["temperature 0"]),
        ({"mtp": MultiTokenPrediction()}, [[]], ["empty"]),
    ],
)
def test_what_cannot_be_speculated_is_refused_by_name(make_network, keys, prompts, facts):
    with pytest.raises(ForgeError, match=naming(*[fact.strip("'") for fact in facts])):
        speculate(make_network(**keys), prompts, 20, [31])


def test_a_cache_that_cannot_forget_is_named():
    assert (
        LayerCaches({"0": KVCache(1, 8), "1": object()}).forgets
        == "the cache of layer 1, object, keeps no earlier state"
    )


JOB = {
    "train": {"steps": 60, "global_batch_size": 8, "seq_len": 32},
    "model": {
        "type": "transformer",
        "dim": 32,
        "layers": 1,
        "attention": {"heads": 2},
        "ffn": {"hidden": 64},
        "mtp": {"depth": 2},
    },
    "data": {"tokenizer": {"type": "bytes"}},
    "optimizer": {"type": "adamw", "lr": 1e-2},
    "scheduler": {"type": "wsd"},
}


def test_a_user_sees_the_same_text_and_how_many_tokens_a_call_gives(tmp_path, capfd):
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 50)
    data = {**JOB["data"], "sources": [{"type": "text", "path": str(tmp_path / "text.txt")}]}
    run = str(Trainer({**JOB, "data": data, "job": {"output": str(tmp_path)}}, echo=lambda text: None).run().folder)
    capfd.readouterr()
    words = ["generate", run, "--device=cpu", "--prompt", "the c", "--max-tokens=40"]
    shown = []
    for options in ([], ["--speculate"], ["--speculate", "--stream"]):
        assert main([*words, *options]) == 0
        shown.append(capfd.readouterr())
    assert shown[0].out == shown[1].out == shown[2].out
    assert not lacks(shown[1].err, "tokens a call of the model", "proposals accepted")
    assert main([*words, "--speculate", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)["speculation"]
    assert facts["accepted_length"] > 1.5
    assert facts["calls"] + facts["accepted"] >= 40
    assert f"{facts['accepted_length']:.2f} tokens a call" in shown[1].err
    for command in (words, ["chat", run]):
        with pytest.raises(SystemExit):
            main([*command, "--speculate", "--no-cache"])
        assert "--no-cache" in capfd.readouterr().err
    assert load_model(run, device="cpu").model.draft_length == 2


def test_a_conversation_shows_it_behind_each_answer(monkeypatch, capfd):
    tokenizer, reports = ByteTokenizer(), []
    monkeypatch.setattr("forge_plugin_generate.chat.chat_ids", lambda tokenizer, messages: [1])
    options = Namespace(system="", seed=0, max_tokens=9)
    chat = Chat(Stops.of(tokenizer), lambda ids, until: [[*b"hi"]], options, 24, lambda: reports.append(1))
    for question in ("one", "two"):
        chat.answer(question)
    assert capfd.readouterr().out == "hi\nhi\n"
    assert len(reports) == 2
