"""Chunks of Mamba-2 give what its recurrence gives, for whole sequences, documents and continued ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forge_kit.nn.causal_convolution import numbered
from forge_plugin_linear_attention.modules.ssd import state_space

B, S, G, H, K, P = 2, 21, 2, 6, 4, 5
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def recurrence(x: Tensor, b: Tensor, c: Tensor, step: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 16 of the paper, position by position: (B, S, H, P), and the last state (B, H, K, P)."""
    b, c = (tensor.repeat_interleave(H // G, 2) for tensor in (b, c))
    outputs = []
    for t in range(x.shape[1]):
        decay = (-rate * step[:, t]).exp()
        written = torch.einsum("bh,bhk,bhp->bhkp", step[:, t], b[:, t], x[:, t])
        state = decay[..., None, None] * state + written
        outputs.append(torch.einsum("bhk,bhkp->bhp", c[:, t], state))
    return torch.stack(outputs, 1), state


def drawn(seed: int = 0) -> dict[str, Tensor]:
    """Inputs of the rule, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": normal(B, S, H, P),
        "b": normal(B, S, G, K),
        "c": normal(B, S, G, K),
        "step": normal(B, S, H).exp(),
        "rate": normal(H).exp(),
    }


def zeros() -> Tensor:
    return torch.zeros(B, H, K, P, dtype=torch.float64)


def by_head(state: Tensor) -> Tensor:
    """(B, G, K, R P) -> (B, H, K, P)."""
    return state.unflatten(-1, (-1, P)).transpose(2, 3).flatten(1, 2)


@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
def test_chunks_equal_the_recurrence(chunk: int) -> None:
    inputs = drawn()
    found, state = state_space(**inputs, chunk=chunk)
    expected, last = recurrence(**inputs, state=zeros())
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(by_head(state), last, **CLOSE)


def test_gradients_equal_those_of_the_recurrence() -> None:
    gradients = []
    for of_chunks in (True, False):
        inputs = {name: tensor.requires_grad_() for name, tensor in drawn().items()}
        output, state = state_space(**inputs, chunk=8) if of_chunks else recurrence(**inputs, state=zeros())
        (output.sin().sum() + state.cos().sum()).backward()
        gradients.append([tensor.grad for tensor in inputs.values()])
    torch.testing.assert_close(*gradients, **CLOSE)


def parts_of(inputs: dict[str, Tensor], *lengths: int) -> list[dict[str, Tensor]]:
    """Returns the inputs of parts of the sequences."""
    split = {name: tensor.split(lengths, 1) for name, tensor in inputs.items() if name != "rate"}
    return [{name: parts[i] for name, parts in split.items()} | {"rate": inputs["rate"]} for i in range(len(lengths))]


def test_a_sequence_continues_from_a_state() -> None:
    inputs = drawn()
    whole, last = state_space(**inputs, chunk=4)
    state, outputs = None, []
    for part in parts_of(inputs, 5, 1, 15):
        read, state = state_space(**part, state=state, chunk=4)
        outputs.append(read)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, **CLOSE)
    torch.testing.assert_close(state, last, **CLOSE)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_documents_begin_with_an_empty_state(chunk: int) -> None:
    """Lengths of a chunk, of less, of several; an id that occurs again later is another document."""
    inputs, lengths = drawn(), (3, 1, 4, 9, 4)
    ids = torch.tensor([7, 8, 7, 9, 2]).repeat_interleave(torch.tensor(lengths)).expand(B, -1)
    found, state = state_space(**inputs, documents=numbered(ids), chunk=chunk)
    alone = [recurrence(**part, state=zeros()) for part in parts_of(inputs, *lengths)]
    torch.testing.assert_close(found, torch.cat([read for read, _ in alone], 1), **CLOSE)
    torch.testing.assert_close(by_head(state), alone[-1][1], **CLOSE)
