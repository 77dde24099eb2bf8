"""Small runs in which a bit flips, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, field
from torch.nn import functional as F

from forge_core import Catalog, Plugin, Trainer, TrainingHook, hookimpl, read_metrics
from forge_core.job import MetricsSection
from forge_core.parallel.mesh import global_rank, local_part
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_parallel import FSDP, ContextParallel, ExpertParallel, PipelineParallel, TensorParallel
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.processes import run_on_ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp2": (2, {}),
    "fsdp2": (2, {"fsdp": FSDP()}),
    "tp2": (2, {"tp": TensorParallel(degree=2)}),
    "pp2": (2, {"pp": PipelineParallel(degree=2)}),
    "cp2": (2, {"cp": ContextParallel(degree=2)}),
    "ep2": (2, {"fsdp": FSDP(), "ep": ExpertParallel(degree=2)}),
    "pp2-fsdp2": (4, {"pp": PipelineParallel(degree=2), "fsdp": FSDP()}),
    "ddp3": (3, {}),
}
"""Ranks and stages by name."""
ROUTERS = "moe/"
"""How metrics of routers begin."""


@define(kw_only=True, slots=False)
class FlipsGradient(Plugin):
    """A processor that flips a bit of a rank's own gradient in some computations of a step, each time another bit."""

    resumes_as = "safe"
    rank: int = 1
    step: int = 4
    wrong: tuple[int, ...] = (0,)
    """Numbers of the computations of the step that are wrong."""
    bit: int = 25
    """The one that flips in the first of them, of 32: a factor of 16, which the curve shows at the next step."""

    @hookimpl
    def forge_training_hooks(self, job):
        return [Counting(plugin=self)]

    @hookimpl(tryfirst=True)
    def forge_build_executor(self, component, context, model, loss, stages):
        return Wrong(self, component.build(context, model=model, loss=loss, stages=stages), model)


@define(kw_only=True, slots=False)
class Counting(TrainingHook):
    resumes_as = "safe"
    plugin: FlipsGradient

    def on_step_begin(self, context):
        self.plugin.now, self.plugin.number = context.step, 0


class Wrong:
    """An executor around another one whose gradients have a flipped bit."""

    def __init__(self, plugin, inner, model):
        self.plugin, self.inner, self.model = plugin, inner, model

    def evaluate(self, *args, **kwargs):
        return self.inner.evaluate(*args, **kwargs)

    def train_step(self, batches, denominator):
        plugin, number = self.plugin, getattr(self.plugin, "number", 0)
        here = (getattr(plugin, "now", 0), global_rank()) == (plugin.step, plugin.rank)
        handles = self.break_it(plugin.bit - number) if here and number in plugin.wrong else []
        try:
            return self.inner.train_step(batches, denominator)
        finally:
            plugin.number = number + 1
            for handle in handles:
                handle.remove()

    def break_it(self, bit):
        """Let the first layer's weight gradient, as this rank computes it, have a flipped bit."""
        layer = next(iter(self.model.layers.values()))
        handles, known = [], {id(parameter) for parameter in self.model.parameters()}

        def watch(*_):  # parameters that FSDP has gathered, or else the model's own
            every = list(layer.parameters())
            gathered = [p for p in every if id(p) not in known] or every
            parameter = max(gathered, key=lambda p: local_part(p).numel())
            first.remove()
            handles.append(parameter.register_hook(lambda gradient: flip(gradient.clone(), bit)))

        first = layer.register_forward_pre_hook(watch)
        handles.append(first)
        return handles


@define(kw_only=True, slots=False)
class FlipsWeight(TrainingHook):
    """A bit of a weight of one rank flips after the update of a step."""

    resumes_as = "safe"
    rank: int = 1
    step: int = 4
    name: str = "embedding"
    """How the parameter's name starts."""

    def on_step_end(self, context):
        if (context.step, global_rank()) == (self.step, self.rank):
            named = context.model.named_parameters()
            flip(next(parameter for name, parameter in named if name.startswith(self.name)).detach(), 10)


@define(kw_only=True, slots=False)
class SkipsThird(TrainingHook):
    """Leaves out every third update, as it remembers."""

    may_skip = True
    count: int = field(init=False, default=0)

    def on_gradients(self, context):
        self.count += 1
        if self.count % 3 == 0:
            context.skip_update("the third")


@define(kw_only=True, slots=False)
class Dropout(Plugin):
    """Dropout behind every layer."""

    @hookimpl(wrapper=True)
    def forge_build_model(self):
        model = yield
        for layer in model.layers.values():
            layer.register_forward_hook(lambda module, args, carry: tuple(drop(part) for part in carry))
        return model


def drop(part):
    return F.dropout(part, 0.1) if part.is_floating_point() else part


@torch.no_grad()
def flip(tensor, bit):
    """Flip a bit of the largest element, in place: of a small one, it may not change the curve."""
    elements = local_part(tensor).view(-1)
    elements.view(torch.int32)[elements.abs().argmax()] ^= 1 << bit
    return tensor


def counts_of(row):
    """Metrics of routers, and the tokens of each expert where the line has them."""
    return [(name, str(value)) for name, value in row.items() if name == "counts" or name.startswith(ROUTERS)]


def curve(folder, name="run", layout="one", model=None, **changes):
    """Train; of each rank the loss and gradient norm of each step, or the error that ended the run."""
    return curves(folder, layout, model, {name: changes})[name]


def curves(folder, layout, model, runs):
    """Train once for each name, with its changes, by one start of the ranks; of each name what `curve` returns."""
    ranks, stages = LAYOUTS[layout]

    def work(rank):
        return {name: train(folder, name, stages, model, changes) for name, changes in runs.items()}

    of_ranks = run_on_ranks(ranks, work)
    return {name: [each[name] for each in of_ranks] for name in runs}


def train(folder, name, stages, model, changes):
    """Train on this rank; see `curve`."""
    attention = GroupedQueryAttention(heads=4, kv_heads=2)
    experts = {"ffn": MoE(experts=4, hidden=16, router=SigmoidTopK(top_k=2))} if model == "moe" else {}
    layers = 2 if "pp" in stages else 1  # one for each stage of a pipeline
    network = Transformer(vocab_size=32, dim=16, layers=layers, attention=attention, **experts)
    parts = {"model": network, "parallel": stages, "data": {"sources": (Numbers(held_out=5),)}, "job": {"name": name}}
    parts |= {"steps": 5, "global_batch_size": 8, "micro_batch_size": 2, "seq_len": 16}
    parts["metrics"] = MetricsSection(counts_interval=1)
    job = tiny_job(str(folder), Catalog.installed(), **parts | changes)
    try:
        Trainer(job, echo=lambda text: None).run()
    except Exception as error:
        return type(error).__name__, getattr(error, "exit_code", None), str(error)
    return [(row["step"], row["loss"], row["grad_norm"], *counts_of(row)) for row in read_metrics(folder / name)]
