"""What `mup` refuses when a job is checked, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import frozen
from torch import nn

from forge_core.contracts.components import OptimizerComponent
from forge_plugin_mup import MuP
from forge_plugin_transformer import GroupedQueryAttention, HyperConnections, RMSNorm, Transformer
from forge_testing import TinyModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.tiny_model import TinyNetwork

MODEL = Transformer(vocab_size=32, dim=32, layers=4, attention=GroupedQueryAttention(heads=4))
ONE_HEAD = {"attention": {"heads": 1}}
BASE = {"dim": 8, "layers": 2, **ONE_HEAD}


@frozen(kw_only=True)
class Unknown(OptimizerComponent):
    """A stranger's optimizer."""

    lr: float = 1e-3


class Silent(TinyNetwork):
    """Its layers draw by `reset_parameters`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for layer in self.layers.values():
            layer.up = nn.Linear(layer.up.in_features, layer.up.out_features, bias=False)


@frozen(kw_only=True)
class SilentModel(TinyModel):
    def build(self, context: Any) -> Any:
        return Silent(self.dim, self.layers, self.dropout, 32, context.dtype)


def qk_normed(**keys: Any) -> GroupedQueryAttention:
    return GroupedQueryAttention(heads=1, qk_norm=True, **keys)


LOGITS = at("plugins.mup.base.logit_scale", "model.logit_scale = 0.25", "base.logit_scale = 1")
REFUSED: Mapping[str, tuple[Any, MuP, list[Any]]] = {
    "no key": (MODEL, MuP(base={}), ["plugins.mup.base"]),
    "unknown key": (MODEL, MuP(base={"width": 8}), [at("plugins.mup.base.width", "dim")]),
    "unknown inner key": (
        MODEL,
        MuP(base={"attention": {"head": 1}}),
        [at("plugins.mup.base.attention.head", "heads")],
    ),
    "another type": (MODEL, MuP(base={"dim": "8"}), [at("plugins.mup.base.dim", "'8'", 32)]),
    "value out of range": (MODEL, MuP(base={"dim": -8}), [at("plugins.mup.base", "'dim'", -8)]),
    "heads of the base": (MODEL, MuP(base={"dim": 10}), [at("plugins.mup.base.attention.heads", 4, 10)]),
    "another part": (
        attrs.evolve(MODEL, laurel_rank=2),
        MuP(base={**BASE, "layers": 4, "laurel_rank": 0}),
        [at("plugins.mup.base", "layers.0.laurel.left.weight")],
    ),
    "depth with mup": (
        MODEL,
        MuP(parametrization="mup", base=BASE),
        [at("plugins.mup.base.layers", 2, 4, "complete_p")],
    ),
    "depth with streams": (
        attrs.evolve(MODEL, residual_connection=HyperConnections()),
        MuP(base=BASE),
        [at("plugins.mup.base", "attention_residual", "HyperConnection")],
    ),
    "depth with offset": (
        attrs.evolve(MODEL, norm=RMSNorm(offset=1), norm_placement="post"),
        MuP(base=BASE),
        [at("plugins.mup.base", "attention_post_norm")],
    ),
    "depth of a stranger": (TinyModel(), MuP(base={"layers": 1}), [at("plugins.mup.base", "TinyNetwork")]),
    "initial values of a stranger": (
        SilentModel(),
        MuP(base={"dim": 8}),
        [at("plugins.mup.base", "Linear", "layers.0.up.weight")],
    ),
    "tied": (attrs.evolve(MODEL, tie_embeddings=True), MuP(base=BASE), [LOGITS]),
    "wider heads without a gain": (
        attrs.evolve(MODEL, attention=qk_normed(qk_norm_gain=False)),
        MuP(base={"dim": 8, "layers": 2}),
        [at("plugins.mup.base.attention", 8, 32)],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_is_refused_by_name(tmp_path: Path, name: str) -> None:
    model, plugin, expected = REFUSED[name]
    check_problems(problems_of(tiny_job(str(tmp_path), installed(), model=model, plugins={"mup": plugin})), *expected)


def test_an_unknown_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    job = tiny_job(str(tmp_path), installed(), model=MODEL, optimizer=Unknown(), plugins={"mup": MuP(base=BASE)})
    check_problems(problems_of(job), at("plugins.mup", "Unknown", "update_size"))


def test_what_has_no_effect_on_the_factors_is_accepted(tmp_path: Path) -> None:
    """A gainless norm with heads as wide as the base's, and tied logits that have their factor."""
    tied = attrs.evolve(MODEL, tie_embeddings=True, logit_scale=0.25)
    normed = attrs.evolve(MODEL, attention=attrs.evolve(qk_normed(qk_norm_gain=False), heads=4))
    for model, base in ((tied, {**BASE, "logit_scale": 1.0}), (normed, BASE)):
        check_problems(problems_of(tiny_job(str(tmp_path), installed(), model=model, plugins={"mup": MuP(base=base)})))
