"""The private names of torch that `forge_kit.torch_internals` uses: each test names one that torch has changed."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from forge_kit import torch_internals
from forge_testing.processes import run_on_ranks

PUBLIC = hasattr(FSDPModule, "finalize_backward")


@pytest.mark.skipif(not PUBLIC, reason="torch 2.15 is the first with a public reduction")
@pytest.mark.parametrize("name", ["set_manual_backward_finalization", "finalize_backward"])
def test_fsdp_has_a_public_reduction(name):
    assert callable(getattr(FSDPModule, name))


@pytest.mark.skipif(PUBLIC, reason="this torch has a public reduction")
@pytest.mark.parametrize(
    ("owner", "name"), [(FSDPModule, "_get_fsdp_state"), (FSDPState, "_root_post_backward_final_callback")]
)
def test_fsdp_has_the_callback_of_its_last_backward_pass(owner, name):
    assert list(inspect.signature(getattr(owner, name)).parameters) == ["self"]


def test_fake_tensors_have_a_shape_and_are_recognised():
    assert torch_internals.detect_fake_mode() is None
    with torch_internals.FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(2**40, 3)
        assert torch_internals.detect_fake_mode() is not None
        with torch_internals.unset_fake_temporarily():
            assert not isinstance(torch.empty(1), torch_internals.FakeTensor)
        assert isinstance(fake @ torch.ones(3), torch_internals.FakeTensor)


def test_a_dispatch_mode_sees_every_operation():
    seen = []

    class Mode(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2).to(torch.float64)
    assert seen[-1] is torch_internals.to_copy


def test_leaves_are_found_in_nested_containers():
    assert torch_internals.tree_leaves(([1, (2,)], {"a": 3})) == [1, 2, 3]


def test_the_bases_of_norms_and_of_dropout():
    norms = (nn.BatchNorm2d(3), nn.InstanceNorm1d(3, track_running_stats=True))
    assert [isinstance(norm, torch_internals.NormBase) and norm.track_running_stats for norm in norms] == [True, True]
    dropout = nn.Dropout2d(0.25)
    assert isinstance(dropout, torch_internals.Dropout)
    assert dropout.p == 0.25


def test_the_kernel_of_attention_returns_normalisers_and_has_a_backward():
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    out, normalisers = torch_internals.flash_on_cpu(q, k, v, is_causal=False, attn_mask=None, scale=0.5)
    torch.testing.assert_close(out, nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5))
    torch.testing.assert_close(normalisers, (0.5 * q @ k.mT).logsumexp(-1))
    grads = torch_internals.flash_on_cpu_backward(
        torch.ones_like(out), q, k, v, out, normalisers, 0.0, False, attn_mask=None, scale=0.5
    )
    assert [grad.shape for grad in grads] == [q.shape] * 3


def test_a_grouped_product_is_one_operator():
    rows, stack = torch.randn(4, 16, dtype=torch.bfloat16), torch.randn(2, 16, 8, dtype=torch.bfloat16)
    result = torch_internals.grouped_mm(rows, stack, torch.tensor([1, 4], dtype=torch.int32))
    torch.testing.assert_close(result, torch.cat([rows[:1] @ stack[0], rows[1:] @ stack[1]]))


@pytest.mark.parametrize("name", [name for name in torch_internals.__all__ if name.startswith("foreach_")])
def test_foreach_operations_are_those_of_single_tensors(name):
    operation, in_place = name.removeprefix("foreach_").removesuffix("_"), name.endswith("_")
    more = {"lerp": ([torch.tensor([5.0])], 0.5), "sign": (), "clamp_min": (0,)}.get(operation)
    more = ([torch.tensor([4.0])],) if more is None else more
    single = [argument[0] if isinstance(argument, list) else argument for argument in more]
    values = [torch.tensor([-3.0])]
    expected = single[0] if operation == "copy" else getattr(torch, operation)(values[0], *single)
    result = getattr(torch_internals, name)(values, *more)
    assert (values if in_place else result)[0] == expected


def test_modules_compute_with_what_the_dictionaries_hold():
    assert torch_internals.buffers_of(nn.BatchNorm1d(2, track_running_stats=False))["running_mean"] is None
    norm, linear = nn.BatchNorm1d(2), nn.Linear(1, 1, bias=False)
    torch_internals.buffers_of(norm)["running_mean"] = torch.full((2,), 7.0)
    assert norm.running_mean.tolist() == [7, 7]
    torch_internals.parameters_of(linear)["weight"] = torch.full((1, 1), 3.0)  # no parameter, which setattr refuses
    assert linear(torch.ones(1)).item() == 3


def test_a_compiled_module_is_known_by_what_calls_it():
    model = nn.Sequential(nn.Linear(1, 1))
    assert not torch_internals.is_compiled(model)
    model[0].compile(backend="eager")  # which traces nothing before it is called
    assert torch_internals.is_compiled(model)


def test_dimensions_of_a_mesh_become_one_and_parts_have_a_place():
    def work(rank):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        assert torch_internals.flattened(mesh, ["a", "b"], "both").get_group().size() == 1
        split = distribute_tensor(torch.zeros(4, 3), mesh["a"], [Shard(0)])
        assert torch_internals.part_offsets(split) == (0, 0)

    run_on_ranks(1, work)


def test_strided_placements_are_told_from_others():
    assert torch_internals.is_strided(_StridedShard(0, split_factor=2))
    assert not torch_internals.is_strided(Shard(0))


@pytest.mark.slow
def test_adamw_of_own_parts_is_that_of_whole_tensors():
    """Also for a gradient that is still to be summed, such as a weight's that each rank applies to its own tokens."""

    def stepped(rank: int) -> list[list[Tensor]]:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(1.0, 7.0).view(3, 2)  # the first rank has two of the three rows

        def parameter(placement: Placement | None) -> nn.Parameter:
            return nn.Parameter(distribute_tensor(whole.clone(), mesh, [placement]) if placement else whole.clone())

        def step(kind: type[torch.optim.AdamW], fused: bool) -> list[Tensor]:
            parameters = [parameter(placement) for placement in (Shard(0), Replicate(), Replicate(), None)]
            optimizer = kind([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=0.1, fused=fused)
            for _ in range(2):
                for item in parameters:
                    item.grad = item.detach() ** 2
                parameters[2].grad = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
                optimizer.step()
            for item in parameters[:3]:
                assert optimizer.state[item]["exp_avg"].placements == item.placements
            moments = [optimizer.state[item][name] for item in parameters for name in ("exp_avg", "exp_avg_sq")]
            return [item.full_tensor() if isinstance(item, DTensor) else item for item in (*parameters, *moments)]

        kinds = (torch.optim.AdamW, torch_internals.LocalAdamW)
        return [step(kind, fused) for fused in (True, False) for kind in kinds]

    for fused, local_fused, looped, local_looped in run_on_ranks(2, stepped):
        for expected, found in ((fused, local_fused), (looped, local_looped)):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_compiled_functions_run_as_python_within_eagerly():
    calls = []

    def backend(graph, inputs):
        calls.append("compiled")
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)
    with torch_internals.eagerly():
        assert double(torch.ones(1)).item() == 2.0
    assert calls == []
    assert double(torch.ones(1)).item() == 2.0
    assert calls == ["compiled"]


def test_eagerly_does_not_import_the_compiler(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with torch_internals.eagerly():
        assert "torch._dynamo" not in sys.modules
