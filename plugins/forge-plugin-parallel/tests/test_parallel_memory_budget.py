"""Activation checkpointing that decides by memory: the estimate, the choice, and that the curve stays."""

from __future__ import annotations

import re

import pytest
import torch
from attrs import evolve

from forge_core import dump_job, load_job
from forge_core.contracts.layout import Layout
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_core.engine.reporting import describe_run
from forge_core.engine.step import Stepper
from forge_core.parallel.stages import apply_stages, order_stages
from forge_core.plugins.catalog import Catalog
from forge_kit.nn.modules import LayerNorm
from forge_plugin_adamw import AdamW
from forge_plugin_moe import ExpertChoice, MoE
from forge_plugin_parallel import FSDP, ActivationCheckpointing, ContextParallel, PipelineParallel, TensorParallel
from forge_plugin_parallel.memory_budget import MODES, Budget, _activations
from forge_plugin_parallel.pp import splits_backward
from forge_plugin_parallel.recomputation import Checkpointed
from forge_plugin_transformer import GroupedQueryAttention, MultiTokenPrediction, Transformer
from forge_testing import Numbers, PatchModel, TinyModel, tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, refuses

AUTO = ActivationCheckpointing(mode="auto")
MODEL = Transformer(vocab_size=64, dim=32, layers=8, attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True))


def job(parallel, **changes):
    settings = {"model": MODEL, "optimizer": AdamW(), "seq_len": 64, "global_batch_size": 8, "parallel": parallel}
    settings |= {"data": {"sources": (Numbers(),)}, "precision": "fp32"}
    return tiny_job("unused", Catalog.installed(), **(settings | changes))


def built(parallel, **changes):
    wanted = job(parallel, **changes)
    return build_run(wanted, build_context(wanted, Catalog.installed(), None))


def automatic(gigabytes=None, every=1):
    return {"activation_checkpointing": ActivationCheckpointing(mode="auto", memory_gb=gigabytes, every=every)}


def checkpointed(run):
    """Of each block, what it forgets."""
    forwards = [block.forward for block in run.model.layers.values()]
    kinds = {True: "selective", False: "full"}
    return [kinds[f.contexts.selective] if isinstance(f, Checkpointed) else "none" for f in forwards]


@pytest.fixture(scope="module")
def budget():
    run = built({})
    return Budget.of(run.model, AUTO, run.context)


@pytest.mark.parametrize("mode", MODES)
def test_the_least_computation_that_fits_is_chosen(budget, mode):
    run = built(automatic(budget.total(mode) / 1e9))
    assert checkpointed(run) == [mode] * 8


def test_what_fits_nowhere_takes_the_least_memory_and_says_so(budget):
    run = built(automatic(budget.total("full") / 2e9))
    assert checkpointed(run) == ["full"] * 8
    assert not lacks(run.built_stages[0].describe(), "full", "too much")


def test_a_mode_that_is_chosen_and_fails_in_torch_is_refused(monkeypatch):
    """The check of a job refuses it where the job has it; auto takes it only when the model is built."""
    monkeypatch.setattr("forge_plugin_parallel.checkpointing_stage.fails_in_torch", lambda job, layout: True)
    with refuses("parallel.activation_checkpointing.mode", "auto"):
        built(automatic(1e-6))


def test_the_device_decides_unless_the_job_does():
    assert checkpointed(built(automatic())) == ["none"] * 8


def test_blocks_in_between_keep_everything(budget):
    run = built(automatic(1e-6, every=3))
    assert checkpointed(run) == ["full", "none", "none", "full", "none", "none", "full", "none"]
    assert budget.total("full") < Budget.of(built({}).model, AUTO.__class__(every=3), run.context).total("full")


def test_the_plan_has_the_figures(budget):
    run = built(automatic(budget.total("selective") / 1e9))
    [line] = [t for t in describe_run(run, Stepper(run), {"distributions": {}}).splitlines() if "checkpointing" in t]
    size = r"[\d.]+ MB"
    assert re.search(
        rf"auto: selective, as a rank takes {size} with none, {size} with selective, {size} with full, of {size} "
        rf"\(weights {size}, gradients {size}, optimizer {size}\)$",
        line,
    )


