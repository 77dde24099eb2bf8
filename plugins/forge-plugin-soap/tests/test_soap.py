"""SOAP against pytorch-optimizer's, and against itself under every layout."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from pytorch_optimizer import SOAP as ReferenceSOAP
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.contracts.components import ParameterGroup
from forge_core.contracts.optimizer import NamedParameter, NamedParameters
from forge_core.engine.build import build_context
from forge_core.engine.trainer import Trainer
from forge_core.parallel.mesh import leave_group
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.checkpoints import stored_tensors
from forge_kit.tools.whole_tensors import read_whole
from forge_plugin_parallel import FSDP
from forge_plugin_plan.estimate import make_plan
from forge_plugin_soap import SOAP
from forge_plugin_soap.eigenbasis import first_columns, next_columns, orthonormal
from forge_plugin_soap.optimizer import SOAPOptimizer
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import TinyModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LAYOUTS
from forge_testing.memory import peak_of
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks
from forge_testing.runs import advance, draw, tiny_run, whole_tensors


def optimizer_of(component, tmp_path, **shapes):
    """The component over parameters of given shapes, in float64: matrices and stacks."""
    job = tiny_job(str(tmp_path), Catalog.installed(), optimizer=component)
    roles = {2: "matrix", 3: "stack"}
    named = [NamedParameter(n, nn.Parameter(draw(n, s, 9)), roles[len(s)]) for n, s in shapes.items()]
    context = build_context(job, Catalog.installed(), None)
    return component.build(context, NamedParameters(named)), {item.name: item.parameter for item in named}


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_dim", [10000, 8])
@pytest.mark.parametrize("beta", [None, 0.9])
def test_matrices_are_stepped_as_by_pytorch_optimizer(tmp_path, max_dim, beta):
    """The larger side of a matrix that is not square has eigenvalues of zero at first, and no one basis. The reference
    is therefore given ours, once it is seen to be one."""
    component = SOAP(
        lr=0.02,
        weight_decay=0.1,
        precondition_frequency=4,
        max_dim=max_dim,
        betas=(0.9, 0.95),
        preconditioner_beta=beta,
    )
    shapes = {"square": (8, 8), "wide": (6, 12), "tall": (12, 6)}
    optimizer, parameters = optimizer_of(component, tmp_path, **shapes)
    twins = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    reference = ReferenceSOAP(
        twins.values(),
        lr=0.02,
        betas=(0.9, 0.95),
        shampoo_beta=beta,
        weight_decay=0.1,
        precondition_frequency=4,
        max_precondition_dim=max_dim,
    )
    for step in range(14):
        for name, parameter in parameters.items():
            parameter.grad = draw(name, parameter.shape, step)
            twins[name].grad = parameter.grad.clone()
        optimizer.step()
        reference.step()
        if step == 0:
            for name, parameter in parameters.items():
                share_bases(optimizer.state[parameter], reference.state[twins[name]])
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, twins[name], rtol=2e-5, atol=2e-5, msg=name)


def share_bases(state, reference):
    """pytorch-optimizer decomposes in float32; and of eigenvectors with one eigenvalue any rotation will do."""
    for number, side in enumerate(("left", "right")):
        basis = state.get(f"{side}_basis")
        if basis is None:
            assert len(reference["Q"][number]) == 0
            continue
        matrix = reference["GG"][number]
        torch.testing.assert_close(state[side], matrix)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis), dtype=basis.dtype))
        values = (basis.mT @ matrix @ basis).diagonal()
        torch.testing.assert_close(basis @ values.diag() @ basis.mT, matrix, rtol=1e-9, atol=1e-9)
        theirs = reference["Q"][number]
        torch.testing.assert_close(values, (theirs.mT @ matrix @ theirs).diagonal(), rtol=1e-9, atol=1e-9)
        reference["Q"][number] = basis.clone()


def test_all_else_is_stepped_by_adamw(tmp_path):
    run = tiny_run(tmp_path, optimizer=SOAP(lr=0.03, adam_weight_decay=0.2), model=TinyModel(layers=3))
    twin = dict(copy.deepcopy(run.model).named_parameters())
    rest = {item.name: item.role for item in run.parameters if item.role != "matrix"}
    spared = [name for name, role in rest.items() if role in ("norm", "bias", "embedding")]
    groups = [
        {"params": [twin[name] for name in rest if name not in spared], "weight_decay": 0.2},
        {"params": [twin[name] for name in spared], "weight_decay": 0},
    ]
    adam = torch.optim.AdamW(groups, lr=0.03, betas=(0.9, 0.95), fused=True)
    before = copy.deepcopy(run.model.state_dict())
    for step in range(3):
        for item in run.parameters:
            item.parameter.grad = draw(item.name, item.parameter.shape, step).float()
            twin[item.name].grad = item.parameter.grad.clone()
        run.optimizer.step()
        adam.step()
    for item in run.parameters:
        if item.name in rest:
            torch.testing.assert_close(item.parameter, twin[item.name], rtol=0, atol=0)
        else:
            assert not torch.equal(item.parameter, before[item.name])


def test_stacked_matrices_are_treated_one_by_one(tmp_path):
    component = SOAP(precondition_frequency=2)
    stacked, one = optimizer_of(component, tmp_path, stack=(3, 6, 4))
    single, many = optimizer_of(component, tmp_path, a=(6, 4), b=(6, 4), c=(6, 4))
    for number, parameter in enumerate(many.values()):
        parameter.data.copy_(one["stack"].data[number])
    for step in range(6):
        one["stack"].grad = draw("stack", (3, 6, 4), step)
        for number, parameter in enumerate(many.values()):
            parameter.grad = one["stack"].grad[number].clone()
        stacked.step()
        single.step()
    torch.testing.assert_close(one["stack"].detach(), torch.stack([p.detach() for p in many.values()]))


def first_basis(matrix):
    return orthonormal([first_columns(matrix)])[0]


def next_basis(matrix, basis):
    return orthonormal([next_columns(matrix, basis)[0]])[0]


def test_the_basis_comes_to_the_eigenvectors():
    factor = draw("factor", (6, 20), 0)
    matrix = factor @ factor.mT
    basis = first_basis(draw("other", (6, 6), 0) @ draw("other", (6, 6), 0).mT)
    for _ in range(200):
        basis = next_basis(matrix, basis)
    _, vectors = torch.linalg.eigh(matrix)
    torch.testing.assert_close((basis.mT @ vectors.flip(1)).abs(), torch.eye(6, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        basis, first_basis(matrix) * (basis * first_basis(matrix)).sum(0).sign(), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("rank", [0, 1, 4, 8])
def test_rounding_errors_choose_no_direction(rank):
    """Of columns of which only some are independent, the others are replaced the same way whatever the errors are."""
    columns = draw("some", (8, rank), 0) @ draw("mix", (rank, 8), 0)
    [exact] = orthonormal([columns])
    torch.testing.assert_close(exact.mT @ exact, torch.eye(8, dtype=torch.float64))
    for seed in range(3):
        error = columns * (draw("error", (8, 8), seed).sign() * 2e-16)
        torch.testing.assert_close(orthonormal([columns + error])[0], exact, rtol=0, atol=1e-11)


class HostReads(TorchDispatchMode):
    """Counts numbers that are read from tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


