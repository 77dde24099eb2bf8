"""Each rank gets its part of what one rank has made of a whole matrix."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from forge_core.parallel.mesh import local_part
from forge_kit.optim.whole_matrices import WholeMatrices
from forge_testing.processes import run_on_ranks

SHAPES = {"square": (8, 8), "short": (3, 8), "tall": (10, 4), "stack": (3, 4, 6), "large stack": (8, 2, 4)}
DIMENSIONS = ("pp", "replicate", "shard", "cp", "tp")
LAYOUTS = {
    "one rank": (1, {}),
    "copies": (4, {"replicate": 4}),
    "parts": (4, {"shard": 4}),
    "copies of parts": (4, {"replicate": 2, "shard": 2}),
    "parts along two dimensions": (4, {"shard": 2, "tp": 2}),
    "parts over two flattened": (4, {"shard": 2, "cp": 2}),
    "two pipeline ranks": (4, {"pp": 2, "shard": 2}),
}
LEFT_OUT = ((), ("square", "stack"))


def full(name):
    shape = SHAPES[name]
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1000 * list(SHAPES).index(name)


def made_of(matrix):
    """Something of which each element needs the whole."""
    return matrix * 2 + matrix.sum()


def expected(name):
    whole = full(name)
    return made_of(whole) if whole.ndim == 2 else torch.stack([made_of(matrix) for matrix in whole])


class Holder(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        tp = mesh["tp"]
        for name in SHAPES:
            parameter = full(name)
            if tp.size() > 1:  # as a tensor-parallel stage leaves it: rows, columns, or whole on each rank
                rows = parameter.shape[-2] % 2 == 0
                placement = Shard(parameter.ndim - 2) if rows else Replicate()
                parameter = distribute_tensor(parameter, tp, [placement])
            self.register_parameter(name.replace(" ", "_"), nn.Parameter(parameter))


def parameters_of(mesh, degrees):
    holder = Holder(mesh)
    if "shard" in degrees:
        data = mesh["shard"]
        if degrees.get("cp", 1) > 1:
            data = mesh["shard", "cp"]._flatten("shard_cp")
        if degrees.get("replicate", 1) > 1:
            data = mesh["replicate", "shard"]
        fully_shard(holder, mesh=data)
    return dict(zip(SHAPES, holder.parameters(), strict=True))


def found(ranks, degrees, left_out):
    mesh = DeviceMesh(
        "cpu",
        torch.arange(ranks).view([degrees.get(name, 1) for name in DIMENSIONS]),
        mesh_dim_names=DIMENSIONS,
    )
    parameters = parameters_of(mesh, degrees)
    whole = WholeMatrices(list(parameters.values()), mesh)
    worked_on = []

    def work(matrices):
        worked_on.extend(matrices)
        return [made_of(matrix) for matrix in matrices]

    names = [name for name in SHAPES if name not in left_out]
    numbers = {name: number for number, name in enumerate(SHAPES)}
    parts = {numbers[name]: local_part(parameters[name].detach()) for name in names}
    results = whole.map(parts, work)
    good = {}
    for name in names:
        parameter = parameters[name]
        right = expected(name)
        if isinstance(parameter, DTensor):
            # What full_tensor makes of the parts is right only if each lies where the parameter's lies.
            made = DTensor.from_local(
                results[numbers[name]],
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            ).full_tensor()
        else:
            made = results[numbers[name]]
        good[name] = torch.equal(made, right)
    return good, [tuple(matrix.shape) for matrix in worked_on]


@pytest.fixture(scope="module")
def tried():
    """Of each layout and each set of parameters that are left out: what every rank found."""
    results = {}
    for ranks in (1, 4):
        cases = [(name, left) for name, (wanted, _) in LAYOUTS.items() if wanted == ranks for left in LEFT_OUT]
        by_rank = run_on_ranks(ranks, lambda rank: [found(ranks, LAYOUTS[n][1], left) for n, left in cases])  # noqa: B023
        results |= dict(zip(cases, zip(*by_rank, strict=True), strict=True))
    return results


@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_gets_its_part_and_each_matrix_is_worked_on_once(tried, name, left_out):
    by_rank = tried[name, left_out]
    assert all(all(good.values()) for good, _ in by_rank), [good for good, _ in by_rank]
    matrices = [shape for shape_name in SHAPES if shape_name not in left_out for shape in shapes_of(shape_name)]
    worked_on = [shape for _, shapes in by_rank for shape in shapes]
    assert sorted(worked_on) == sorted(matrices * LAYOUTS[name][1].get("pp", 1))


def test_batches_hold_few_elements_and_every_matrix_once():
    whole = WholeMatrices([full(name) for name in SHAPES])
    numbers = range(len(SHAPES))
    batches = whole.batches(numbers, elements=72)
    assert [matrix for batch in batches for matrix in batch] == whole.matrices
    sizes = [sum(math.prod(matrix.shape) for matrix in batch) for batch in batches]
    assert len(sizes) > 3
    assert max(sizes) <= 72
    assert [len(batch) for batch in whole.batches(numbers, elements=1)] == [1] * len(whole.matrices)
    assert len(whole.batches(numbers, elements=10**6)) == 1


def test_a_batch_has_a_matrix_for_every_rank():
    """Else owners would idle, batch after batch."""
    by_rank = run_on_ranks(4, lambda rank: batches_on(4))
    assert all(sizes == by_rank[0] for sizes in by_rank)
    assert min(by_rank[0][:-1]) >= 4


def batches_on(ranks):
    degrees = [ranks if name == "replicate" else 1 for name in DIMENSIONS]
    mesh = DeviceMesh("cpu", torch.arange(ranks).view(degrees), mesh_dim_names=DIMENSIONS)
    whole = WholeMatrices([full(name) for name in SHAPES], mesh)
    return [len(batch) for batch in whole.batches(range(len(SHAPES)), elements=1)]


def shapes_of(name):
    shape = SHAPES[name]
    return [shape] if len(shape) == 2 else [shape[1:]] * shape[0]