def test_the_curve_does_not_depend_on_the_choice(budget):
    def gradients(parallel):
        run = built(parallel)
        loader = TrainLoader(run.job, run.datasets, run.context)
        output, _ = Stepper(run).gradients(loader.next_step(), 0)
        loader.close()
        return [output.loss_sum, *(item.parameter.grad for item in run.parameters)]

    expected = gradients({})
    for mode in MODES:
        found = gradients(automatic(budget.total(mode) / 1e9))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- the estimate ------------------------------------------------------------------------------------------------


def saved(run, batch):
    """Bytes that a real forward pass saves for its backward pass, parameters and buffers apart."""
    own = {t.untyped_storage()._cdata for t in (*run.model.parameters(), *run.model.buffers())}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run.context.auxiliary.begin_step(torch.tensor(512), 8, 1)
        hidden = run.model(batch)
        run.model.head.logits(hidden)
    return sum(storage.nbytes() for storage in found.values())


PREDICTING = evolve(MODEL, layers=2, mtp=MultiTokenPrediction(depth=2))


@pytest.mark.parametrize("model", [MODEL, PREDICTING], ids=["layers", "blocks besides"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_those_that_a_forward_pass_saves(precision, model):
    run = built({}, precision=precision, model=model)
    ids = torch.zeros(8, 64, dtype=torch.long)
    estimated = Budget.of(run.model, AUTO, run.context).activations["none"]
    assert estimated == pytest.approx(saved(run, {"input_ids": ids, "labels": ids}), rel=0.25)


def test_blocks_besides_the_layers_are_computed_again():
    run = built({"activation_checkpointing": ActivationCheckpointing()}, model=PREDICTING)
    assert all(isinstance(block.forward, Checkpointed) for block in run.model.mtp.blocks)
    run = built({}, model=PREDICTING)
    activations = Budget.of(run.model, AUTO, run.context).activations
    assert activations["full"] < activations["selective"] < activations["none"]


SEEING = PatchModel(dim=32, layers=2, patches=512, blocks=3)


def test_blocks_that_embed_runs_are_computed_again():
    run = built({"activation_checkpointing": ActivationCheckpointing()}, model=SEEING)
    assert all(isinstance(block.forward, Checkpointed) for block in run.model.encoder.values())


def test_activations_of_blocks_that_embed_runs_are_in_the_estimate():
    run = built({}, model=SEEING)
    batch = {**ones_of(8, 64), "patches": torch.zeros(8, 512, 4, dtype=torch.uint8)}
    activations = Budget.of(run.model, AUTO, run.context).activations
    assert activations["none"] == pytest.approx(saved(run, batch), rel=0.25)
    # One of three blocks is computed again at a time, and takes the most.
    assert 0.4 < activations["full"] / activations["none"] < 0.8


def ones_of(rows, length):
    ids = torch.ones(rows, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def test_only_the_first_rank_of_a_pipeline_has_what_embed_keeps():
    def estimate(rank):
        context = build_context(wanted := job({"pp": PipelineParallel(degree=2)}, **sizes), Catalog.installed(), None)
        with torch.device("meta"):
            model = context.build(wanted.model)
        model, _ = apply_stages(model, order_stages(wanted.parallel, context.plugins.catalog), context)
        return len(model.further_blocks()), _activations(model, 1, context)["none"]

    sizes = {"global_batch_size": 16, "micro_batch_size": 8, "model": SEEING}
    (first_blocks, first), (last_blocks, last) = run_on_ranks(2, estimate)
    assert (first_blocks, last_blocks) == (3, 0)
    assert first > 10 * last


def budget_before_sharding(parallel, **sizes):
    """The estimate at the time when the stage makes it."""
    wanted = job(parallel, **sizes)
    context = build_context(wanted, Catalog.installed(), None)
    with torch.device("meta"):
        model = context.build(wanted.model)
    stages = {name: stage for name, stage in parallel.items() if name != "fsdp"}
    model, _ = apply_stages(model, order_stages(stages, context.plugins.catalog), context)
    return Budget.of(model, AUTO, context)


SHORT = evolve(MODEL, layers=4)


def test_layouts_divide_what_they_divide():
    layouts = {
        "fsdp": {"fsdp": FSDP()},
        "tp": {"tp": TensorParallel(degree=2)},
        "cp": {"cp": ContextParallel(degree=2)},
    }

    def estimate(rank):
        return {name: budget_before_sharding(parallel, model=SHORT) for name, parallel in layouts.items()}

    one, other = run_on_ranks(2, estimate)
    run = built({}, model=SHORT)
    alone = Budget.of(run.model, AUTO, run.context)
    for name in layouts:
        assert one[name].activations == other[name].activations, "all ranks choose alike"
        assert 0.4 < one[name].activations["none"] / alone.activations["none"] < 0.7
    assert one["fsdp"].state["optimizer"] == alone.state["optimizer"] // 2
    assert one["fsdp"].state["gathered"] < alone.state["weights"]
    assert one["tp"].state["weights"] == pytest.approx(alone.state["weights"] / 2, rel=0.05)
    assert one["cp"].state["weights"] == alone.state["weights"]


def test_a_pipeline_keeps_several_micro_batches_of_some_layers():
    sizes = {"global_batch_size": 16, "micro_batch_size": 4, "model": SHORT}

    def estimate(rank):
        names = ("gpipe", "1f1b", "zbv") if splits_backward(torch.__version__) else ("gpipe", "1f1b")
        stages = {name: {"pp": PipelineParallel(degree=2, schedule=name)} for name in names}
        return {name: budget_before_sharding(pp, **sizes) for name, pp in stages.items()}

    one, other = run_on_ranks(2, estimate)
    run = built({}, **sizes)
    alone = Budget.of(run.model, AUTO, run.context)
    assert one == other, "all ranks choose alike"
    assert alone.activations["none"] < one["1f1b"].activations["none"] < 1.4 * alone.activations["none"]
    assert one.get("zbv", one["1f1b"]).activations == pytest.approx(one["1f1b"].activations, rel=0.1)
    assert one["gpipe"].activations["none"] > 1.8 * one["1f1b"].activations["none"]
    assert one["1f1b"].state["weights"] < 0.7 * alone.state["weights"]


# --- what is refused ---------------------------------------------------------------------------------------------


def test_memory_is_for_auto():
    stage = ActivationCheckpointing(memory_gb=2.0)
    check_problems(stage.problems(job({}), Layout()), at("memory_gb", 'mode = "auto"', '"full"'))


def test_a_model_that_needs_values_is_named(monkeypatch):
    forward = LayerNorm.forward
    monkeypatch.setattr(LayerNorm, "forward", lambda self, x: forward(self, x) * x.max().item())
    with refuses("parallel.activation_checkpointing.mode"):
        built(automatic(), model=TinyModel())


def test_experts_that_choose_among_all_positions_of_a_sequence_are_measured_under_cp():
    """They look up the places of a rank's positions, which the measured batch therefore has."""
    experts = evolve(MODEL, layers=2, ffn=MoE(experts=4, hidden=16, router=ExpertChoice()))
    parallel = {"cp": ContextParallel(degree=2), **automatic()}
    assert (
        run_on_ranks(2, lambda rank: checkpointed(built(parallel, model=experts, precision="bf16")))
        == [["none"] * 2] * 2
    )


@pytest.mark.parametrize("stage", [FSDP(reduce_every_micro_batch=True), PipelineParallel(degree=2)])
def test_a_batch_smaller_than_its_ranks_is_one_problem_of_the_batch(stage):
    wanted = job({"it": stage}, global_batch_size=2, micro_batch_size=0)
    with refuses("train.global_batch_size", 2, 4):
        load_job(dump_job(wanted, Catalog.installed()), world_size=4 * getattr(stage, "degree", 1))
