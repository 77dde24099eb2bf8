"""`adamw` against torch's AdamW and against the paper's update, through the real engine."""

from __future__ import annotations

import pytest
import torch

from forge_core.contracts.optimizer import NamedParameter, NamedParameters
from forge_plugin_adamw import AdamW
from forge_testing.refusals import naming

ROLES = {"embedding": (7, 4), "matrix": (4, 4), "norm": (4,), "bias": (4,), "head": (7, 4)}


def named(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return NamedParameters(
        [
            NamedParameter(role, torch.nn.Parameter(torch.randn(shape, generator=generator)), role)
            for role, shape in ROLES.items()
        ]
    )


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for item in parameters:
        item.parameter.grad = torch.randn(item.parameter.shape, generator=generator)


@pytest.mark.parametrize("fused", [True, False])
def test_the_update_is_that_of_the_paper(fused):
    component = AdamW(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, fused=fused)
    parameters = named()
    optimizer = component.build(None, parameters)
    expected = {p.name: p.parameter.detach().double() for p in parameters}
    moments = {name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in expected.items()}
    for step in range(1, 6):
        set_gradients(parameters, step)
        for item in parameters:
            weight, gradient = expected[item.name], item.parameter.grad.double()
            m, v = moments[item.name]
            m.mul_(0.8).add_(gradient, alpha=0.2)
            v.mul_(0.9).addcmul_(gradient, gradient, value=0.1)
            if item.role in ("matrix", "head"):
                weight *= 1 - 0.01 * 0.2
            weight -= 0.01 * (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6)
        optimizer.step()
    for item in parameters:
        torch.testing.assert_close(item.parameter.double(), expected[item.name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("decay_embeddings", "decayed"), [(False, {"matrix", "head"}), (True, {"matrix", "head", "embedding"})]
)
def test_norms_biases_and_embeddings_are_spared_unless_asked(decay_embeddings, decayed):
    optimizer = AdamW(decay_embeddings=decay_embeddings).build(None, named())
    found = {name for group in optimizer.param_groups if group["weight_decay"] for name in group["names"]}
    assert found == decayed
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(ROLES)


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        ({"lr": 0.0}, ["'lr'", "> 0", 0.0]),
        ({"betas": (0.9, 1.0)}, ["< 1", "[0.9, 1.0]"]),
        ({"eps": 0.0}, ["'eps'", "> 0", 0.0]),
        ({"weight_decay": -1.0}, ["'weight_decay'", ">= 0", -1.0]),
    ],
)
def test_values_out_of_range_are_refused(wrong, facts):
    with pytest.raises(ValueError, match=naming(*facts)):
        AdamW(**wrong)
