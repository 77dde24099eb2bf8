"""Sampling: what may be drawn, when a row ends, and that a cache changes nothing."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Model
from forge_core.plugins.catalog import Catalog
from forge_kit.nn.generation import WholeModel, join
from forge_plugin_generate.command import check_generation
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_generate.kinds import usual_prompt_maker
from forge_testing.refusals import naming, refuses

END = 9
LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.06, 0.04]]))


def drawn(sampling, draws=400):
    generator = torch.Generator().manual_seed(0)
    return torch.cat([sampling.draw(LOGITS, generator) for _ in range(draws)])


def test_temperature_zero_takes_the_likeliest():
    assert set(drawn(Sampling(temperature=0), 20).tolist()) == {0}


def test_frequencies_follow_the_probabilities():
    counts = drawn(Sampling(), 4000).bincount(minlength=5) / 4000
    torch.testing.assert_close(counts, LOGITS.exp()[0], atol=0.03, rtol=0)


def test_a_low_temperature_sharpens():
    assert (drawn(Sampling(temperature=0.25)) == 0).float().mean() > 0.9


def test_top_k_leaves_the_k_likeliest():
    assert set(drawn(Sampling(top_k=2)).tolist()) == {0, 1}
    assert set(drawn(Sampling(top_k=99)).tolist()) == set(range(5))


@pytest.mark.parametrize(("top_p", "left"), [(0.4, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1, 2})])
def test_top_p_leaves_the_smallest_set_that_reaches_it(top_p, left):
    assert set(drawn(Sampling(top_p=top_p)).tolist()) == left


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"top|temperature"):
        Sampling(**wrong)


class Counts(Model):
    """Continues n with n + 1, and counts how many positions it was asked to compute."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.computed = 0
        self.head = self

    def new_cache(self, batch_size, length):
        return {"length": length}

    def decode(self, batch, cache):
        self.computed += batch["input_ids"].shape[1]
        assert (batch["positions"][:, -1] >= 0).all()
        return nn.functional.one_hot((batch["input_ids"] + 1) % 12, 12).float()

    def logits(self, hidden):
        return hidden


GREEDY = Sampling(temperature=0)


def test_prompts_and_models_of_nothing_are_refused():
    with pytest.raises(ForgeError, match="no prompt"):
        generate(Counts(), [], 3, END, GREEDY)
    with pytest.raises(ForgeError, match=naming("--image", "--video", "pip install forge-plugin-images")):
        usual_prompt_maker(Catalog([]))


@pytest.mark.parametrize(("replicate", "is_refused"), [(1, True), (2, False)])
def test_a_model_that_stages_have_split_is_refused_unless_they_generate_together(replicate, is_refused):
    layout, model = SimpleNamespace(replicate=replicate, world_size=2), Counts()
    trained = SimpleNamespace(loaded=SimpleNamespace(context=SimpleNamespace(layout=layout)), model=model)
    with refuses("parallel", "together") if is_refused else nullcontext():
        check_generation(trained)
    join(model, WholeModel(model))
    check_generation(trained)


def test_each_row_stops_before_its_end_of_text():
    rows = generate(Counts(), [[5], [1, 2, 3]], 20, END, GREEDY)
    assert rows == [[6, 7, 8], [4, 5, 6, 7, 8]]


def test_rows_end_after_the_number_of_tokens_asked_for():
    assert generate(Counts(), [[0]], 3, END, GREEDY) == [[1, 2, 3]]


def test_the_cache_computes_each_position_once():
    cached, plain = Counts(), Counts()
    prompts = [[0, 1], [0]]
    assert generate(cached, prompts, 4, END, GREEDY) == generate(plain, prompts, 4, END, GREEDY, use_cache=False)
    assert cached.computed == 2 + 3
    assert plain.computed == 2 + 3 + 4 + 5


def test_an_empty_prompt_is_refused():
    with pytest.raises(ForgeError, match=naming("empty")):
        generate(Counts(), [[1], []], 3, END)


def test_a_model_without_a_cache_is_refused():
    with pytest.raises(ForgeError, match=naming("Linear", "new_cache and decode")):
        generate(nn.Linear(1, 1), [[1]], 3, END)


def test_a_row_ends_with_the_tokens_that_a_caller_waits_for():
    asked = []

    def until(row):
        asked.append(tuple(row))
        return row[-2:] in ([7, 8], [3, 4])

    assert generate(Counts(), [[5], [1], [6]], 20, END, GREEDY, until=until) == [[6, 7, 8], [2, 3, 4], [7, 8]]
    assert (7, 8, 9) not in asked  # a row that has ended is not asked again


def test_a_row_stops_before_any_of_several_ids():
    rows = generate(Counts(), [[5], [1], [8]], 20, END, GREEDY, stop=[3, 7])
    assert rows == [[6], [2], []]