def test_the_device_is_read_once_in_a_step_that_corrects_bases_and_in_no_other(tmp_path, make_job, train):
    model = Transformer(dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=2))
    run = tiny_run(tmp_path, model=model, optimizer=SOAP(precondition_frequency=2))
    counts = []
    as_list = Tensor.tolist
    for step in range(4):
        for item in run.parameters:
            item.parameter.grad = draw(item.name, item.parameter.shape, step).float()
        lists = []
        counting = mock.patch.object(
            Tensor, "tolist", lambda tensor, seen=lists: seen.append(tensor) or as_list(tensor)
        )
        with counting, HostReads() as reads:
            run.optimizer.step()
        counts.append(len(lists) + reads.count)
    assert counts == [1, 0, 1, 0]
    printed = []
    train(make_job(optimizer=SOAP(precondition_frequency=2), model=model), echo=printed.append)
    assert not lacks("".join(printed), "2 updates", "SOAP")


# --- without a job -----------------------------------------------------------------------------------------------


def test_plain_tensors_are_stepped_as_in_a_job(tmp_path):
    component = SOAP(lr=0.02, adam_lr=0.01, precondition_frequency=2)
    in_job, parameters = optimizer_of(component, tmp_path, matrix=(6, 4), stack=(2, 4, 4))
    plain = [nn.Parameter(parameter.detach().clone()) for parameter in parameters.values()]
    bias = nn.Parameter(torch.zeros(4))
    optimizer = SOAPOptimizer(plain, [bias], lr=0.02, adam_lr=0.01, precondition_frequency=2)
    for step in range(4):
        for (name, parameter), twin in zip(parameters.items(), plain, strict=True):
            parameter.grad = draw(name, parameter.shape, step)
            twin.grad = parameter.grad.clone()
        bias.grad = torch.ones(4)
        in_job.step()
        optimizer.step()
    torch.testing.assert_close(plain, list(parameters.values()), rtol=0, atol=0)
    torch.testing.assert_close(bias.detach(), torch.full((4,), -0.04), rtol=1e-3, atol=0)


