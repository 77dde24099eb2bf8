"""Rows that wait take the place of rows that have ended, and change nothing of what the others say."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen

from forge_core.contracts.errors import ForgeError
from forge_core.plugins.catalog import Catalog
from forge_plugin_generate import running_rows
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_transformer import (
    AttentionPattern,
    GroupedQueryAttention,
    LongRope,
    NoAttention,
    ParallelAttention,
    Transformer,
)
from forge_testing.layouts import LayoutCase
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming
from forge_testing.runs import tiny_run

VOCABULARY, END, MOST = 32, 31, 14
GREEDY = Sampling(temperature=0)
GROUPED = {"heads": 4, "kv_heads": 2}
ATTENTION = {
    "grouped": GroupedQueryAttention(**GROUPED),
    "windows": AttentionPattern(
        layers=("a", "b"),
        kinds={"a": GroupedQueryAttention(**GROUPED, window=5), "b": GroupedQueryAttention(**GROUPED)},
    ),
    "side by side, in a layer": AttentionPattern(
        layers=("a", "b"),
        kinds={
            "a": ParallelAttention(
                mixers={"near": GroupedQueryAttention(**GROUPED, window=5), "full": GroupedQueryAttention(**GROUPED)}
            ),
            "b": NoAttention(),
        },
    ),
    "latent": MultiHeadLatentAttention(heads=4),
    "voids its cache": GroupedQueryAttention(
        **GROUPED,
        rope=LongRope(short_factor=(1.0, 1.5), long_factor=(2.0, 9.0), original_max_position_embeddings=8, factor=2.0),
    ),
}


def prompts(count):
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (count,), generator=draw).tolist()
    return [torch.randint(1, VOCABULARY - 1, (length,), generator=draw).tolist() for length in lengths]


def network(folder, parallel=None, attention=None, **keys):
    model = Transformer(
        dim=16, layers=2, vocab_size=VOCABULARY, init_std=0.5, attention=attention or ATTENTION["grouped"], **keys
    )
    stages = LayoutCase(ranks=2, parallel=parallel or {}).stages(Catalog.installed())
    run = tiny_run(folder, model=model, precision="fp64", global_batch_size=8, micro_batch_size=1, parallel=stages)
    return run.model.eval()


def early(row):
    """Ends rows at different lengths."""
    return sum(row) % 5 == 0


class Counted:
    """Notes the number of rows whenever a model decodes."""

    def __init__(self, model):
        self.batches, self._decode = [], model.decode
        model.decode = self

    def __call__(self, batch, cache):
        self.batches.append(len(batch["input_ids"]))
        return self._decode(batch, cache)


@pytest.mark.parametrize("name", ATTENTION)
def test_each_row_is_as_if_it_were_alone(name, tmp_path):
    model, rows = network(tmp_path, attention=ATTENTION[name]), prompts(11)
    alone = [generate(model, [row], MOST, END, GREEDY, until=early)[0] for row in rows]
    counted = Counted(model)
    for size in (1, 3, 4, 11):
        assert generate(model, rows, MOST, END, GREEDY, until=early, batch_size=size) == alone
        assert max(counted.batches) == size
        counted.batches.clear()
    assert len({len(row) for row in alone}) > 3


@pytest.mark.parametrize("name", ATTENTION)
def test_long_prompts_are_read_in_pieces_whose_masks_are_bounded(name, tmp_path, monkeypatch):
    model, rows = network(tmp_path, attention=ATTENTION[name]), prompts(3)
    whole = generate(model, rows, MOST, END, GREEDY, until=early)
    monkeypatch.setattr(running_rows, "MASK_BYTES", 48)
    monkeypatch.setattr(running_rows, "LEAST_PIECE", 1)
    sizes, decode = [], model.decode

    def noting(batch, cache):
        sizes.append(batch["input_ids"].shape)
        return decode(batch, cache)

    model.decode = noting
    assert generate(model, rows, MOST, END, GREEDY, until=early) == whole
    longest = max(map(len, rows))
    count, first = sizes[0]
    assert count == len(rows)
    assert first == (longest if name == "voids its cache" else 48 // (count * longest)) > 1


def test_the_model_runs_less_often_than_batch_by_batch(tmp_path):
    model, rows = network(tmp_path), prompts(40)

    def late(row):
        return sum(row) % 11 == 0

    counted = Counted(model)
    parts = [rows[start : start + 8] for start in range(0, 40, 8)]
    by_batch = [row for part in parts for row in generate(model, part, 40, END, GREEDY, until=late)]
    apart = len(counted.batches)
    counted.batches.clear()
    assert generate(model, rows, 40, END, GREEDY, until=late, batch_size=8) == by_batch
    assert len(counted.batches) < 0.8 * apart


def test_a_batch_becomes_smaller_as_rows_end(tmp_path):
    model = network(tmp_path)
    counted = Counted(model)
    generate(model, prompts(8), MOST, END, GREEDY, until=early)
    assert counted.batches[0] == 8
    assert counted.batches[-1] <= 4


def test_draws_do_not_depend_on_when_others_end(tmp_path):
    model, rows, drawn = network(tmp_path), prompts(6), Sampling(temperature=1.0, top_k=9)
    whole = generate(model, rows, MOST, END, drawn, seed=3)
    ended = generate(model, rows, MOST, END, drawn, seed=3, until=early)
    assert all(long[: len(short)] == short for long, short in zip(whole, ended, strict=True))
    assert ended != whole


def test_a_cache_that_cannot_be_joined_is_used_until_all_have_ended(tmp_path):
    @frozen
    class Own:
        inner: object

    model, rows = network(tmp_path), prompts(7)
    expected = generate(model, rows, MOST, END, GREEDY, until=early)
    new_cache, decode = model.new_cache, model.decode
    model.new_cache = lambda *sizes: Own(new_cache(*sizes))
    model.decode = lambda batch, cache: decode(batch, cache.inner)
    assert generate(model, rows, MOST, END, GREEDY, until=early, batch_size=3) == expected


def test_learned_positions_suffice_for_the_longest_row(tmp_path):
    rows = prompts(9)
    longest = max(map(len, rows)) + MOST
    model = network(tmp_path, attention=ATTENTION["grouped"], learned_positions=max(longest, 32))
    alone = [generate(model, [row], MOST, END, GREEDY, until=early)[0] for row in rows]
    assert generate(model, rows, MOST, END, GREEDY, until=early, batch_size=3) == alone


@pytest.mark.parametrize("refused", [{"sampling": Sampling()}, {"entries": {"patches": torch.zeros(3)}}])
def test_waiting_is_for_greedy_tokens_of_texts(refused, tmp_path):
    keys = {"sampling": GREEDY} | refused
    with pytest.raises(ForgeError, match=naming("draws", "entries")):
        generate(network(tmp_path), prompts(3), MOST, END, **keys, batch_size=2)


@pytest.mark.parametrize("name", ["fsdp", "tp", "pp"])
def test_ranks_that_share_a_model(name, tmp_path):
    everyones = prompts(9)
    shares = [everyones[:2], everyones[2:]] if name == "fsdp" else [everyones] * 2
    model = network(tmp_path)
    expected = [generate(model, own, MOST, END, GREEDY, until=early, batch_size=3) for own in shares]

    def rank(number):
        split = network(tmp_path, {name: {} if name == "fsdp" else {"degree": 2}})
        return generate(split, shares[number], MOST, END, GREEDY, until=early, batch_size=3)

    assert run_on_ranks(2, rank) == expected
