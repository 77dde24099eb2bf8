"""Mesh dimensions that a stranger's stage declares: the engine goes by what it says of them, and knows no names."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from attrs import frozen

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.layout import Layout, MeshDimension
from forge_core.contracts.runtime import ParallelStage
from forge_core.parallel.layout import plan_layout
from forge_core.parallel.mesh import make_mesh, sum_gradients
from forge_kit.nn.mesh import arrange, coordinate
from forge_plugin_parallel import FSDP, ExpertParallel, PipelineParallel
from forge_testing import Numbers, tiny_job
from forge_testing.curves import Difference, train
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, naming


class Sum(torch.autograd.Function):
    """Sums over a group forward, backward, or both ways."""

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group, ctx.backward_too = group, backward
        return summed(x, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group) if ctx.backward_too else grad, None, None, None


def summed(x, group):
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


@frozen(kw_only=True)
class Branch(ParallelComponent):
    """Each rank computes some of the hidden units of each layer."""

    dimensions: ClassVar = (MeshDimension("branch", order=45),)
    degree: int = 2

    def degrees(self):
        return {"branch": self.degree}

    def build(self, context):
        return BranchStage(context)


class BranchStage(ParallelStage):
    def __init__(self, context):
        self._group = context.mesh.get_group("branch")
        self._ranks, self._rank = context.layout.degree("branch"), context.mesh.get_local_rank("branch")

    def apply(self, model):
        for layer in model.layers.values():
            layer.up.register_forward_pre_hook(lambda module, args: (Sum.apply(args[0], self._group, False, True),))
            layer.up.register_forward_hook(lambda module, args, hidden: hidden * self._own(hidden))
            layer.down.register_forward_hook(lambda module, args, out: Sum.apply(out, self._group, True, False))
        return model

    def _own(self, hidden):
        units = torch.arange(hidden.shape[-1])
        return units * self._ranks // hidden.shape[-1] == self._rank

    def complete_gradients(self, model):
        split = [p for layer in model.layers.values() for p in layer.parameters()]
        sum_gradients(split, lambda flat: dist.all_reduce(flat, group=self._group))


@frozen(kw_only=True)
class Workers(ParallelComponent):
    """Ranks that read samples of their own. Reading, sums and seeds follow from the declaration alone."""

    dimensions: ClassVar = (MeshDimension("worker", samples=True, order=25),)

    def degrees(self):
        return {"worker": 2}

    def build(self, context):
        return ParallelStage()


LAYOUTS = {
    "branch": (2, {"branch": Branch()}),
    "workers": (2, {"workers": Workers()}),
    "workers x branch": (4, {"workers": Workers(), "branch": Branch()}),
    "fsdp x workers": (4, {"fsdp": FSDP(), "workers": Workers()}),
    "fsdp x branch": (4, {"branch": Branch(), "fsdp": FSDP()}),
}


def job(folder, parallel):
    settings = {"precision": "fp64", "global_batch_size": 8, "seq_len": 16, "grad_clip_norm": 0.5, "steps": 4}
    data = {"sources": (Numbers(ignored=7, held_out=5),)}
    return tiny_job(str(folder), data=data, parallel=parallel, micro_batch_size=1, **settings)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(job(tmp_path_factory.mktemp("alone"), {}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_curve_is_that_of_one_process(tmp_path, alone, name):
    ranks, stages = LAYOUTS[name]
    for found in run_on_ranks(ranks, lambda rank: train(job(tmp_path, stages))):
        difference = Difference.between(found, alone)
        assert difference.initial == 0
        assert max(difference.loss, difference.norm, difference.gradient, difference.evaluation) < 1e-9, difference
        assert difference.weights < 1e-7


def test_a_layout_holds_degrees_by_name_outermost_first():
    layout = Layout([*Branch.dimensions, *Workers.dimensions], worker=3, tp=2)
    assert list(layout.degrees) == ["pp", "replicate", "shard", "worker", "cp", "tp", "branch"]
    assert (layout.world_size, layout.data_parallel, layout.token_ranks) == (6, 3, 3)
    assert (layout.tp, layout.degree("worker"), layout.degree("absent")) == (2, 3, 1)
    assert str(layout) == "worker 3, tp 2"
    with pytest.raises(ValueError, match=naming("tpp", "pp, replicate, shard, cp, tp")):
        Layout(tpp=2)


@frozen(kw_only=True)
class Asking(ParallelComponent):
    sizes: dict

    def degrees(self):
        return self.sizes


@frozen(kw_only=True)
class OtherBranch(Asking):
    dimensions: ClassVar = (MeshDimension("branch", tokens=True),)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ({"x": Asking(sizes={"branch": 2})}, at("parallel.x", "'branch'")),
        ({"a": Branch(), "b": OtherBranch(sizes={})}, at("parallel.b", "declares", "branch")),
        ({"a": Branch(), "b": Asking(sizes={"branch": 2})}, at("parallel.b", "branch", "parallel.a")),
    ],
    ids=str,
)
def test_a_dimension_that_is_not_declared_once_is_refused(tmp_path, stages, expected):
    _, problems = plan_layout(job(tmp_path, stages), 2)
    check_problems(problems[:1], expected)


def test_only_one_dimension_divides_layers(tmp_path):
    @frozen(kw_only=True)
    class Floors(Asking):
        dimensions: ClassVar = (MeshDimension("floor", layers=True, order=5),)

    _, problems = plan_layout(job(tmp_path, {"pp": PipelineParallel(degree=2), "f": Floors(sizes={"floor": 2})}), 4)
    check_problems(problems[:1], at("parallel.f", "parallel.pp", "layers"))


def test_experts_are_not_shared_beside_a_dimension_that_they_would_not_be_reduced_over():
    layout = Layout(Workers.dimensions, worker=2, shard=2)
    [problem] = ExpertParallel(degree=2).problems(None, layout)
    assert not lacks(problem.message, "worker")


def test_a_rank_is_placed_along_dimensions_flattened_and_rearranged():
    def places(rank):
        mesh = make_mesh(Layout(shard=2, cp=2), torch.device("cpu"))
        arrange(mesh, {"outer": 2, "inner": 2})
        return [coordinate(2, name, mesh) for name in ("shard", "cp", "shard_cp", "outer", "inner")]

    assert run_on_ranks(4, places)[0] == [1, 0, 2, 1, 0]