# --- layouts -----------------------------------------------------------------------------------------------------


MODEL = Transformer(
    dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=4, kv_heads=2), tie_embeddings=True
)
SIZES = {"seq_len": 16, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64"}
OPTIMIZER = SOAP(lr=0.02, precondition_frequency=2)


def trained(folder, changes):
    """Weights after four steps, the last in a corrected basis, and of how many matrices this rank has state."""
    run = tiny_run(folder, optimizer=OPTIMIZER, model=MODEL, **SIZES | changes)
    advance(run, 4)
    weights = whole_tensors({item.name: item.parameter for item in run.parameters}, run.context.mesh)
    return weights, sum("left" in state for state in run.optimizer.state.values())


def same_weights_and_divided_state(ranks, alone):
    """One rank alone has the state of a matrix, and none has twice its share."""
    expected, all_of_them = alone
    for weights, _ in ranks:
        assert weights.keys() == expected.keys()
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-7, atol=1e-8, msg=key)
    shares = [share for _, share in ranks]
    assert sum(shares) == all_of_them == 14
    assert max(shares) < 2 * all_of_them / len(shares)


NAMES = ("fsdp2", "hsdp2x2", "fsdp2_tp2")
test_layouts = layout_law(
    Case("soap", observe=trained, compare=same_weights_and_divided_state, layouts=NAMES),
)


CHAIN = ["one process", "fsdp2_tp2", "pp2", "one process"]


def test_a_run_continues_under_every_layout(tmp_path):
    """A step under each, from the checkpoint of the one before."""

    def train(which, layout, steps):
        parallel = LAYOUTS[layout].changes(installed()) if layout in LAYOUTS else {}
        settings = {"model": MODEL, "optimizer": OPTIMIZER, "steps": steps, "gc_interval": 0, **SIZES, **parallel}
        job = tiny_job(str(tmp_path / which), **settings)

        def last_step(rank):
            return Trainer(job, echo=len).run().step

        run_on_ranks(LAYOUTS[layout].ranks, last_step) if layout in LAYOUTS else last_step(0)

    for number, layout in enumerate(CHAIN, 1):
        train("chain", layout, number)
    train("one", "one process", len(CHAIN))
    chain, one = (tmp_path / which / f"run/checkpoints/step-{len(CHAIN)}" for which in ("chain", "one"))
    stored = stored_tensors(one)
    assert stored == stored_tensors(chain)
    assert stored["optimizer.layers.0.ffn.up.weight.left_basis"][0] == (256, 256)
    seen, expected = read_whole(chain, stored, stored), read_whole(one, stored, stored)
    for key, tensor in expected.items():
        if not key.endswith("_basis"):  # which of an eigenvector and its opposite is found is left to rounding
            torch.testing.assert_close(seen[key], tensor, rtol=1e-6, atol=1e-7, msg=key)


# --- training ----------------------------------------------------------------------------------------------------


def test_it_learns(make_job, train, lines):
    records = lines(train(make_job(optimizer=SOAP(lr=0.02), steps=40, global_batch_size=16)))
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]


