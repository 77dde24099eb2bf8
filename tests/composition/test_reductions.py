"""Sums over ranks where a mistake would be small: biases, losses of layers, ties, absent gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from forge_core.parallel.mesh import sum_gradients
from forge_core.plugins.catalog import Catalog
from forge_plugin_parallel import FSDP, ContextParallel, TensorParallel
from forge_plugin_transformer import GELU, GroupedQueryAttention, Transformer
from forge_testing import Numbers, SplittableModel, tiny_job
from forge_testing.curves import Difference, train
from forge_testing.processes import run_on_ranks

SIZES = {"vocab_size": 32, "dim": 16, "layers": 2, "attention": GroupedQueryAttention(heads=4, kv_heads=2)}


@frozen(kw_only=True)
class LayerLoss(Transformer):
    """Each layer attaches a loss of its weights, once a layer and micro-batch."""

    def build(self, context):
        model = super().build(context)
        for layer in model.layers.values():
            layer.register_forward_hook(lambda layer, args, out: (self.attach(context, layer, out[0]),))
        return model

    def attach(self, context, layer, x):
        penalty = layer.ffn.down.weight.square().sum()
        return context.auxiliary.attach(x, penalty, unit="layer", name="aux/layer", weight=10.0)


@frozen(kw_only=True)
class Tied(SplittableModel):
    """A model that names its tie and leaves it to others to keep it."""

    def build(self, context):
        model = super().build(context)
        model.head.weight = model.embedding.weight
        model.tied_parameters = lambda: {"head.weight": "embedding.weight"}
        return model


BIASED = Transformer(ffn=GELU(hidden=32, bias=True), **SIZES)
ROWS = {
    "row bias, sequence parallel": (BIASED, {"tp": TensorParallel(degree=2)}),
    "losses of layers, cp": (LayerLoss(**SIZES), {"cp": ContextParallel(degree=2)}),
    "losses of layers, replicate": (LayerLoss(**SIZES), {}),
    "tied, tp": (Tied(), {"tp": TensorParallel(degree=2)}),
    "tied, fsdp": (Tied(), {"fsdp": FSDP()}),
    "tied, replicate": (Tied(), {}),
}


def job(folder, model, stages, **changes):
    settings = {"precision": "fp64", "global_batch_size": 8, "seq_len": 16, "steps": 3, "grad_clip_norm": 0.5}
    data = {"sources": (Numbers(ignored=7, held_out=5),)}
    return tiny_job(str(folder), Catalog.installed(), model=model, data=data, parallel=stages, **settings, **changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The curve of each row on two ranks; as the first of them has it."""
    folder = tmp_path_factory.mktemp("runs")
    names = list(ROWS)
    found = run_on_ranks(2, lambda rank: [train(job(folder, *ROWS[name], micro_batch_size=2)) for name in names])
    return dict(zip(names, found[0], strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_the_curve_is_that_of_one_process(tmp_path, trained, name):
    model, _ = ROWS[name]
    # A loss of layers counts once a micro-batch of the step: as many of them in one process.
    alone = train(job(tmp_path, model, {}, micro_batch_size=2))
    difference = Difference.between(trained[name], alone)
    assert difference.initial == 0
    assert max(difference.loss, difference.norm, difference.gradient, difference.evaluation) < 1e-9, difference
    assert difference.weights < 1e-7


def test_a_gradient_that_is_none_on_one_rank_counts_as_zero():
    def gradients(rank):
        parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
        if rank == 1:
            parameters[0].grad = torch.full((3,), 5.0)
        parameters[1].grad = torch.full((2,), 1.0 + rank)
        sum_gradients(parameters, dist.all_reduce)
        return [parameter.grad.tolist() for parameter in parameters]

    assert run_on_ranks(2, gradients) == [[[5.0] * 3, [3.0] * 2, [0.0]]] * 2
