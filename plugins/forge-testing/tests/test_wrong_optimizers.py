"""What the suite of optimizers says of wrong ones."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen

from forge_core.contracts.components import OptimizerComponent
from forge_core.contracts.optimizer import NamedParameters
from forge_testing.refusals import lacks, naming
from forge_testing.suites import OptimizerSuite

pytestmark = pytest.mark.thorough


class Descent(torch.optim.Optimizer):
    """w <- w - lr g, which is right."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter, group):
        parameter.add_(parameter.grad, alpha=-group["lr"])


class Uphill(Descent):
    def update(self, parameter, group):
        parameter.add_(parameter.grad, alpha=group["lr"])


class Forgetful(Descent):
    """Keeps its momentum beside the state."""

    def update(self, parameter, group):
        kept = self.__dict__.setdefault("momentum", {})
        momentum = kept[parameter] = 0.9 * kept.get(parameter, 0) + parameter.grad
        parameter.add_(momentum, alpha=-group["lr"])


class KeepsSomeGradients(Descent):
    def zero_grad(self, set_to_none=True):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


class OwnRate(Descent):
    def update(self, parameter, group):
        parameter.add_(parameter.grad, alpha=-0.05)


class NeedsGradients(Descent):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, group)


class AlwaysDecays(NeedsGradients):
    def update(self, parameter, group):
        parameter.mul_(1 - group["lr"])
        if parameter.grad is not None:
            super().update(parameter, group)


class OnlyTrainable(Descent):
    """Decides what to step when it is built."""

    def __init__(self, groups, lr):
        super().__init__(groups, lr)
        self.trainable = {p for group in groups for p in group["params"] if p.requires_grad}

    def update(self, parameter, group):
        if parameter in self.trainable:
            super().update(parameter, group)


class OfItsShard(Descent):
    """Normalises by the part of the gradient that a rank has."""

    def update(self, parameter, group):
        local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        parameter.add_(parameter.grad, alpha=-group["lr"] / (1 + local.norm().item()))


class Reads(Descent):
    """Has the host wait for every parameter."""

    def update(self, parameter, group):
        if parameter.grad.abs().max().item() < 1e9:
            super().update(parameter, group)


class KeepsOnTheHost(Descent):
    def update(self, parameter, group):
        parameter.add_(parameter.grad + torch.zeros(parameter.shape, dtype=parameter.dtype), alpha=-group["lr"])


class OfPlainTensors(Descent):
    def update(self, parameter, group):
        assert not hasattr(parameter, "to_local"), "what is this?"
        super().update(parameter, group)


def component_of(make, lr=0.05):
    @frozen(kw_only=True)
    class Wrong(OptimizerComponent):
        def build(self, context, parameters):
            return make(parameters, lr)

    return Wrong()


def using(cls):
    return component_of(lambda parameters, lr: cls(parameters.groups(0.0), lr))


class ReadsSuite(OptimizerSuite):
    component = using(Reads)


class HostSuite(OptimizerSuite):
    component = using(KeepsOnTheHost)


def without_norms(parameters, lr):
    return Descent(NamedParameters(p for p in parameters if p.role != "norm").groups(0.0), lr)


def nameless(parameters, lr):
    return Descent([{"params": [item.parameter for item in parameters]}], lr)


def misnamed(parameters, lr):
    groups = parameters.groups(0.0)
    groups[0]["names"] = groups[0]["names"][::-1]
    return Descent(groups, lr)


@pytest.mark.parametrize(
    ("check", "component", "told"),
    [
        ("test_every_parameter_descends_a_quadratic", using(Uphill), "no closer to its minimum: embedding.weight (1"),
        ("test_every_parameter_descends_a_quadratic", component_of(without_norms), "minimum: norm.weight ("),
        ("test_it_descends_a_language_model", using(Uphill), "in 40 updates and must fall"),
        (
            "test_a_run_that_continues_equals_one_that_was_not_interrupted",
            using(Forgetful),
            "all state must be tensors or plain values in optimizer.state[parameter]",
        ),
        ("test_every_parameter_is_in_one_group", component_of(without_norms), "left out norm.weight; every parameter"),
        ("test_every_parameter_is_in_one_group", component_of(nameless), "group 0 has `names` None for the parameters"),
        ("test_every_parameter_is_in_one_group", component_of(misnamed), "make groups with parameters.groups(…)"),
        (
            "test_zero_grad_reaches_every_parameter",
            using(KeepsSomeGradients),
            "leaves the gradients of embedding.weight",
        ),
        ("test_the_rate_is_read_from_the_groups", using(OwnRate), "with `lr` = 0 in every group, an update moves"),
        ("test_missing_gradients_are_passed_over", using(NeedsGradients), "an update fails if embedding.weight, "),
        ("test_missing_gradients_are_passed_over", using(AlwaysDecays), "moved without a gradient; pass over"),
        (
            "test_a_frozen_parameter_stays_and_trains_once_unfrozen",
            using(AlwaysDecays),
            "a frozen parameter (requires_",
        ),
        (
            "test_a_frozen_parameter_stays_and_trains_once_unfrozen",
            using(OnlyTrainable),
            "not train once it is unfrozen",
        ),
    ],
)
def test_what_is_wrong_is_told(refusal, check, component, told):
    assert told in refusal(OptimizerSuite, check, component)


def test_layouts_that_differ_are_told_with_the_differences(refusal):
    check = "test_every_layout_trains_like_one_process"
    said = refusal(OptimizerSuite, check, using(OfItsShard), "fsdp2", layouts=("replicate2", "fsdp2"))
    assert not lacks(said, "fsdp2", "Difference(initial=0.0", "ranks")


def test_a_layout_that_fails_is_told_from_those_that_do_not(tmp_path):
    class TestWrong(OptimizerSuite):
        component = using(OfPlainTensors)
        layouts = ("replicate2", "fsdp2")

    TestWrong().test_every_layout_trains_like_one_process("replicate2")
    with pytest.raises(AssertionError, match=naming("TestWrong", "fsdp2", "what is this?")):
        TestWrong().test_every_layout_trains_like_one_process("fsdp2")


@pytest.mark.parametrize(
    ("suite", "wrong", "told"),
    [
        (ReadsSuite, Reads.update, ["in a step of ReadsSuite", "a value as a number"]),
        (HostSuite, KeepsOnTheHost.update, ["add: tensors of pretend and of cpu are mixed"]),
    ],
)
def test_what_a_device_would_not_take_is_told_with_its_line(tmp_path, suite, wrong, told):
    with pytest.raises(AssertionError) as error:
        suite().test_it_trains_on_a_device_and_waits_only_where_it_says(tmp_path)
    assert not lacks(str(error.value), f"{__file__}:{wrong.__code__.co_firstlineno + 1}", *told)


def test_what_nobody_offers_is_skipped_with_the_reason():
    from forge_testing.catalogs import catalog_of

    class TestAlone(OptimizerSuite):
        component = using(Descent)
        catalog = catalog_of()

    with pytest.raises(pytest.skip.Exception, match=naming("fsdp2", "stage fsdp")):
        TestAlone().test_every_layout_trains_like_one_process("fsdp2")
    TestAlone().test_every_layout_trains_like_one_process("replicate2")


def test_a_suite_without_a_component_says_so(tmp_path):
    with pytest.raises(AssertionError, match=naming("OptimizerSuite", "`component`")):
        OptimizerSuite().make(tmp_path)
