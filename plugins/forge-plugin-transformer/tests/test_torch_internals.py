"""The private names of torch that attention uses: the test names one that another torch has changed."""

from __future__ import annotations

import torch
from torch import nn

from forge_plugin_transformer.torch_internals import KeepsTies, softmax_backward_data


def test_the_gradient_of_a_softmax_is_computed_in_place():
    scores = torch.randn(2, 5, requires_grad=True)
    p, grad = scores.softmax(-1), torch.randn(2, 5)
    (expected,) = torch.autograd.grad(p, scores, grad)
    result = softmax_backward_data(grad, p.detach(), -1, p.dtype, grad_input=grad)
    assert result.data_ptr() == grad.data_ptr()
    torch.testing.assert_close(result, expected)


class Tied(KeepsTies):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")
        self.tie()

    def tie(self):
        self.other.weight = self.one.weight


def test_parameters_are_tied_again_when_torch_has_replaced_them():
    model = Tied().to_empty(device="cpu")
    assert model.other.weight is model.one.weight
    assert not model.one.weight.is_meta
