"""Multi-token prediction: its objective and gradients, what is logged, and what it leaves alone.

Shapes: S positions, D model width.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from forge_core.checkpoint.run_diff import job_changes
from forge_core.config.load import dump_job, load_job
from forge_core.contracts.components import SchedulerComponent
from forge_core.contracts.data import IGNORED_LABEL, Batch
from forge_core.engine.build import Run
from forge_core.losses import CrossEntropy
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_transformer import GELU, GroupedQueryAttention, LayerNorm, MultiTokenPrediction, SwiGLU, Transformer
from forge_plugin_transformer.modules.multi_token import LABELS, look_ahead
from forge_testing.refusals import at, check_problems, problems_of, refuses_all
from forge_testing.runs import tiny_run

WEIGHT = 10.0
"""Large, so that a wrong scale cannot hide."""
LENGTHS = ((5, 4, 1, 2), (9, 3))
"""Of the documents of two rows."""


def model(depth: int = 2, weight: Any = WEIGHT, **keys: Any) -> Transformer:
    attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True)
    settings = {"vocab_size": 32, "dim": 16, "layers": 2, "attention": attention, "ffn": SwiGLU(hidden=24)}
    mtp = MultiTokenPrediction(depth=depth, weight=weight) if depth else None
    return Transformer(**{"init_std": 0.2, "mtp": mtp, **settings, **keys})


def documents() -> Batch:
    """Two rows of documents, some of whose labels are ignored."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(32, (2, 12), generator=generator) for _ in range(2))
    labels[0, 2] = labels[1, :2] = IGNORED_LABEL
    numbers = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    return {"input_ids": ids, "labels": labels, "document_ids": numbers}


def gradients(run: Run, *batches: Batch) -> dict[str, Tensor]:
    """Of a step."""
    tokens = sum((batch["labels"] != IGNORED_LABEL).sum() for batch in batches)
    run.context.auxiliary.begin_step(tokens, sum(len(batch["labels"]) for batch in batches), len(batches))
    run.executor.train_step(batches, tokens.double())
    run.context.auxiliary.end_step({})
    return {item.name: item.parameter.grad for item in run.parameters}


def reference(network: Any, batch: Batch, weight: float) -> tuple[Tensor, list[Tensor]]:
    """The sum of the model's losses, and those of each module, one document by itself after the other, as equations 21
    to 25 of arXiv 2412.19437 have it."""
    main, further = [], [[] for _ in network.mtp.blocks]
    for row, lengths in enumerate(LENGTHS):
        for ids, labels in zip(*(batch[key][row].split(lengths) for key in ("input_ids", "labels")), strict=True):
            hidden = network({"input_ids": ids[None]})
            main.append(cross_entropy(network, hidden, labels))
            for k, module in enumerate(network.mtp.blocks, 1):
                if len(ids) <= k:
                    break
                ahead = network.embedding.weight[ids[None, k:]]
                both = torch.cat([module.embedding_norm(ahead), module.hidden_norm(hidden[:, : len(ids) - k])], -1)
                x = both @ module.projection.weight.T
                x = x + module.attention(module.attention_norm(x), {})
                hidden = module.norm(x + module.ffn(module.ffn_norm(x), {}))
                further[k - 1].append(cross_entropy(network, hidden, labels[k:]))
    return torch.stack(main).sum(), [torch.stack(losses).sum() for losses in further]


def cross_entropy(network: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden[0] @ network.head.weight.T, labels, ignore_index=IGNORED_LABEL, reduction="sum")


# --- the objective -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("norm_and_ffn", [{}, {"norm": LayerNorm(), "ffn": GELU(hidden=24)}], ids=["llama", "gpt"])
def test_gradients_are_those_of_the_equations(tmp_path, tied, norm_and_ffn):
    run = tiny_run(tmp_path, model=model(tie_embeddings=tied, **norm_and_ffn), seq_len=12, precision="fp64")
    batch = documents()
    found = gradients(run, batch)
    main, further = reference(run.model, batch, WEIGHT)
    tokens = (batch["labels"] != IGNORED_LABEL).sum()
    expected = torch.autograd.grad((main + WEIGHT / 2 * sum(further)) / tokens, list(run.model.parameters()))
    for (name, _), gradient in zip(run.model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name], gradient, atol=1e-12, rtol=1e-10, msg=name)


@pytest.mark.parametrize("loss", [None, CrossEntropy()], ids=["chunked", "whole logits"])
def test_micro_batches_weigh_by_their_targets(tmp_path, loss):
    mtp = {} if loss is None else {"mtp": MultiTokenPrediction(depth=2, weight=WEIGHT, loss=loss)}
    batch = documents()
    rows = [{name: value[row : row + 1] for name, value in batch.items()} for row in (0, 1)]
    runs = [tiny_run(tmp_path, model=model(**mtp), seq_len=12, precision="fp64") for _ in range(2)]
    once, twice = gradients(runs[0], batch), gradients(runs[1], *rows)
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], gradient, atol=1e-12, rtol=1e-10, msg=name)


def test_targets_are_in_the_same_document_and_not_ignored():
    labels = torch.arange(1, 9)[None]
    document_ids = torch.tensor([[4, 4, 4, 7, 7, 4, 4, 4]])
    labels[0, 2] = none = IGNORED_LABEL
    ahead = look_ahead({"input_ids": labels, "labels": labels, "document_ids": document_ids}, 2)[LABELS][0]
    assert ahead[:, 0].tolist() == [2, none, none, 5, none, 7, 8, none]
    assert ahead[:, 1].tolist() == [none, none, none, none, none, 8, none, none]


