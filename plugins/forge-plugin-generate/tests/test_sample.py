"""Samples with log-probabilities, against forward passes of whole rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core import ForgeError
from forge_core.engine.build import build_context, build_model
from forge_plugin_generate.generate import Sampling
from forge_plugin_generate.sample import Sampled, sample
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import TinyModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.laws import Case, layout_law
from forge_testing.refusals import naming

MODEL = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2))
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
SEEDS = [7, 8, 9, 10]
PLAIN = Sampling()


def network(folder: Path, changes: Any, model: Any = MODEL) -> Any:
    job = tiny_job(str(folder), installed(), model=model, precision="fp64", global_batch_size=8, **changes)
    return build_model(job, build_context(job, installed(), None)).model.eval()


def drawn(folder: Path, changes: Any, sampling: Sampling = PLAIN, rows: slice = slice(None)) -> list[Sampled]:
    return sample(network(folder, changes), PROMPTS[rows], 12, [0, 31], sampling, SEEDS[rows])


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, top_k=5), Sampling(temperature=2.0, top_p=0.6)], ids=str
)
def test_log_probabilities_are_those_of_a_forward_pass(tmp_path, sampling):
    model = network(tmp_path, {})
    for prompt, row in zip(PROMPTS, drawn(tmp_path, {}, sampling), strict=True):
        ids = torch.tensor([[*prompt, *row.ids]])
        with torch.no_grad():
            logits = model.head.logits(model({"input_ids": ids[:, :-1]}))[0, len(prompt) - 1 :]
        labels = ids[0, len(prompt) :, None]
        expected = logits.log_softmax(-1).gather(-1, labels)[:, 0]
        assert row.log_p == pytest.approx(expected.tolist(), abs=1e-12)
        # Restricted to the tokens that could be drawn, by definition
        p = (logits / sampling.temperature).softmax(-1)
        order = p.sort(descending=True)
        before = order.values.cumsum(-1) - order.values
        rank = torch.arange(p.shape[-1])
        kept = (before < sampling.top_p) & (rank < (sampling.top_k or 99))
        q = torch.zeros_like(p).scatter(-1, order.indices, order.values * kept)
        q = q / q.sum(-1, keepdim=True)
        assert row.log_q == pytest.approx(q.gather(-1, labels)[:, 0].log().tolist(), abs=1e-9)
        assert len(row.ids) == 12 or row.ids[-1] in (0, 31)
        assert not {0, 31} & {*row.ids[:-1]}


def test_what_a_row_draws_does_not_depend_on_the_others(tmp_path):
    together = drawn(tmp_path, {})
    assert [drawn(tmp_path, {}, rows=slice(n, n + 1))[0].ids for n in range(4)] == [row.ids for row in together]


def test_draws_have_the_frequencies_of_the_distribution(tmp_path):
    model = network(tmp_path, {})
    with torch.no_grad():
        p = (model.head.logits(model({"input_ids": torch.tensor([[1, 2]])}))[0, -1] / 0.8).softmax(-1)
    count = 4000
    rows = sample(model, [[1, 2]] * count, 1, [0], Sampling(temperature=0.8), range(count))
    found = torch.bincount(torch.tensor([row.ids[0] for row in rows]), minlength=32)
    # Chi squared with 31 degrees of freedom is above 61 once in a thousand
    assert ((found - count * p).square() / (count * p)).sum() < 61


def test_the_most_likely_token_is_certain(tmp_path):
    rows = drawn(tmp_path, {}, Sampling(temperature=0.0))
    assert {value for row in rows for value in row.log_q} == {0.0}
    assert all(value < 0 for row in rows for value in row.log_p)


def test_models_and_prompts_that_cannot_be_continued_are_refused(tmp_path):
    with pytest.raises(ForgeError, match=naming("prompt")):
        sample(network(tmp_path, {}), [[1], []], 4, [0], Sampling(), [1, 2])
    with pytest.raises(ForgeError, match=naming("new_cache")):
        sample(network(tmp_path, {}, TinyModel()), [[1]], 4, [0], Sampling(), [1])


def observe(folder: Path, changes: Any) -> list[tuple[list[int], list[float]]]:
    return [(row.ids, row.log_p) for row in drawn(folder, changes)]


def same(ranks: Any, alone: Any) -> None:
    for rows in ranks:
        assert [ids for ids, _ in rows] == [ids for ids, _ in alone]
        assert [p for _, log_p in rows for p in log_p] == pytest.approx(
            [p for _, log_p in alone for p in log_p], abs=1e-11
        )


test_layouts = layout_law(Case("samples", observe=observe, compare=same, layouts=("fsdp2", "tp2")))
