"""Gathered positions compute what a mask over all of them does; text is untouched. B rows, S positions, M slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from attrs import frozen
from mot_models import LANGUAGE, rows
from torch import Tensor, nn

from forge_plugin_moe import MoE
from forge_plugin_moma import MoMa
from forge_plugin_mot import MixtureOfTransformers
from forge_plugin_mot.modules.routing import Route
from forge_plugin_transformer import GELU, AttentionPattern, FFNComponent, GroupedQueryAttention, LayerNorm
from forge_plugin_vision import GRIDS, IMAGE, PATCHES, Joint
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, same_curve, train
from forge_testing.laws import Case, layout_law
from forge_testing.layouts import LAYOUTS, LayoutCase
from forge_testing.vision import RandomImages

S, M = 9, 4


@pytest.fixture
def members() -> Tensor:
    """(4, S): none, some, M in a row, and M apart."""
    listed = [[], [2, 3], [0, 1, 2, 3], [0, 4, 6, 8]]
    return torch.tensor([[position in row for position in range(S)] for row in listed])


@pytest.mark.parametrize("trailing", [(3,), (2, 3), ()], ids=str)
def test_a_route_equals_a_mask(members: Tensor, trailing: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, own, weights = (torch.randn(4, S, *trailing, dtype=torch.float64, generator=generator) for _ in range(3))
    results = []
    for slots in (M, S):  # with S slots, a route is the mask itself
        leaves = [tensor.clone().requires_grad_() for tensor in (x, own)]
        route = Route.of(members, slots)
        assert route.take(x).shape[1] == slots
        merged = route.put(leaves[1].sin(), route.take(leaves[0]).exp())
        results.append([merged, *torch.autograd.grad((merged * weights).sum(), leaves)])
    mask = members.reshape(4, S, *(1,) * len(trailing))
    assert torch.equal(results[0][0], x.exp().where(mask, own.sin()))
    for routed, masked in zip(*results, strict=True):
        assert torch.equal(routed, masked)


def test_more_positions_than_features_are_an_error(make_model: Callable[..., Any], batch: dict[str, Tensor]) -> None:
    batch["input_ids"][1] = IMAGE
    with pytest.raises(RuntimeError, match="out of bounds"):
        make_model()(batch)


def test_weights_of_a_modality_see_as_many_positions_as_images_have(
    make_model: Callable[..., Any], batch: dict[str, Tensor]
) -> None:
    """S + M positions and not 2 S, whatever the rows contain, and the same numbers as over all S."""
    model = make_model()
    lengths = []
    image = model.layers["0"].ffn.modalities["image"]
    image.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    hidden = model(batch)
    model.slots = batch["input_ids"].shape[1]
    everywhere = model(batch)
    assert lengths == [8, 24]  # two images of 2 x 2 patches
    torch.testing.assert_close(hidden, everywhere, atol=1e-13, rtol=0)


def test_without_images_other_modalities_have_gradients_of_zero(
    make_model: Callable[..., Any], batch: dict[str, Tensor]
) -> None:
    model = make_model()
    model({name: tensor[::2] for name, tensor in batch.items()}).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if "modalities" in name}
    assert len(gradients) == 2 * (4 + 2 + 3 + 2) + 1
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


def test_text_alone_trains_as_the_language_model(bare: Callable[..., Any], batch: dict[str, Tensor]) -> None:
    """Hidden states and gradients of rows without images, to the bit."""
    text = {name: tensor[::2] for name, tensor in batch.items()}
    results = []
    for fusion in (MixtureOfTransformers(), Joint()):
        model = bare(fusion)
        hidden = model(text)
        hidden.square().sum().backward()
        own = {n: p.grad for n, p in model.named_parameters() if "modalities" not in n and p.grad is not None}
        results.append((hidden, own))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1].keys() == results[1][1].keys()
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name


def test_flops_are_those_of_the_fusion_joint(bare: Callable[..., Any]) -> None:
    """Each position is multiplied by the weights of one modality, and all have as many."""
    assert bare(MixtureOfTransformers()).flops(24) == bare(Joint()).flops(24)


def test_decoding_leaves_other_modalities_out_behind_the_prompt(
    make_model: Callable[..., Any], batch: dict[str, Tensor]
) -> None:
    model = make_model().eval()
    called = []
    model.layers["0"].ffn.modalities["image"].register_forward_pre_hook(lambda *args: called.append(True))
    ids, cache = batch["input_ids"], model.new_cache(4, 24)
    hidden = [model.decode({"input_ids": ids[:, :20], PATCHES: batch[PATCHES], GRIDS: batch[GRIDS]}, cache)]
    assert called == [True]
    hidden += [model.decode({"input_ids": ids[:, n : n + 1].clamp(min=0)}, cache) for n in range(20, 24)]
    assert called == [True]
    torch.testing.assert_close(torch.cat(hidden, 1), model(batch), atol=1e-12, rtol=0)


BIASED = {
    "attention": GroupedQueryAttention(heads=4, kv_heads=2, bias=True),
    "ffn": GELU(hidden=24, bias=True),
    "norm": LayerNorm(),
}
SINKING = GroupedQueryAttention(heads=4, kv_heads=2, window=5, sinks=True)
WINDOWS = {
    "attention": AttentionPattern(layers=("near", "full"), kinds={"near": SINKING, "full": BIASED["attention"]}),
}


def observation(fusion: MixtureOfTransformers, **language: Any) -> Callable[[Path, Mapping[str, Any]], Curve]:
    def curve(folder: Path, changes: Mapping[str, Any]) -> Curve:
        return train(tiny_job(str(folder), installed(), **rows(fusion, attrs.evolve(LANGUAGE, **language)), **changes))

    return curve


def case(name: str, parallel: Mapping[str, Any], fusion: MixtureOfTransformers, **language: Any) -> Case:
    layout = LayoutCase(ranks=2, parallel=parallel)
    return Case(name, observe=observation(fusion, **language), compare=same_curve, layouts={"further": layout})


ROUTED = MoE(experts=4, hidden=8, router=MoMa(experts={"text": 2, "image": 2}, sequence_balance=0.01))
test_further_layouts = layout_law(
    case("whole sequences", {"tp": {"degree": 2, "sequence_parallel": False}}, MixtureOfTransformers()),
    case("biased", {"tp": {"degree": 2}}, MixtureOfTransformers(norm="after", modalities=("image", "video")), **BIASED),
    case(
        "experts",
        {"fsdp": {}, "ep": {"degree": 2}, "activation_checkpointing": {}},
        MixtureOfTransformers(norm="after", untie=("attention", "norm")),
        ffn=ROUTED,
    ),
    case("ulysses", {"cp": {"degree": 2, "method": "ulysses"}}, MixtureOfTransformers(untie=("ffn",))),
    case("windows", {"tp": {"degree": 2}}, MixtureOfTransformers(), **WINDOWS),
)


def test_compiled_blocks_have_the_same_curve(tiny_rows: Callable[..., Any], catalog: Any) -> None:
    data = {"sources": (RandomImages(held_out=0),)}
    job = tiny_rows(MixtureOfTransformers(), steps=2, data=data)
    compiled = attrs.evolve(job, parallel=LAYOUTS["traced"].stages(catalog))
    same_curve([train(compiled, catalog)], train(job, catalog))


def test_states_of_every_modality_may_be_wider_than_the_norms(
    tiny_rows: Callable[..., Any], catalog: Any, language: Any
) -> None:
    """Of `head_precision = "fp32"` in bfloat16, where each modality has its own last norm."""
    job = tiny_rows(MixtureOfTransformers(), attrs.evolve(language, head_precision="fp32"), precision="bf16")
    plain = tiny_rows(MixtureOfTransformers(), precision="bf16")
    losses = [train(evolved, catalog).losses for evolved in (job, plain)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


class ByToken(nn.Module):
    """A feed-forward part that depends on the token of each position."""

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        return x * batch["input_ids"].unsqueeze(-1)


@frozen(kw_only=True)
class TokenFactor(FFNComponent):
    def build(self, context: Any, dim: int, init: Any) -> nn.Module:
        return ByToken()


def test_a_feed_forward_part_finds_the_tokens_of_its_positions(
    bare: Callable[..., Any], language: Any, batch: dict[str, Tensor]
) -> None:
    model = bare(MixtureOfTransformers(), attrs.evolve(language, ffn=TokenFactor()))
    seen = model.prepare(batch)
    x = torch.ones(4, 24, 16, dtype=torch.float64)
    factors = batch["input_ids"].unsqueeze(-1).expand_as(x).double()
    assert torch.equal(model.layers["0"].ffn(x, seen), factors)
