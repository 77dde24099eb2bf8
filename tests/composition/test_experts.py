"""Experts with optimizers, averages, precision and routers of other people."""

from __future__ import annotations

import json
from unittest import mock

import attrs
import pytest
import torch
from torch._dynamo.utils import counters

from forge_core.auxiliary import Count
from forge_core.config.load import load_job
from forge_core.data.loader import TrainLoader
from forge_core.engine.step import Stepper
from forge_core.engine.trainer import Trainer
from forge_core.job import MetricsSection
from forge_core.losses import CrossEntropy
from forge_core.parallel.stages import Replicate
from forge_core.plugins.catalog import Catalog
from forge_plugin_adamw import AdamW
from forge_plugin_compile import Compile
from forge_plugin_lion import Lion
from forge_plugin_lowbit import AdamW8bit
from forge_plugin_lowbit.float8 import Float8
from forge_plugin_moe import ExpertChoice, MoE, SigmoidTopK, SoftmaxTopK
from forge_plugin_muon import Muon
from forge_plugin_parallel import FSDP, ActivationCheckpointing, ContextParallel, ExpertParallel, PipelineParallel
from forge_plugin_schedule_free import ScheduleFreeAdamW
from forge_plugin_soap import SOAP
from forge_plugin_transformer import GroupedQueryAttention, MultiTokenPrediction, SwiGLU, Transformer
from forge_testing import TinyModel, tiny_job
from forge_testing.curves import train
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.runs import advance, tiny_run, whole

