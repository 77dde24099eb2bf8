"""What the suite of routers says of wrong ones; and that a right one passes."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from torch import nn

from forge_core.contracts.components import RouterComponent
from forge_kit.nn.modules import Linear
from forge_testing.refusals import lacks
from forge_testing.suites import RouterSuite

pytestmark = pytest.mark.thorough


class TopTwo(nn.Module):
    """Weights and numbers (B, S, 2) of the two best experts, which is right; subclasses alter it."""

    experts_per_token = 2

    def __init__(self, dim, experts):
        super().__init__()
        self.gate = Linear(dim, experts)

    def forward(self, x, batch):
        return tuple(self.gate(x).softmax(-1).topk(2))


def component_of(router):
    @frozen(kw_only=True)
    class Router(RouterComponent):
        def build(self, context, dim, experts):
            return router(dim, experts)

    return Router()


class Asks(TopTwo):
    """Has the host wait for a value of each call."""

    def forward(self, x, batch):
        return super().forward(x / 2 if x.max() > 1e9 else x, batch)


class AskingSuite(RouterSuite):
    component = component_of(Asks)


class TestTopTwo(RouterSuite):
    component = component_of(TopTwo)


class OutOfRange(TopTwo):
    def forward(self, x, batch):
        weights, experts = super().forward(x, batch)
        return weights, experts + 1


class Hesitant(TopTwo):
    def forward(self, x, batch):
        weights, experts = super().forward(x, batch)
        return weights, experts.where(weights > weights.median(), -1)


class Infinite(TopTwo):
    def forward(self, x, batch):
        weights, experts = super().forward(x, batch)
        return weights / 0, experts


class Narrow(TopTwo):
    def forward(self, x, batch):
        weights, experts = super().forward(x, batch)
        return weights.bfloat16(), experts


class OfSomeTokens(TopTwo):
    def forward(self, x, batch):
        return super().forward(x[:, :5], batch)


class Widening(TopTwo):
    """Scores in float32, of weights that FSDP would have rounded."""

    def forward(self, x, batch):
        return super().forward(x.float(), batch)


class Silent(TopTwo):
    def forward(self, x, batch):
        return None


class Modest(TopTwo):
    experts_per_token = 1


class Counting(TopTwo):
    calls = 0

    def forward(self, x, batch):
        self.calls += 1
        weights, experts = super().forward(x, batch)
        return weights * self.calls, experts


class Deaf(TopTwo):
    def forward(self, x, batch):
        weights, experts = super().forward(x, batch)
        return weights.detach(), experts


class HalfDeaf(TopTwo):
    def __init__(self, dim, experts):
        super().__init__(dim, experts)
        self.unused = Linear(dim, experts)


class OnTheCPU(TopTwo):
    def __init__(self, dim, experts):
        super().__init__(dim, experts)
        self.gate.weight = nn.Parameter(torch.zeros(experts, dim, device="cpu"))


class Unseeded(TopTwo):
    def __init__(self, dim, experts):
        super().__init__(dim, experts)
        self.register_buffer("noise", torch.empty(3))

    def init_parameter(self, name, fill):
        raise NotImplementedError

    def init_buffers(self, device):
        self.noise = torch.randn(3, device=device)


class ByRow(TopTwo):
    """The row of the micro-batch decides."""

    def forward(self, x, batch):
        return super().forward(x + torch.arange(len(x)).view(-1, 1, 1), batch)


class ByMicroBatch(TopTwo):
    """The mean over the micro-batch decides."""

    def forward(self, x, batch):
        return super().forward(x - x.mean((0, 1)), batch)


class Noisy(TopTwo):
    def forward(self, x, batch):
        return super().forward(x + torch.randn_like(x), batch)


class NoisyInTraining(TopTwo):
    """Right: noise in training is its own affair."""

    def forward(self, x, batch):
        return super().forward(x + torch.randn_like(x) if self.training else x, batch)


class TestNoisyInTraining(RouterSuite):
    component = component_of(NoisyInTraining)


SHAPES = "test_each_token_gets_weights_and_numbers_of_experts"
MEAN = "test_it_says_how_many_experts_a_token_has"


@pytest.mark.parametrize(
    ("check", "router", "told"),
    [
        (
            "test_it_is_a_module_on_the_meta_device",
            lambda dim, experts: len,
            "build returned a builtin_function_or_method",
        ),
        ("test_it_is_a_module_on_the_meta_device", OnTheCPU, "gate.weight has memory"),
        (
            "test_its_initial_values_are_its_own",
            Unseeded,
            "the initial values of noise depend on the default generator",
        ),
        (SHAPES, OutOfRange, "numbers of experts from 1 to 8; there are experts 0 to 7"),
        (SHAPES, Hesitant, "to give -1 for none, set `leaves_out = True`"),
        (SHAPES, Infinite, "some weights are not finite"),
        (SHAPES, Narrow, "weights are torch.bfloat16; compute them in float32 or wider"),
        (SHAPES, OfSomeTokens, "weights (2, 5, 2) and numbers (2, 5, 2) for tokens (2, 12)"),
        (SHAPES, Silent, "the router returned NoneType; it returns two tensors"),
        ("test_weights_are_used_in_the_dtype_of_the_tokens", Widening, "fsdp chooses other experts than one process"),
        (MEAN, Modest, "`experts_per_token` is 1, but tokens have 2 in the mean"),
        ("test_it_says_the_same_again", Counting, "asked twice in evaluation mode, it returns different results"),
        (
            "test_it_says_the_same_again",
            Noisy,
            "in evaluation mode, it returns different results; keep nothing from call",
        ),
        ("test_a_sequence_is_routed_by_itself", ByRow, "a sequence in another row of the micro-batch is routed diff"),
        ("test_a_sequence_is_routed_by_itself", ByMicroBatch, "without the other sequences of the micro-batch is rou"),
        ("test_gradients_reach_it", Deaf, "the weights are not differentiable"),
        ("test_gradients_reach_it", HalfDeaf, "no gradient reaches unused.weight"),
    ],
)
def test_what_is_wrong_is_told(refusal, check, router, told):
    assert told in refusal(RouterSuite, check, component_of(router))


def test_a_router_for_which_the_host_waits_is_told_with_its_line(tmp_path):
    with pytest.raises(AssertionError) as error:
        AskingSuite().test_it_routes_on_a_device_and_waits_only_where_it_says(tmp_path)
    line = f"{__file__}:{Asks.forward.__code__.co_firstlineno + 1}"
    assert not lacks(str(error.value), "in a call of AskingSuite", line, "a value as a number")
