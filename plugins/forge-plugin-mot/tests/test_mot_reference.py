"""The model equals the paper's equations, computed position by position with each one's own matrices.

B sequences, S positions, H query heads, E width of a head. Reference: arXiv 2411.04996, algorithm 1, with each norm
before its part (`norm = "before"`), or after it, as the authors' code has it (`norm = "after"`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_vision import VIDEO

HEADS, KV_HEADS, WIDTH = 4, 2, 4
MODALITIES = ("text", "image", "video")


class Reference:
    """The layers of the model, from its parameters by name."""

    def __init__(self, weights: Mapping[str, Tensor], ids: Tensor, fusion: MixtureOfTransformers) -> None:
        self.weights, self.after = weights, fusion.norm == "after"
        untied = {
            "attention": "attention" in fusion.untie,
            "ffn": "ffn" in fusion.untie,
            "norm": "norm" in fusion.untie,
        }
        self.untied = {**untied, "attention_norm": untied["norm"], "ffn_norm": untied["norm"]}
        self.modality = (ids < 0).long() + (ids == VIDEO).long()  # (B, S): place in MODALITIES
        if "video" not in fusion.modalities:
            self.modality[ids == VIDEO] = 0

    def of_each(self, part: str, name: str) -> Tensor:
        """(B, S, …): the parameter of each position's modality."""
        kind, stored = part.rpartition(".")[2], []
        for modality in MODALITIES:
            full = f"{part}.modalities.{modality}.{name}"
            stored.append(self.weights[full if self.untied[kind] and full in self.weights else f"{part}.{name}"])
        return torch.stack(stored)[self.modality]

    def norm(self, part: str, x: Tensor, name: str = "weight", eps: float = 1e-5) -> Tensor:
        weight = self.of_each(part, name)
        weight = weight if x.ndim == 3 else weight.unsqueeze(2)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def linear(self, part: str, name: str, x: Tensor) -> Tensor:
        return torch.einsum("bsoi,bsi->bso", self.of_each(part, f"{name}.weight"), x)

    def attention(self, part: str, x: Tensor) -> Tensor:
        heads = {name: self.linear(part, name, x).unflatten(-1, (-1, WIDTH)) for name in "qkv"}
        q, k = (turned(self.norm(part, heads[name], f"{name}_norm.weight", 1e-6)) for name in "qk")
        k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 2) for tensor in (k, heads["v"]))
        scores = torch.einsum("bshe,bthe->bhst", q, k) / WIDTH**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("bhst,bthe->bshe", scores.softmax(-1), v).flatten(2)
        return self.linear(part, "o", mixed)

    def feed_forward(self, part: str, x: Tensor) -> Tensor:
        gate, up = (self.linear(part, name, x) for name in ("gate", "up"))
        return self.linear(part, "down", gate * gate.sigmoid() * up)

    def layer(self, number: int, x: Tensor) -> Tensor:
        for part, compute in (("attention", self.attention), ("ffn", self.feed_forward)):
            name = f"layers.{number}.{part}"
            if self.after:
                x = x + self.norm(f"{name}_norm", compute(name, x))
            else:
                x = x + compute(name, self.norm(f"{name}_norm", x))
        return x

    def __call__(self, x: Tensor) -> Tensor:
        for number in range(2):
            x = self.layer(number, x)
        return self.norm("norm", x)


def turned(x: Tensor) -> Tensor:
    """Rotates (B, S, heads, E) by positions 0 to S - 1 of the whole sequence, whatever their modality."""
    rates = 10000.0 ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
    angles = torch.arange(x.shape[1]).double()[:, None, None] * rates
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


FUSIONS = {
    "before": MixtureOfTransformers(),
    "after": MixtureOfTransformers(norm="after"),
    "videos too": MixtureOfTransformers(modalities=("image", "video")),
    "videos too, after": MixtureOfTransformers(modalities=("video", "image"), norm="after"),
    "attention": MixtureOfTransformers(untie=("attention",)),
    "ffn": MixtureOfTransformers(untie=("ffn",)),
    "norm": MixtureOfTransformers(untie=("norm",)),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_hidden_states_and_gradients(name: str, make_model: Callable[..., Any], batch: dict[str, Tensor]) -> None:
    model = make_model(FUSIONS[name])
    parameters = dict(model.named_parameters())
    output_weights = torch.randn(4, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    hidden = model(batch)
    gradients = torch.autograd.grad((hidden * output_weights).sum(), parameters.values(), allow_unused=True)
    embedded = model.embed(model.prepare(batch))[0]
    expected = Reference(parameters, batch["input_ids"], FUSIONS[name])(embedded)
    other = torch.autograd.grad((expected * output_weights).sum(), parameters.values(), allow_unused=True)

    torch.testing.assert_close(hidden, expected, atol=1e-10, rtol=0)
    for key, gradient, wanted in zip(parameters, gradients, other, strict=True):
        assert (gradient is None) == (wanted is None), key
        if wanted is not None:
            torch.testing.assert_close(gradient, wanted, atol=1e-9, rtol=0, msg=lambda text, key=key: f"{key}: {text}")


def test_the_reference_is_not_the_fusion_joint(make_model: Callable[..., Any], batch: dict[str, Tensor]) -> None:
    """Modalities differ here: with the text's weights everywhere, hidden states are others."""
    model = make_model()
    parameters = dict(model.named_parameters())
    text = {name: tensor for name, tensor in parameters.items() if "modalities" not in name}
    embedded = model.embed(model.prepare(batch))[0]
    tied = Reference(text, batch["input_ids"], MixtureOfTransformers())(embedded)
    assert (model(batch) - tied).abs().max() > 0.1
