"""Compiled blocks: the same curve, few graphs, the right place among the stages."""

from __future__ import annotations

import copy
from itertools import count
from typing import ClassVar

import pytest
import torch
from attrs import frozen
from torch import nn
from torch._dynamo.utils import counters

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.layout import Layout
from forge_core.parallel.stages import order_stages
from forge_plugin_compile import Compile
from forge_plugin_generate.generate import generate
from forge_plugin_transformer import GELU, GroupedQueryAttention, Transformer
from forge_testing import Numbers, PenalisedModel, TinyModel
from forge_testing.catalogs import with_components
from forge_testing.refusals import at, check_problems, refuses
from forge_testing.tiny_model import TinyNetwork

TRACED = Compile(backend="aot_eager")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Forget graphs, counters and limits of other tests."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield
    torch._dynamo.reset()


def transformer(layers=3, **keys):
    attention = GroupedQueryAttention(heads=2, kv_heads=1)
    return Transformer(dim=16, layers=layers, vocab_size=32, init_std=0.2, attention=attention, **keys)


@pytest.fixture
def curve(make_job, train, lines):
    """Losses and gradient norms of a new run, with evaluations in between, compiled or not."""
    number = count()

    def run(model, stage=None, **changes):
        parallel = {} if stage is None else {"compile": stage}
        name = {"name": f"run-{next(number)}"}
        job = make_job(**{"model": model, "parallel": parallel, "job": name, "eval": {"interval": 2}, **changes})
        return [{key: record[key] for key in ("loss", "grad_norm")} for record in lines(train(job))]

    return run


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


# --- the curve ---------------------------------------------------------------------------------------------------


def test_the_transformer_keeps_its_curve(curve):
    assert_same(curve(transformer(), TRACED), curve(transformer()))


def test_dropout_draws_the_same_numbers(curve):
    model = TinyModel(dropout=0.5)
    expected = curve(model)
    assert expected != curve(TinyModel())
    assert_same(curve(model, TRACED), expected)


AUXILIARY = {"global_batch_size": 8, "micro_batch_size": 2, "data": {"sources": (Numbers(ignored=7),)}}


def test_auxiliary_losses_keep_their_gradients(curve):
    expected = curve(PenalisedModel(), **AUXILIARY)
    assert expected != curve(TinyModel(), **AUXILIARY)
    assert_same(curve(PenalisedModel(), TRACED, **AUXILIARY), expected)


def test_metrics_of_modules_count_every_block(make_job, train, lines):
    job = make_job(model=PenalisedModel(layers=3), parallel={"compile": Compile(backend="eager")}, **AUXILIARY)
    assert [[record[f"aux/forwards.{n}"] for n in range(3)] for record in lines(train(job))] == [[4, 4, 4]] * 4


@pytest.mark.slow
def test_the_inductor_keeps_the_curve(curve):
    model = TinyModel(dropout=0.5)
    assert_same(curve(model, Compile()), curve(model))


@pytest.mark.slow
def test_the_inductor_trains_the_transformer_alike(curve):
    """Each kernel takes the C++ compiler two seconds: one short block, and no second graph for an evaluation."""
    model = transformer(layers=1, ffn=GELU(hidden=16))
    assert_same(curve(model, Compile(), steps=2, eval={}), curve(model, steps=2, eval={}))


# --- graphs ------------------------------------------------------------------------------------------------------


def test_equal_blocks_share_one_graph_for_training_and_one_for_evaluation(curve):
    curve(transformer(layers=12), Compile(backend="eager"))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@frozen(kw_only=True)
class EveryBlockDiffers(TinyModel):
    """Each block multiplies by a constant of its own."""

    def build(self, context):
        model = TinyNetwork(self.dim, self.layers, 0.0, 32, context.dtype)
        for number, layer in enumerate(model.layers.values()):
            layer.dropout = number / 1000
        return model


def test_blocks_that_differ_get_graphs_of_their_own(curve):
    curve(EveryBlockDiffers(layers=9), Compile(backend="eager"), steps=2)
    assert counters["stats"]["unique_graphs"] == 2 * 9


def test_runs_of_other_widths_in_one_process_do_not_exhaust_the_limit_together(curve):
    for width in (16, 32, 48):
        with torch._dynamo.config.patch(recompile_limit=4):  # of the graphs of two runs
            curve(TinyModel(dim=width, layers=1), Compile(backend="eager"))


class Breaks(nn.Module):
    def forward(self, carry, batch):
        torch._dynamo.graph_break()
        return carry


@frozen(kw_only=True)
class BreakingModel(TinyModel):
    def build(self, context):
        model = TinyNetwork(self.dim, self.layers, 0.0, 32, context.dtype)
        model.layers["0"] = Breaks()
        return model


def test_a_block_that_does_not_fit_into_one_graph_is_an_error_unless_asked_for(curve):
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        curve(BreakingModel(), TRACED)
    torch._dynamo.reset()
    assert len(curve(BreakingModel(), Compile(backend="aot_eager", fullgraph=False))) == 4


# --- generation --------------------------------------------------------------------------------------------------


def test_generation_is_not_compiled(make_job, build):
    compiled = build(make_job(model=transformer(), parallel={"compile": TRACED})).model
    plain = build(make_job(model=transformer())).model
    prompts = [[1, 2, 3], [4]]
    assert generate(compiled, prompts, 20, 31, seed=0) == generate(plain, prompts, 20, 31, seed=0)
    assert not counters["stats"]


def test_a_copy_generates_with_its_own_weights(make_job, build):
    model = build(make_job(model=transformer(), parallel={"compile": TRACED})).model
    twin = copy.deepcopy(model)
    before = generate(model, [[1]], 8, 31, seed=0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_()
    assert generate(model, [[1]], 8, 31, seed=0) == before
    assert generate(twin, [[1]], 8, 31, seed=0) != before


# --- as a stage --------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Stage(ParallelComponent):
    owns_reduction: ClassVar[bool] = False


def test_it_stands_after_what_changes_blocks_and_before_the_sharding_of_parameters(catalog):
    around = ["fsdp", "activation_checkpointing", "cp", "ep", "tp", "float8", "pp"]
    kinds = {name: type(name, (Stage,), {}) for name in around}
    stages = {name: kind() for name, kind in kinds.items()} | {"compile": Compile()}
    order = [stage.name for stage in order_stages(stages, with_components(catalog, {"parallel": kinds}))]
    assert order.index("compile") == order.index("fsdp") - 1 == len(around) - 1


def test_parameters_keep_their_names(make_job, build):
    compiled = build(make_job(model=transformer(), parallel={"compile": TRACED})).model
    plain = build(make_job(model=transformer())).model
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_an_unknown_backend_is_refused_before_training(make_job, build):
    with refuses("parallel.compile.backend", "'indicator'", "inductor", "eager"):
        build(make_job(parallel={"compile": Compile(backend="indicator")}))


def test_only_the_inductor_has_modes(make_job):
    job = make_job()
    found = Compile(backend="eager", mode="max-autotune").problems(job, Layout())
    check_problems(found, at("mode", "'max-autotune'", "inductor", "'eager'"))
    assert not list(Compile(mode="max-autotune").problems(job, Layout()))
