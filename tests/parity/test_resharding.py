"""A run that goes through many layouts, each continuing with the checkpoint of the one before, is one run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from images import FUSIONS
from resharding import (
    DENSE,
    EXPERTS,
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
    Outcome,
    Part,
    compare,
    outcome,
    runs,
    train,
    train_chains,
)

WHOLE_CHAINS = {
    DENSE: [ONE, FSDP4, TP2, PP2, FSDP2_TP2, PP2_ZBV, HSDP, TP2_CP2, ONE],
    EXPERTS: [FSDP4_EP4, ONE, FSDP2_EP2, FSDP4_EP2, FSDP2_PP2_EP2, FSDP2_TP2_EP2, PP2],
    "joint": [FSDP4, PP2, FSDP2_TP2, ONE],
    "cross_attention": [PP2_ZBV, FSDP2_PP2, TP2_CP2],
    "mot": [TP2, FSDP4, PP2],
    "moma": [FSDP2_EP2, FSDP2_PP2_EP2, FSDP2_TP2_EP2],
}
CHAINS = {model: [layout for layout in layouts if runs(layout)] for model, layouts in WHOLE_CHAINS.items()}
ORDINARY = (DENSE, EXPERTS, "mot")
"""Models of which the chain runs every time; the others are thorough."""


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory) -> Callable[[str], tuple[Outcome, Outcome]]:
    """What a model comes to by its chain, and in one process that was not interrupted. All chains of the session run
    together."""
    items = [item for item in request.session.items if item.path == request.path]  # others name their models, too
    models = {item.callspec.params["model"] for item in items if not item.get_closest_marker("skip")}
    chains = {model: layouts for model, layouts in CHAINS.items() if model in models}
    folder = tmp_path_factory.mktemp("chains")
    alone = tmp_path_factory.mktemp("alone")
    for model, layouts in chains.items():
        train(Part(model, alone / model, ONE, len(layouts)))
    train_chains(folder, chains)
    return lambda model: (outcome(folder / model), outcome(alone / model))


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.thorough) for name in CHAINS]
)
def test_a_run_goes_on_exactly_under_every_layout(outcomes, model):
    """All weights with their moments, the router's bias, and what the step before counted.

    Of vision-language models, tower, adapter and what the fusion adds; some sequences have no image.
    """
    chain, alone = outcomes(model)
    difference = compare(chain, alone)
    assert difference.numbers < 1e-9, difference
    assert difference.state < 1e-9, difference
    if model == EXPERTS:
        assert alone[1]["model.layers.1.ffn.experts.up.weight"].shape == (8, 16, 16)
        assert alone[1]["model.layers.1.ffn.router.bias"].abs().max() > 0.005
    if model in FUSIONS:
        assert any(name.startswith("model.vision.encoder.") for name in alone[1])