MODEL = Transformer(
    dim=16,
    layers=2,
    vocab_size=32,
    attention=GroupedQueryAttention(heads=4, kv_heads=2),
    ffn=MoE(experts=4, hidden=16, router=SigmoidTopK(bias_rate=0.01), shared_experts=1),
)
SIZES = {"seq_len": 16, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64"}
OPTIMIZERS = {
    "muon": Muon(ns_dtype="fp32", lr=0.1),
    "soap": SOAP(lr=0.02, precondition_frequency=2),
    "lion": Lion(lr=0.003, cautious=True),
    "schedule_free_adamw": ScheduleFreeAdamW(lr=0.05),
    "adamw_8bit": AdamW8bit(lr=0.05, min_size=1, block_size=8, compile=False),
}
PP2 = PipelineParallel(degree=2, schedule="gpipe")
LAYOUTS = {
    "fsdp4/ep2": {"fsdp": FSDP(), "ep": ExpertParallel(degree=2)},
    "fsdp2 x pp2/ep2": {"fsdp": FSDP(), "pp": PP2, "ep": ExpertParallel(degree=2)},
}
"""Of four ranks. In the first, two ranks share each stack of experts; in the second, each has whole experts."""


MATRICES = ("muon", "soap")
"""Optimizers that need whole matrices, whatever ranks share a stack."""


def weights(folder, stages):
    """What three steps of each optimizer come to, of the layers that this rank has."""
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        if "pp" in stages and name not in MATRICES:
            continue  # the others see parts of parameters, which the first layout has
        run = tiny_run(folder, model=MODEL, optimizer=optimizer, parallel=stages, **SIZES)
        advance(run, 3)
        found[name] = {item.name: whole(item.parameter) for item in run.parameters}
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return weights(tmp_path_factory.mktemp("alone"), {})


@pytest.fixture(scope="module")
def sharded(alone, tmp_path_factory):
    """The same on each rank of each layout."""
    folder = tmp_path_factory.mktemp("sharded")
    return run_on_ranks(4, lambda rank: {name: weights(folder, stages) for name, stages in LAYOUTS.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_optimizer_trains_experts_alike(alone, sharded, layout):
    """Matrices of a stack by themselves, wherever they are."""
    for name, expected in alone.items():
        if name not in sharded[0][layout]:
            continue
        seen = {key: tensor for found in sharded for key, tensor in found[layout][name].items()}
        assert seen.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(seen[key], tensor, rtol=1e-7, atol=1e-8, msg=f"{layout}, {name}: {key}")


def test_muon_in_float32_trains_experts_alike_by_default(tmp_path):
    """Its iteration in bfloat16 would differ by 1e-3 after these steps."""

    def losses(stages):
        sizes = {**SIZES, "precision": "fp32", "steps": 12}
        job = tiny_job(str(tmp_path), Catalog.installed(), model=MODEL, optimizer=Muon(), parallel=stages, **sizes)
        return train(job).losses

    alone = losses({})
    for found in run_on_ranks(2, lambda rank: losses({"replicate": Replicate()})):
        assert max(abs(a - b) for a, b in zip(found, alone, strict=True)) < 1e-6


def layers_counted(folder):
    stages = {"pp": PipelineParallel(degree=2, schedule="gpipe")}
    model = attrs.evolve(MODEL, layers=12)
    run = tiny_run(folder, model=model, parallel=stages, **SIZES)
    stepper, loader = Stepper(run), TrainLoader(run.job, run.datasets, run.context)
    _, sums = stepper.gradients(loader.next_step(), 0)
    loader.close()
    return [name.row for name in sums if isinstance(name, Count) and name.name == "moe/load"]


def test_every_rank_of_a_pipeline_has_the_counts_of_all_layers_in_their_order(tmp_path):
    assert run_on_ranks(2, lambda rank: layers_counted(tmp_path)) == [list(range(12))] * 2


GATED = attrs.evolve(MODEL, ffn=attrs.evolve(MODEL.ffn, shared_gate=True))
OVERLAPPED = {
    "fsdp2/ep2": (2, {"fsdp": FSDP(), "ep": ExpertParallel(degree=2)}),
    "fsdp4/ep4, two nodes, checkpointing": (
        4,
        {
            "fsdp": FSDP(),
            "ep": ExpertParallel(degree=4, ranks_per_node=2),
            "activation_checkpointing": ActivationCheckpointing(),
        },
    ),
}


def first_gradients(folder, stages, **changes):
    run = tiny_run(folder, parallel=stages, **{"model": GATED} | SIZES | changes)
    stepper, loader = Stepper(run), TrainLoader(run.job, run.datasets, run.context)
    output, _ = stepper.gradients(loader.next_step(), 0)
    loader.close()
    return output.loss_sum, {item.name: whole(item.parameter.grad) for item in run.parameters}


@pytest.mark.parametrize("layout", OVERLAPPED)
def test_shared_experts_give_the_same_to_the_bit_while_tokens_travel(tmp_path, layout):
    ranks, stages = OVERLAPPED[layout]

    before = {**stages, "ep": attrs.evolve(stages["ep"], overlap=False)}

    def both(rank):
        return first_gradients(tmp_path, before), first_gradients(tmp_path, stages)

    for (loss, gradients), (same_loss, same_gradients) in run_on_ranks(ranks, both):
        assert torch.equal(loss, same_loss)
        assert all(torch.equal(gradient, same_gradients[name]) for name, gradient in gradients.items())


def events_of_a_layer(folder, overlap):
    """When tokens leave and arrive in the passes through a layer, and when shared experts are computed."""
    stages = {"fsdp": FSDP(), "ep": ExpertParallel(degree=2, overlap=overlap)}
    run = tiny_run(folder, model=MODEL, parallel=stages, **{**SIZES, "micro_batch_size": 4})
    events = []

    class Waiting:
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append("arrive")
            self.work.wait()

    send = torch.distributed.all_to_all_single

    def depart(*args, async_op=False, **more):
        if not async_op:
            return send(*args, **more)
        events.append("depart")
        return Waiting(send(*args, async_op=True, **more))

    def shared(module, inputs, output):
        events.append("shared")
        output.register_hook(lambda grad: events.append("gradient of shared"))

    for layer in run.model.layers.values():
        layer.ffn.shared.register_forward_hook(shared)
    stepper, loader = Stepper(run), TrainLoader(run.job, run.datasets, run.context)
    with mock.patch.object(torch.distributed, "all_to_all_single", depart):
        stepper.gradients(loader.next_step(), 0)
    loader.close()
    return events


def test_shared_experts_are_computed_while_tokens_travel(tmp_path):
    passes = {
        True: (["depart", "shared", "arrive"], ["depart", "gradient of shared", "arrive"]),
        False: (["shared", "depart", "arrive"], ["depart", "arrive", "gradient of shared"]),
    }
    found = run_on_ranks(2, lambda rank: {overlap: events_of_a_layer(tmp_path, overlap) for overlap in passes})
    for events in found:
        for overlap, (forward, backward) in passes.items():
            assert events[overlap] == forward * MODEL.layers + backward * MODEL.layers


def test_one_rank_may_have_all_experts(tmp_path):
    run = tiny_run(tmp_path, model=MODEL, parallel={"fsdp": FSDP(), "ep": ExpertParallel(degree=1)}, **SIZES)
    advance(run, 1)
    descriptions = [stage.describe() for stage in run.built_stages if hasattr(stage, "describe")]
    assert any("all experts" in text for text in descriptions)


class TestWhatEpRefuses:
    def problems(self, folder, model, degree):
        stages = {"fsdp": FSDP(), "ep": ExpertParallel(degree=degree)}
        sizes = {"global_batch_size": degree, "seq_len": 16}
        return problems_of(tiny_job(str(folder), None, model=model, parallel=stages, **sizes), degree)

    def test_a_model_without_experts(self, tmp_path):
        dense = Transformer(dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=4))
        check_problems(self.problems(tmp_path, dense, 2), at("parallel.ep", "TransformerModel", "experts"))
        check_problems(self.problems(tmp_path, TinyModel(layers=2), 2), at("parallel.ep", "TinyNetwork", "experts"))
        assert not self.problems(tmp_path, dense, 1)

    def test_experts_that_ranks_cannot_share_equally(self, tmp_path):
        expected = at("parallel.ep.degree", "layers.0.ffn.experts", "4 experts", "3 ranks")
        check_problems(self.problems(tmp_path, MODEL, 3), expected)
        assert not self.problems(tmp_path, MODEL, 4)


ROUTER = """
import torch
from attrs import frozen
from forge_core import RouterComponent
from forge_kit.nn.modules import Linear


class Best(torch.nn.Module):
    experts_per_token = 1

    def __init__(self, dim, experts):
        super().__init__()
        self.scores = Linear(dim, experts)

    def forward(self, x, batch):
        weights, experts = self.scores(x.to(torch.promote_types(x.dtype, torch.float32))).softmax(-1).topk(1)
        return weights, experts


@frozen(kw_only=True)
class MyRouter(RouterComponent):
    def build(self, context, dim, experts):
        return Best(dim, experts)
"""
JOB = """
[train]
steps = 4
global_batch_size = 8
micro_batch_size = 2
seq_len = 16
precision = "fp64"
[model]
type = "transformer"
dim = 16
layers = 2
vocab_size = 32
[model.attention]
heads = 2
[model.ffn]
type = "moe"
experts = 4
hidden = 16
[model.ffn.router]
type = "./my_router.py:MyRouter"
[optimizer]
type = "adamw"
[[data.sources]]
type = "forge_testing:Numbers"
"""


def test_a_router_in_a_file_works_under_every_layout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_router.py").write_text(ROUTER)
    stages = ["[parallel.fsdp]", "[parallel.pp]\ndegree = 2", "[parallel.ep]\ndegree = 2"]
    (tmp_path / "one.toml").write_text(JOB + '[job]\nname = "one"\n')
    (tmp_path / "four.toml").write_text(JOB + "\n".join(stages) + '\n[job]\nname = "four"\n')
    run_on_ranks(1, lambda rank: Trainer(load_job("one.toml"), echo=len).run().step)
    run_on_ranks(4, lambda rank: Trainer(load_job("four.toml", world_size=4), echo=len).run().step)
    one, four = (
        [json.loads(line)["loss"] for line in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()[:4]]
        for name in ("one", "four")
    )
    assert one == pytest.approx(four, rel=1e-9)


GPT_OSS = {"bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 0.02, "swiglu_offset": 1.0}
ROUTED = {
    "sigmoid": {"router": SigmoidTopK(bias_rate=0.01)},
    "softmax": {"router": SoftmaxTopK(batch_balance=1.0, z_loss=1.0), "apply_router_weight_on_input": True},
    "biases": {"router": SoftmaxTopK(bias=True), **GPT_OSS},
}


@pytest.mark.parametrize("keys", ROUTED.values(), ids=ROUTED)
def test_compiled_blocks_with_experts_train_alike_and_share_graphs(tmp_path, keys):
    """The first layers have up to three; a fourth adds none. The inductor would make the same of them, and takes a
    minute."""
    # Dividing the graph takes two thirds of the time: for the model that has all operations of the others.
    backend = "aot_eager" if keys is ROUTED["biases"] else "eager"
    model = attrs.evolve(MODEL, layers=4, ffn=attrs.evolve(MODEL.ffn, **keys))
    torch._dynamo.reset()
    counters.clear()
    states = []
    for stages in ({}, {"compile": Compile(backend=backend)}):
        run = tiny_run(tmp_path, model=model, optimizer=AdamW(lr=0.02), parallel=stages, **SIZES)
        advance(run, 2)
        states.append({name: whole(tensor) for name, tensor in run.model.state_dict().items()})
    assert 0 < counters["stats"]["unique_graphs"] < model.layers
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-9, atol=1e-9)


def graphs_after_steps(folder, rank):
    """Graphs after one step, and after more, on the last of two ranks; the other runs the same program uncompiled."""
    torch._dynamo.reset()
    counters.clear()
    stages = {"fsdp": FSDP(), "ep": ExpertParallel(degree=2)}
    if rank == 1:
        stages["compile"] = Compile(backend="eager", fullgraph=False)  # graphs are counted before a backend has them
    model = attrs.evolve(MODEL, layers=1)
    run = tiny_run(folder, model=model, parallel=stages, **SIZES | {"precision": "fp32"})
    advance(run, 1)
    first = counters["stats"]["unique_graphs"]
    advance(run, 4)
    return first, counters["stats"]["unique_graphs"]


def test_other_numbers_of_tokens_for_a_rank_are_not_more_to_compile(tmp_path):
    """Each micro-batch of each step has its own."""
    _, (few, many) = run_on_ranks(2, lambda rank: graphs_after_steps(tmp_path, rank))
    assert few == many > 0


EIGHT_BITS = {"model": attrs.evolve(MODEL, dim=32, ffn=attrs.evolve(MODEL.ffn, hidden=32)), "precision": "fp32"}


def test_float8_computes_what_is_around_routed_experts(tmp_path):
    """Attention and shared experts, and neither routers nor stacks; where ranks share experts, likewise."""
    stages = {"float8": Float8()}
    described = tiny_run(tmp_path, parallel=stages, **SIZES | EIGHT_BITS).built_stages[0].describe()
    names = [*(f"attention.{name}" for name in "qkvo"), *(f"ffn.shared.{name}" for name in ("gate", "up", "down"))]
    assert f"14 linear layers: {', '.join(f'layers.0-1.{name}' for name in names)}; " in described
    loss, gradients = first_gradients(tmp_path, stages, **EIGHT_BITS)
    plain, _ = first_gradients(tmp_path, {}, **EIGHT_BITS)
    assert 1e-7 < abs(loss / plain - 1) < 1e-3
    shared = stages | {"fsdp": FSDP(), "ep": ExpertParallel(degree=2)}
    (some, seen), (others, _) = run_on_ranks(2, lambda rank: first_gradients(tmp_path, shared, **EIGHT_BITS))
    assert (some + others).item() == pytest.approx(loss.item(), rel=1e-6)
    for name, gradient in gradients.items():
        assert (seen[name] - gradient).norm() < 1e-2 * gradient.norm(), name


def test_ranks_that_share_experts_wait_inside_of_blocks(tmp_path):
    stages = {"fsdp": FSDP(), "ep": ExpertParallel(degree=2), "compile": Compile()}
    job = tiny_job(str(tmp_path), Catalog.installed(), model=MODEL, parallel=stages, **SIZES | {"precision": "fp32"})
    check_problems(problems_of(job, 2), at("parallel.compile.fullgraph", "parallel.ep"))
    job = attrs.evolve(job, parallel=stages | {"compile": Compile(fullgraph=False)})
    check_problems(problems_of(job, 2))


@pytest.mark.parametrize(
    ("ffn", "train", "refused"),
    [
        (MoE(backend="loop"), {}, "model.ffn:"),
        (MoE(capacity_factor=2.0), {}, "model.ffn:"),
        (MoE(router=ExpertChoice()), {}, "model.ffn.router:"),
        (MoE(), {"precision": "fp64"}, "model.ffn:"),
        (MoE(), {"device": "cuda"}, "model.ffn:"),
        (MoE(), {}, ""),
        (MoE(backend="grouped_mm"), {"precision": "bf16", "device": "cuda"}, ""),
    ],
)
def test_experts_whose_counts_the_host_waits_for_are_no_whole_graph(tmp_path, ffn, train, refused):
    model = attrs.evolve(MODEL, ffn=ffn)
    job = tiny_job(str(tmp_path), Catalog.installed(), model=model, parallel={"compile": Compile()}, **SIZES)
    job = attrs.evolve(job, train=attrs.evolve(job.train, **{"precision": "fp32", **train}))
    check_problems(problems_of(job, 1), *([at("parallel.compile.fullgraph", refused)] if refused else []))
    job = attrs.evolve(job, parallel={"compile": Compile(fullgraph=False)})
    check_problems(problems_of(job, 1))


def test_pipelines_are_cut_by_what_a_token_meets(tmp_path):
    """Each layer with experts has eight times the weights of a dense one, of which a token meets as many."""
    ffn = MoE(experts=16, hidden=16, first_dense=4, dense=SwiGLU(hidden=32))
    model = attrs.evolve(MODEL, layers=8, ffn=ffn)

    def cut(rank):
        run = tiny_run(tmp_path, model=model, parallel={"pp": PipelineParallel(degree=2)}, **SIZES)
        return run.built_stages[0].describe()

    assert run_on_ranks(2, cut) == ["1f1b, stages of 4, 4 layers"] * 2
    mtp = MultiTokenPrediction(loss=CrossEntropy())
    model = attrs.evolve(model, ffn=attrs.evolve(ffn, first_dense=0), mtp=mtp)  # a ninth block, in the last stage
    assert run_on_ranks(2, cut) == ["1f1b, stages of 5, 3 layers"] * 2


def test_what_is_counted_once_a_layer_does_not_depend_on_how_sequences_are_cut(tmp_path):
    """The bias of experts, of unit `layer`: every rank and every micro-batch has the same."""

    def biases(name, **changes):
        attention = GroupedQueryAttention(heads=2)
        ffn = MoE(experts=4, hidden=16, router=SigmoidTopK(bias_rate=0.5))
        model = Transformer(dim=16, layers=1, vocab_size=32, attention=attention, ffn=ffn)
        settings = {"model": model, "steps": 2, "seq_len": 16, "precision": "fp64", "job": {"name": name}}
        settings["metrics"] = MetricsSection(counts_interval=1)
        folder = Trainer(tiny_job(str(tmp_path), Catalog.installed(), **settings, **changes), echo=len).run().folder
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [record["counts"]["moe/bias"]["0"] for record in records if "counts" in record][-1]

    alone = biases("alone", micro_batch_size=2)
    assert max(map(abs, alone)) == 0.5
    cut = {"cp": ContextParallel(degree=2)}
    assert run_on_ranks(2, lambda rank: biases("cut", parallel=cut, micro_batch_size=2))[0] == pytest.approx(alone)
