"""What the suite of routers says of wrong ones; and that a right one passes, as no distribution here has one yet."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from torch import nn

from forge_core.components import RouterComponent
from forge_core.modules import Linear
from forge_core.testing.suites import RouterSuite


class TopTwo(nn.Module):
    """Numbers and weights (N, 2) of the two best experts, which is right; subclasses alter it."""

    def __init__(self, dim, experts):
        super().__init__()
        self.gate = Linear(dim, experts)

    def forward(self, tokens):
        weights, ids = self.gate(tokens).softmax(-1).topk(2)
        return {"weights": weights, "ids": ids}


def component_of(router):
    @frozen(kw_only=True)
    class Router(RouterComponent):
        def build(self, context, dim, experts):
            return router(dim, experts)

    return Router()


class TestTopTwo(RouterSuite):
    component = component_of(TopTwo)


class OutOfRange(TopTwo):
    def forward(self, tokens):
        said = super().forward(tokens)
        return {**said, "ids": said["ids"] + 1}


class Infinite(TopTwo):
    def forward(self, tokens):
        said = super().forward(tokens)
        return {**said, "weights": said["weights"] / 0}


class OfSomeTokens(TopTwo):
    def forward(self, tokens):
        return super().forward(tokens[:5])


class Silent(TopTwo):
    def forward(self, tokens):
        return None


class Counting(TopTwo):
    calls = 0

    def forward(self, tokens):
        self.calls += 1
        said = super().forward(tokens)
        return {**said, "weights": said["weights"] * self.calls}


class Deaf(TopTwo):
    def forward(self, tokens):
        return {name: tensor.detach() for name, tensor in super().forward(tokens).items()}


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


FINITE = "test_what_it_says_is_finite_and_of_every_token"


@pytest.mark.parametrize(
    ("check", "router", "told"),
    [
        ("test_it_is_a_module_on_the_meta_device", lambda dim, experts: len, "build gave a builtin_function_or_method"),
        ("test_it_is_a_module_on_the_meta_device", OnTheCPU, "gate.weight has memory"),
        (
            "test_its_initial_values_are_its_own",
            Unseeded,
            "the initial values of noise depend on the default generator",
        ),
        (FINITE, OutOfRange, "what it says['ids'] has ids from 1 to 8; there are experts 0 to 7"),
        (FINITE, Infinite, "what it says['weights'] has values that are not finite"),
        (FINITE, OfSomeTokens, "has the shape (5, 2) for 24 tokens and 8 experts"),
        (FINITE, Silent, "the router said nothing"),
        ("test_it_says_the_same_again", Counting, "asked twice in evaluation mode, it says different things"),
        ("test_gradients_reach_it", Deaf, "nothing that it says is differentiable"),
        ("test_gradients_reach_it", HalfDeaf, "no gradient reaches unused.weight"),
    ],
)
def test_what_is_wrong_is_told(refusal, check, router, told):
    assert told in refusal(RouterSuite, check, component_of(router))