def test_a_document_whose_id_comes_back_is_another_one():
    labels = torch.arange(1, 7)[None]
    document_ids = torch.tensor([[0, 0, 1, 1, 0, 0]])
    ahead = look_ahead({"input_ids": labels, "labels": labels, "document_ids": document_ids}, 4)[LABELS][0]
    none = IGNORED_LABEL
    assert ahead[:, 0].tolist() == [2, none, 4, none, 6, none]
    assert ahead[:, 1:].eq(none).all(), "the first and the last two positions are of different documents"


# --- what is logged ------------------------------------------------------------------------------------------------


def test_losses_are_logged_unweighted_and_of_each_module_over_its_targets(tmp_path):
    run, batch = tiny_run(tmp_path, model=model(), seq_len=12, precision="fp64"), documents()
    auxiliary = run.context.auxiliary
    gradients(run, batch)
    _, further = reference(run.model, batch, WEIGHT)
    totals = auxiliary.totals()
    tokens = (batch["labels"] != IGNORED_LABEL).sum()
    assert totals["mtp/loss"].item() == pytest.approx((sum(further) / 2 / tokens).item(), abs=1e-12)
    assert totals["mtp/weight"].item() == WEIGHT
    auxiliary.end_step({name: value for name, value in totals.items() if not isinstance(name, str)})
    targets = (look_ahead(batch, 2)[LABELS] != IGNORED_LABEL).sum((0, 1))
    for distance, (loss, count) in enumerate(zip(further, targets, strict=True), 1):
        assert auxiliary.summaries()[f"mtp/loss_{distance}"].item() == pytest.approx((loss / count).item(), abs=1e-12)


def test_the_reported_loss_is_the_models_own(make_job, train, lines):
    """Both runs begin with the same weights: what a parameter starts with depends on its name alone."""
    first = [lines(train(make_job(job={"name": name}, model=model(depth))))[0] for name, depth in (("a", 0), ("b", 2))]
    assert first[0]["loss"] == first[1]["loss"]
    assert "mtp/loss" not in first[0]
    assert first[1]["mtp/loss_2"] > 0


@frozen(kw_only=True)
class Falling(SchedulerComponent):
    """0.4, 0.3, 0.2, …"""

    def build(self, context):
        return lambda step, total: 0.1 * (total - step)


def test_the_weight_follows_its_schedule(make_job, train, lines):
    """That a run which continues has the weight of its step is in tests/checkpoint."""
    summary = train(make_job(model=model(weight=Falling())))
    assert [line["mtp/weight"] for line in lines(summary)] == pytest.approx([0.4, 0.3, 0.2, 0.1])


# --- what it leaves alone --------------------------------------------------------------------------------------------


def test_without_the_table_nothing_changes(tmp_path):
    plain, predicting = (tiny_run(tmp_path, model=model(depth)).model for depth in (0, 2))
    added = predicting.state_dict().keys() - plain.state_dict().keys()
    assert added
    assert all(name.startswith("mtp.blocks.") for name in added)
    assert all(torch.equal(predicting.state_dict()[name], value) for name, value in plain.state_dict().items())
    assert not plain.further_blocks()
    assert plain.ends() == (["embedding"], ["norm", "head"])


def test_evaluation_and_generation_do_not_run_the_modules(tmp_path):
    run = tiny_run(tmp_path, model=model(), seq_len=12)
    plain = tiny_run(tmp_path, model=model(0), seq_len=12)
    for block in run.model.mtp.blocks:
        block.forward = None
    outputs = [r.executor.evaluate([documents()]).loss_sum for r in (run, plain)]
    assert outputs[0] == outputs[1]
    texts = [generate(r.model.eval(), [[1, 2, 3], [4]], 6, 31, Sampling(temperature=0)) for r in (run, plain)]
    assert texts[0] == texts[1]


# --- what is declared, and refused ---------------------------------------------------------------------------------


def test_flops_count_blocks_projection_and_head(tmp_path):
    counts = [tiny_run(tmp_path, model=model(depth)).outline.flops for depth in (0, 1, 3)]
    a_layer = tiny_run(tmp_path, model=model(0, layers=3)).outline.flops - counts[0]
    assert counts[1] - counts[0] == a_layer + 6 * (2 * 16 * 16) + 6 * 16 * 32
    assert counts[2] - counts[0] == 3 * (counts[1] - counts[0])


def test_more_modules_than_positions_are_refused(make_job):
    check_problems(problems_of(make_job(model=model(depth=8))), at("model.mtp.depth", 8, "train.seq_len = 8"))


def test_a_negative_weight_is_refused(tmp_path):
    text = (
        '[model]\ntype = "transformer"\nvocab_size = 32\n[model.mtp]\nweight = -1\n[[data.sources]]\n'
        'type = "forge_testing:Numbers"\n[optimizer]\ntype = "forge_testing:TinyAdamW"\n'
    )
    (tmp_path / "job.toml").write_text(text)
    with refuses_all("train", at("model.mtp.weight", ">= 0", -1.0)):
        load_job(tmp_path / "job.toml")


@pytest.mark.parametrize(("change", "means"), [({"weight": 0.5}, "flag"), ({"depth": 1}, "impossible")])
def test_what_a_change_means_for_a_run_that_continues(make_job, catalog, change, means):
    before, mtp = make_job(model=model()), MultiTokenPrediction(depth=2, weight=WEIGHT)
    after = make_job(model=model(mtp=attrs.evolve(mtp, **change)))
    [found] = job_changes(dump_job(before, catalog), after, catalog)
    assert (found.path, found.means) == (f"model.mtp.{next(iter(change))}", means)
