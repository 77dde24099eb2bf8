"""Chunks give what the recurrence gives, for whole sequences, documents and continued ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_kit.nn.causal_convolution import numbered
from forge_plugin_linear_attention.modules.delta_rule import gated_delta_rule

SIZES = {"B": 2, "H": 3, "S": 21, "K": 4, "V": 5}


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Equation 10 of the paper, position by position: (B, H, S, V) and the last state."""
    outputs = []
    for t in range(q.shape[2]):
        state = state * log_decay[:, :, t, None, None].exp()
        key = k[:, :, t, :, None]
        missing = v[:, :, t, None, :] - key.mT @ state
        state = state + key @ (beta[:, :, t, None, None] * missing)
        outputs.append((q[:, :, t, None, :] @ state)[:, :, 0])
    return torch.stack(outputs, 2), state


def drawn(seed: int = 0) -> dict[str, Tensor]:
    """Inputs of the rule, in float64."""
    generator = torch.Generator().manual_seed(seed)
    b, h, s, k, v = SIZES.values()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(b, h, s, k),
        "k": torch.nn.functional.normalize(normal(b, h, s, k), dim=-1),
        "v": normal(b, h, s, v),
        "log_decay": -normal(b, h, s).exp(),
        "beta": normal(b, h, s).sigmoid(),
    }


def zeros() -> Tensor:
    return torch.zeros(SIZES["B"], SIZES["H"], SIZES["K"], SIZES["V"], dtype=torch.float64)


@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
def test_chunks_equal_the_recurrence(chunk: int) -> None:
    inputs = drawn()
    found, state = gated_delta_rule(**inputs, chunk=chunk)
    expected, last = recurrence(**inputs, state=zeros())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-12)


def test_gradients_equal_those_of_the_recurrence() -> None:
    gradients = []
    for rule in (lambda **x: gated_delta_rule(**x, chunk=8), lambda **x: recurrence(**x, state=zeros())):
        inputs = {name: tensor.requires_grad_() for name, tensor in drawn().items()}
        output, state = rule(**inputs)
        (output.sin().sum() + state.cos().sum()).backward()
        gradients.append([tensor.grad for tensor in inputs.values()])
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


class Written(TorchDispatchMode):
    """Counts the numbers that operations return."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.numbers += found.numel() if isinstance(found, Tensor) else 0
        return found


def test_forward_and_backward_pass_grow_in_proportion_to_the_length() -> None:
    numbers = []
    for times in (8, 32):
        inputs = {name: x.repeat(1, 1, times, *[1] * (x.ndim - 3)).requires_grad_() for name, x in drawn().items()}
        with Written() as written:
            gated_delta_rule(**inputs, chunk=4)[0].sum().backward()
        numbers.append(written.numbers)
    assert numbers[1] < 4.1 * numbers[0]


def test_a_sequence_goes_on_from_a_state() -> None:
    inputs = drawn()
    whole, last = gated_delta_rule(**inputs, chunk=4)
    state, parts = None, []
    for start, stop in ((0, 5), (5, 6), (6, 21)):
        part = {name: tensor[:, :, start:stop] for name, tensor in inputs.items()}
        read, state = gated_delta_rule(**part, state=state, chunk=4)
        parts.append(read)
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_documents_begin_with_an_empty_state(chunk: int) -> None:
    """Lengths of a chunk, of less, of several; an id that occurs again later is another document."""
    inputs, lengths = drawn(), (3, 1, 4, 9, 4)
    ids = torch.tensor([7, 8, 7, 9, 2]).repeat_interleave(torch.tensor(lengths)).expand(SIZES["B"], -1)
    found, state = gated_delta_rule(**inputs, documents=numbered(ids), chunk=chunk)
    parts = zip(*(tensor.split(lengths, 2) for tensor in inputs.values()), strict=True)
    alone = [recurrence(*part, state=zeros()) for part in parts]
    torch.testing.assert_close(found, torch.cat([read for read, _ in alone], 2), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, alone[-1][1], rtol=1e-10, atol=1e-12)
