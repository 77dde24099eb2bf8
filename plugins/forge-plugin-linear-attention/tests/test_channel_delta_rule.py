"""Chunks and blocks give what the recurrence gives, for whole sequences, documents and continued ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_kit.nn.causal_convolution import numbered
from forge_plugin_linear_attention.modules.channel_delta_rule import channel_delta_rule
from forge_plugin_linear_attention.modules.delta_rule import gated_delta_rule

B, H, S, K, V = 2, 2, 75, 4, 3
CLOSE: Any = {"rtol": 1e-10, "atol": 1e-12}


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Equation 1 of the paper, position by position: (B, H, S, V) and the last state."""
    outputs = []
    state = torch.zeros(B, H, K, V, dtype=torch.float64) if state is None else state
    for t in range(q.shape[2]):
        state = log_decay[:, :, t, :, None].exp() * state
        key = k[:, :, t, :, None]
        missing = v[:, :, t, None, :] - key.mT @ state
        state = state + key @ (beta[:, :, t, None, None] * missing)
        outputs.append((q[:, :, t, None, :] @ state)[:, :, 0])
    return torch.stack(outputs, 2), state


def drawn(*, rate: float = 1.0) -> dict[str, Tensor]:
    """Inputs of the rule, in float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(B, H, S, K),
        "k": torch.nn.functional.normalize(normal(B, H, S, K), dim=-1),
        "v": normal(B, H, S, V),
        "log_decay": -rate * normal(B, H, S, K).exp(),
        "beta": normal(B, H, S).sigmoid(),
    }


@pytest.mark.parametrize("chunk", [1, 7, 16, 24, 64, 128])
@pytest.mark.parametrize("rate", [0.02, 1.0, 300.0])
def test_chunks_equal_the_recurrence(chunk: int, rate: float) -> None:
    """From slow decays to such as leave nothing of a state, and whose inverse would overflow."""
    inputs = drawn(rate=rate)
    torch.testing.assert_close(channel_delta_rule(**inputs, chunk=chunk), recurrence(**inputs), **CLOSE)


def test_gradients_equal_those_of_the_recurrence() -> None:
    gradients = []
    for rule in (lambda **x: channel_delta_rule(**x, chunk=32), recurrence):
        inputs = {name: tensor.requires_grad_() for name, tensor in drawn().items()}
        output, state = rule(**inputs)
        (output.sin().sum() + state.cos().sum()).backward()
        gradients.append([tensor.grad for tensor in inputs.values()])
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


def test_gradients_are_numbers_where_nothing_is_left_of_a_state() -> None:
    inputs = {name: tensor.float().requires_grad_() for name, tensor in drawn(rate=300.0).items()}
    channel_delta_rule(**inputs, chunk=64)[0].sum().backward()
    assert all(bool(tensor.grad.isfinite().all()) for tensor in inputs.values() if tensor.grad is not None)


def test_with_one_decay_for_all_features_it_is_gated_deltanet() -> None:
    inputs = drawn()
    inputs["log_decay"] = inputs["log_decay"][..., :1].expand(-1, -1, -1, K)
    one = {**inputs, "log_decay": inputs["log_decay"][..., 0]}
    torch.testing.assert_close(channel_delta_rule(**inputs), gated_delta_rule(**one), **CLOSE)


class Written(TorchDispatchMode):
    """Counts the numbers that operations return."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.numbers += found.numel() if isinstance(found, Tensor) else 0
        return found


def test_forward_and_backward_pass_grow_in_proportion_to_the_length() -> None:
    numbers = []
    for times in (4, 16):
        inputs = {name: x.repeat(1, 1, times, *[1] * (x.ndim - 3)).requires_grad_() for name, x in drawn().items()}
        with Written() as written:
            channel_delta_rule(**inputs, chunk=16)[0].sum().backward()
        numbers.append(written.numbers)
    assert numbers[1] < 4.1 * numbers[0]


def test_a_sequence_continues_from_a_state() -> None:
    inputs = drawn()
    whole = channel_delta_rule(**inputs, chunk=16)
    state, parts = None, []
    for start, stop in ((0, 5), (5, 6), (6, 40), (40, S)):
        part = {name: tensor[:, :, start:stop] for name, tensor in inputs.items()}
        read, state = channel_delta_rule(**part, state=state, chunk=16)
        parts.append(read)
    torch.testing.assert_close((torch.cat(parts, 2), state), whole, **CLOSE)


@pytest.mark.parametrize("chunk", [1, 4, 32, 128])
def test_documents_begin_with_an_empty_state(chunk: int) -> None:
    """Lengths of a chunk, of less, of several; an id that occurs again later is another document."""
    inputs, lengths = drawn(), (3, 1, 36, 31, 4)
    ids = torch.tensor([7, 8, 7, 9, 2]).repeat_interleave(torch.tensor(lengths)).expand(B, -1)
    found, state = channel_delta_rule(**inputs, documents=numbered(ids), chunk=chunk)
    parts = zip(*(tensor.split(lengths, 2) for tensor in inputs.values()), strict=True)
    alone = [recurrence(*part) for part in parts]
    torch.testing.assert_close(found, torch.cat([read for read, _ in alone], 2), **CLOSE)
    torch.testing.assert_close(state, alone[-1][1], **CLOSE)
