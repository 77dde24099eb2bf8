"""The private names of torch that a planned step uses: each test names one that another torch has changed."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from forge_kit.torch_internals import FakeTensorMode
from forge_plugin_plan import torch_internals


def test_a_storage_keeps_its_identity_while_python_objects_for_it_come_and_go():
    tensor, other = torch.zeros(4), torch.zeros(4)
    first, second, third = (torch_internals.identity_of(each.untyped_storage()) for each in (tensor, tensor[:2], other))
    assert (first == second, first == third) == (True, False)


def test_a_backward_pass_has_a_number_while_it_runs():
    numbers = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: numbers.append(torch_internals.backward_pass()))
    (2 * weight).sum().backward()
    assert numbers[0] >= 0
    assert torch_internals.backward_pass() == -1


def test_a_schema_says_what_is_written():
    schema = torch_internals.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_"
    assert [argument.alias_info.is_write for argument in schema.arguments if argument.alias_info] == [True]


def test_a_world_of_one_process_has_named_groups_and_dtensors_that_ask_for_shapes():
    questions = []

    def ask(question):
        questions.append(question)
        return question()

    if dist.is_initialized():  # by an earlier test in this process
        dist.destroy_process_group()
    dist.init_process_group("fake", store=torch_internals.FakeStore(), rank=0, world_size=2)
    try:
        group = dist.group.WORLD
        assert torch_internals.group_named(group.group_name) is group
        torch_internals.forget_sharding()  # or the answer would be one of before
        mesh = init_device_mesh("cpu", (2,))
        with torch_internals.around_questions_of_dtensors(ask):
            DTensor.from_local(torch.ones(2, 17), mesh, [Shard(0)]).exp()
        assert questions
    finally:
        dist.destroy_process_group()
        torch_internals.forget_sharding()


def test_the_vote_of_a_pipeline_takes_the_arguments_that_its_stand_in_takes():
    vote = getattr(schedules._PipelineSchedule, "_warmup_p2p", None)
    if vote is not None:  # since torch 2.13
        with torch_internals.without_vote():
            stand_in = inspect.signature(schedules._PipelineSchedule._warmup_p2p)
        assert len(stand_in.parameters) == len(inspect.signature(vote).parameters)
        assert schedules.InferenceMode.STATIC


def test_the_first_hook_of_a_gradient_precedes_those_that_were_registered_before():
    order = []
    tensor = 2 * torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda _: order.append("fsdp"))
    torch_internals.hook_gradient_first(tensor, lambda _: order.append("model"))
    torch_internals.hook_gradient_first(tensor, lambda _: order.append("loss"))
    tensor.sum().backward()
    assert order == ["loss", "model", "fsdp"]


def test_results_by_recipes_are_those_of_torch():
    def results(mode):
        with mode:
            x = torch.empty(4, 6, dtype=torch.bfloat16)
            view, added = x.t()[1:], x + 1.5
            parts = torch.split(x, 3, dim=1)
            values = torch.topk(x, 2)
            flat = torch.ops.aten._unsafe_view.default(x, (24,))
            new = torch.zeros(3, dtype=torch.int32)
            return x, [view, added, x.mul_(2), *parts, *values, x.float().sum(0), flat, new]

    mode = torch_internals.QuickFakeTensorMode()
    for _ in range(4):  # torch's cache is filled by the first, recipes by the next
        x, quick = results(mode)
    plain_x, plain = results(FakeTensorMode())
    by_recipe = {operation for operation, *_ in torch_internals.QuickFakeTensorMode._recipes}
    assert {torch.ops.aten.add.Tensor, torch.ops.aten._unsafe_view.default} <= by_recipe
    for first, second in zip(quick, plain, strict=True):
        for fact in ("shape", "dtype", "device", "requires_grad"):
            assert getattr(first, fact) == getattr(second, fact)
        assert (first.stride(), first.storage_offset()) == (second.stride(), second.storage_offset())
        assert (first is x) == (second is plain_x)
        shared = [
            tensor.untyped_storage()._cdata == own.untyped_storage()._cdata
            for tensor, own in ((first, x), (second, plain_x))
        ]
        assert shared[0] == shared[1]
        assert vars(first).keys() == vars(second).keys()
        assert first.fake_mode is mode


def test_the_device_of_a_fake_tensor_is_known_without_torch():
    with torch_internals.QuickFakeTensorMode():
        assert torch.empty(2).device == torch.device("cpu")
