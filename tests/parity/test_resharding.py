"""A run that goes through many layouts, each continuing with the checkpoint of the one before, is one run."""

from __future__ import annotations

import pytest
from resharding import (
    EXPERTS,
    FSDP2,
    FSDP2_EP2,
    FSDP2_PP2,
    FSDP2_PP2_EP2,
    FSDP2_TP2,
    FSDP2_TP2_EP2,
    FSDP4,
    FSDP4_EP2,
    FSDP4_EP4,
    HSDP,
    ONE,
    PP2,
    PP2_ZBV,
    TP2,
    TP2_CP2,
    TP4,
    compare,
    outcome,
    runs,
    train,
)

WHOLE_CHAIN = [ONE, FSDP4, ONE, TP2, FSDP2, PP2, FSDP2_TP2, PP2_ZBV, FSDP2_PP2, TP4, HSDP, TP2_CP2, ONE]
CHAIN = [layout for layout in WHOLE_CHAIN if runs(layout)]


def test_a_run_goes_on_exactly_under_every_layout(tmp_path):
    train(tmp_path / "one", ONE, len(CHAIN))
    for number, layout in enumerate(CHAIN, 1):
        train(tmp_path / "chain", layout, number)
    difference = compare(outcome(tmp_path / "chain"), outcome(tmp_path / "one"))
    assert difference.numbers < 1e-9, difference
    assert difference.state < 1e-9, difference


WITH_EXPERTS = [FSDP4_EP4, ONE, FSDP4_EP4, FSDP2_EP2, FSDP4_EP2, FSDP2_PP2_EP2, FSDP4_EP4, FSDP2_TP2_EP2, PP2, ONE]


def test_experts_go_on_exactly_under_every_layout(tmp_path):
    """All of them, with their moments, the router's bias, and what the step before counted."""
    train(tmp_path / "one", ONE, len(WITH_EXPERTS), model=EXPERTS)
    for number, layout in enumerate(WITH_EXPERTS, 1):
        train(tmp_path / "chain", layout, number, model=EXPERTS)
    chain, one = outcome(tmp_path / "chain"), outcome(tmp_path / "one")
    difference = compare(chain, one)
    assert difference.numbers < 1e-9, difference
    assert difference.state < 1e-9, difference
    assert one[1]["model.layers.1.ffn.experts.up.weight"].shape == (8, 16, 16)
    assert one[1]["model.layers.1.ffn.router.bias"].abs().max() > 0.005


WITH_IMAGES = {
    "joint": [FSDP4, PP2, FSDP2_TP2, ONE],
    "cross_attention": [PP2_ZBV, FSDP2_PP2, TP2_CP2, HSDP],
    "mot": [TP2, FSDP4, PP2, TP2_CP2],
    "moma": [FSDP2_EP2, FSDP2_PP2_EP2, FSDP2_TP2_EP2, ONE],
}


@pytest.mark.parametrize(
    "fusion", [pytest.param(name, marks=() if name == "mot" else pytest.mark.thorough) for name in WITH_IMAGES]
)
def test_vision_language_models_go_on_exactly_under_every_layout(tmp_path, fusion):
    """Tower, adapter and what the fusion adds, with their moments; some sequences have no image."""
    layouts = [layout for layout in WITH_IMAGES[fusion] if runs(layout)]
    train(tmp_path / "one", ONE, len(layouts), fusion)
    for number, layout in enumerate(layouts, 1):
        train(tmp_path / "chain", layout, number, fusion)
    chain, one = outcome(tmp_path / "chain"), outcome(tmp_path / "one")
    difference = compare(chain, one)
    assert difference.numbers < 1e-9, difference
    assert difference.state < 1e-9, difference
    assert any(name.startswith("model.vision.encoder.") for name in one[1])
