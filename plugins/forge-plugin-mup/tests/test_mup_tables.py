"""Factors of each role against the papers' tables, by optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from forge_plugin_adamw import AdamW
from forge_plugin_lion import Lion
from forge_plugin_muon import Muon
from forge_plugin_mup.mup import divided
from forge_plugin_mup.shapes import Place
from forge_plugin_mup.tables import Factors, factors

M, L = 4, 8
"""Width and depth, relative to the base."""
HIDDEN = Place("matrix", 64 * M, 16 * M, 64, 16, in_block=True)
WRITER = Place("matrix", 16 * M, 64 * M, 16, 64, absorbed=1 / L, in_block=True)
HEAD, ROUTER = Place("head", 100, 16 * M, 100, 16), Place("router", 8, 16 * M, 8, 16, in_block=True)
EMBEDDING, LAST_NORM = Place("embedding", 16 * M, 1, 16, 1), Place("norm", 16 * M, 1, 16, 1)
NORM, HEAD_NORM = Place("norm", 16 * M, 1, 16, 1, in_block=True), Place("norm", 8, 1, 8, 1, in_block=True)


@pytest.mark.parametrize(
    ("place", "rate", "epsilon", "initial"),
    [
        # Table 8 of Yang et al.; a head without a factor on logits has 1 / m on both (table 3)
        (EMBEDDING, 1, 1 / M, 1),
        (HIDDEN, 1 / M, 1 / M / L, M**-0.5),
        (HEAD, 1 / M, 1, 1 / M),
        # Table 1 of Dey et al., alpha = 1; a writer has absorbed 1 / L
        (WRITER, 1 / M / L, 1 / M, M**-0.5 / L),
        (NORM, 1, 1 / M / L, 1),
        (LAST_NORM, 1, 1 / M, 1),
        # The gain of one head is that of all heads, whose gradients add up
        (HEAD_NORM, 1, 1 / L, 1),
        (ROUTER, 1 / M, 1 / L, 1 / M),
    ],
)
def test_adamw_has_the_factors_of_complete_p(place: Place, rate: float, epsilon: float, initial: float) -> None:
    for optimizer in (AdamW(), Lion()):  # the elements of both move by about the rate
        found = factors(place, optimizer.update_size, L, "complete_p")
        assert found == Factors(
            rate=pytest.approx(rate),
            decay=pytest.approx(1 / rate),
            epsilon=pytest.approx(epsilon),
            initial=pytest.approx(initial),
        )


def test_mup_leaves_epsilon_as_it_is() -> None:
    for place in (EMBEDDING, HIDDEN, HEAD, NORM):
        assert factors(place, AdamW().update_size, 1, "mup").epsilon == 1


@pytest.mark.parametrize("place", [HIDDEN, Place("matrix", 16 * M, 64 * M, 16, 64), Place("stack", 24, 16 * M, 24, 16)])
@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
def test_updates_of_muon_keep_the_norm_of_the_spectral_condition(place: Place, scaling: Any) -> None:
    """Rate x scale is sqrt(outputs / inputs) times what it is in the base (Yang et al. 2023, condition 1)."""
    muon = Muon(scaling=scaling)

    def norm(outputs: int, inputs: int) -> float:
        longer = max(outputs, inputs)
        scale = max(1, outputs / inputs) ** 0.5 if scaling == "original" else 0.2 * longer**0.5
        return scale / (outputs / inputs) ** 0.5

    rate = factors(place, muon.update_size, 1, "mup").rate
    here, base = norm(place.outputs, place.inputs), norm(place.base_outputs, place.base_inputs)
    assert rate * here == pytest.approx(base)
    if place.output_ratio == place.input_ratio:  # the widely used consequences
        assert rate == pytest.approx(1 if scaling == "original" else M**-0.5)
    assert factors(HEAD, muon.update_size, 1, "mup").rate == pytest.approx(1 / M)  # by AdamW


def test_every_rank_of_a_pipeline_has_the_same_groups() -> None:
    """Also those of which it holds no parameter; the first has the rate as written, which is the one that is logged.

    Factors that the group had before, such as those of the batch, are kept in what its tables are multiplied by.
    """
    wanted = {"a": Factors(), "b": Factors(rate=0.5, decay=2.0, epsilon=0.25)}
    group = {"params": [1], "names": ["b"], "lr": 1.0, "weight_decay": 0.1, "eps": 1e-8, "betas": (0.9, 0.95)}
    before = {"lr": 3.0, "weight_decay": 1.0, "eps": 1.0}
    rest = {"betas": (0.9, 0.95)}
    unchanged = {"lr": 1.0, "weight_decay": 0.1, "eps": 1e-8, "factors": before}
    scaled = {"lr": 0.5, "weight_decay": 0.2, "eps": 0.25e-8}
    assert list(divided(group | {"factors": before}, wanted)) == [
        {"params": [], "names": [], **unchanged, **rest},
        {
            "params": [1],
            "names": ["b"],
            **scaled,
            "factors": {"lr": 1.5, "weight_decay": 2.0, "eps": 0.25},
            **rest,
        },
    ]