def test_a_plan_knows_the_size_of_the_state(tmp_path):
    """The owners' shares differ; the first rank's is some part of it."""
    settings = {"optimizer": OPTIMIZER, "model": MODEL, **SIZES}
    leave_group()  # of an earlier test: a plan is made by a process of its own
    job = tiny_job(str(tmp_path), Catalog.installed(), parallel={"fsdp": FSDP()}, **settings)
    plan = make_plan(job, Catalog.installed(), 2)
    assert not plan.ranks[0].failure
    run = tiny_run(tmp_path, **settings)
    for item in run.parameters:
        item.parameter.grad = torch.zeros_like(item.parameter)
    run.optimizer.step()
    state = sum(t.nbytes for s in run.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    assert 0.3 * state < plan.ranks[0].optimizer < 0.7 * state


def test_patterns_change_the_rate_of_both_kinds(make_job, build):
    run = build(make_job(optimizer=SOAP(adam_lr=1e-3, groups=(ParameterGroup(match="layers.0.*", lr=0.5),))))
    rates = {name: group["lr"] for group in run.optimizer.param_groups for name in group["names"]}
    assert rates["layers.0.up.weight"] == rates["layers.0.up.bias"] == 0.5
    assert (rates["layers.1.up.weight"], rates["layers.1.up.bias"]) == (3e-3, 1e-3)


def test_a_frozen_matrix_stays_and_trains_once_it_is_unfrozen(make_job, build):
    """From its second gradient on, as all do."""
    run = build(make_job(optimizer=SOAP()))
    items = {item.name: item.parameter for item in run.parameters}
    frozen_one, other = items["layers.0.up.weight"], items["layers.0.down.weight"]
    before = frozen_one.detach().clone(), other.detach().clone()
    other.grad = draw("other", other.shape, 0).float()
    run.optimizer.step()
    run.optimizer.step()
    assert torch.equal(frozen_one, before[0])
    assert not torch.equal(other, before[1])
    frozen_one.grad = draw("frozen", frozen_one.shape, 0).float()
    run.optimizer.step()
    assert torch.equal(frozen_one, before[0])
    run.optimizer.step()
    assert not torch.equal(frozen_one, before[0])


def test_state_is_kept_row_by_row():
    """As a checkpoint returns it: some processors round products and sums of another order in memory otherwise, and a
    run that continues would leave the curve."""
    parameter = nn.Parameter(draw("matrix", (12, 8), 0))
    optimizer = SOAPOptimizer([parameter], precondition_frequency=2)
    for step in range(4):
        parameter.grad = draw("gradient", (12, 8), step)
        optimizer.step()
        tensors = {slot: value for slot, value in optimizer.state[parameter].items() if slot != "step"}
        assert len(tensors) == 6
        assert [slot for slot, tensor in tensors.items() if not tensor.is_contiguous()] == []


def test_a_step_takes_the_memory_of_a_batch_and_the_same_bits():
    def train(working_bytes):
        parameters = [nn.Parameter(draw(f"matrix {n}", (64, 64), 0).float()) for n in range(16)]
        optimizer = SOAPOptimizer(parameters, precondition_frequency=2, working_bytes=working_bytes)
        peak = 0
        for step in range(3):
            for number, parameter in enumerate(parameters):
                parameter.grad = draw(f"gradient {number}", (64, 64), step).float()
            peak = peak_of(optimizer.step)
        return parameters, peak

    one_matrix = 64 * 64 * 4
    (at_once, much), (in_batches, little) = train(16 * one_matrix), train(one_matrix)
    torch.testing.assert_close(in_batches, at_once, rtol=0, atol=0)
    assert little <= much - 14 * one_matrix


def test_a_gradient_of_zeros_does_no_harm(tmp_path):
    optimizer, parameters = optimizer_of(SOAP(precondition_frequency=1, weight_decay=0), tmp_path, a=(6, 4))
    before = parameters["a"].detach().clone()
    for _ in range(4):
        parameters["a"].grad = torch.zeros(6, 4, dtype=torch.float64)
        optimizer.step()
    assert torch.equal(parameters["a"], before)


@pytest.mark.parametrize("beta", [1.0, -0.1])
def test_a_decay_that_cannot_be_is_refused(beta):
    with pytest.raises(ValueError, match="preconditioner_beta"):
        SOAP(preconditioner_beta=beta)
