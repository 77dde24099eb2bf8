"""Direct copies of modules compute what the modules compute, and notice what happens to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_kit.nn.direct_calls import DirectCalls, direct, directly_callable
from forge_kit.nn.modules import Linear


@directly_callable
class Doubled(nn.Module):
    """2 linear(x)."""

    def __init__(self):
        super().__init__()
        self.linear = Linear(3, 3)
        nn.init.normal_(self.linear.weight)
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x):
        return self.changed(self.linear(x)) * self.factor

    def changed(self, x):
        return x


X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


def test_a_copy_computes_the_same_with_the_same_parameters_and_finds_them_at_once():
    module = Doubled()
    copy = direct(module)
    assert vars(copy.linear)["weight"] is module.linear.weight
    assert copy is not module
    assert isinstance(copy, Doubled)
    assert copy(X).equal(module(X))
    copy(X).sum().backward()
    assert module.linear.weight.grad is not None


class Derived(Doubled):
    pass


def observed(module):
    module.register_forward_hook(lambda *_: None)


def compiled(module):
    module.compile(backend="eager")


def replaced(module):
    module.changed = torch.zeros_like


def other_forward(module):
    module.forward = torch.zeros_like


@pytest.mark.parametrize("change", [observed, compiled, replaced, other_forward])
def test_a_module_that_computes_otherwise_than_its_class_stays_as_it_is(change):
    module = Doubled()
    change(module)
    assert direct(module) is module
    parent = nn.Identity()
    parent.child = module
    assert vars(direct(parent))["child"] is module


def test_derived_classes_are_not_copied():
    module = Derived()
    assert direct(module) is module


def test_hooks_of_all_modules_are_called():
    module, calls = Doubled(), []
    handle = nn.modules.module.register_module_forward_hook(lambda *args: calls.append(args[0]))
    try:
        DirectCalls()({"a": module})["a"](X)
    finally:
        handle.remove()
    assert calls == [module.linear, module]


def other_parameter(module):
    module.linear.weight = nn.Parameter(torch.ones(3, 3))


def other_child(module):
    module.linear = Linear(3, 3)
    nn.init.ones_(module.linear.weight)


def other_buffer(module):
    module.factor = torch.tensor(5.0)


def hook_of_child(module):
    module.linear.register_forward_hook(lambda *_: torch.ones(2, 3))


def in_place(module):
    with torch.no_grad():
        module.linear.weight.zero_()


@pytest.mark.parametrize("change", [other_parameter, other_child, other_buffer, hook_of_child, in_place])
def test_changes_after_the_first_call_are_noticed(change):
    module, calls = Doubled(), DirectCalls()
    first = calls({"a": module})["a"]
    before = first(X)
    assert calls({"a": module})["a"] is first
    change(module)
    after = calls({"a": module})["a"](X)
    assert after.equal(module(X))
    assert not after.equal(before)


def test_another_module_of_a_name_has_a_copy_of_its_own():
    calls, modules = DirectCalls(), [Doubled(), Doubled()]
    assert [calls({"a": module})["a"](X).equal(module(X)) for module in modules] == [True, True]
