"""`[checkpoint.load]` compares the settings of the model with those that the weights were trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_plugin_checkpoints.parts import Parts
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_transformer import GEGLU, GroupedQueryAttention, Llama3Rope, PlainRope, RMSNorm, SwiGLU, Transformer
from forge_plugin_vision import VisionLanguage
from forge_testing import tiny_job
from forge_testing.refusals import refuses
from forge_testing.vision import RandomImages, tiny_vision

ATTENTION = GroupedQueryAttention(heads=4, kv_heads=2, rope=PlainRope())
MODEL = Transformer(vocab_size=32, dim=16, layers=2, attention=ATTENTION, ffn=SwiGLU(hidden=16), norm=RMSNorm())
HIDDEN = {
    "attention.rope.theta": {"attention": evolve(ATTENTION, rope=PlainRope(theta=500000.0))},
    "attention.rope.type": {"attention": evolve(ATTENTION, rope=Llama3Rope())},
    "attention.window": {"attention": evolve(ATTENTION, window=4)},
    "attention.scale": {"attention": evolve(ATTENTION, scale=0.125)},
    "attention.soft_cap": {"attention": evolve(ATTENTION, soft_cap=20.0)},
    "attention.heads, attention.kv_heads": {"attention": evolve(ATTENTION, heads=2, kv_heads=1)},
    "ffn.type": {"ffn": GEGLU(hidden=16)},
    "norm.eps": {"norm": RMSNorm(eps=1.0)},
    "norm.offset": {"norm": RMSNorm(offset=1.0)},
    "residual_scale": {"residual_scale": 0.5},
    "logit_scale": {"logit_scale": 0.1},
    "logit_soft_cap": {"logit_soft_cap": 30.0},
}
"""By the keys that differ: models whose weights have the shapes of those of `MODEL`."""


def run(folder: Path, **settings: Any) -> list[str]:
    """Make one step, and return what was printed."""
    printed: list[str] = []
    Trainer(tiny_job(str(folder), Catalog.installed(), steps=1, **settings), echo=printed.append).run()
    return "\n".join(printed).splitlines()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of `MODEL`."""
    folder = tmp_path_factory.mktemp("base")
    run(folder, model=MODEL, job={"name": "base"})
    return str(folder / "base")


@pytest.mark.parametrize("keys", HIDDEN)
def test_a_setting_that_no_shape_shows_is_refused_unless_it_is_accepted(keys: str, base: str, tmp_path: Path) -> None:
    model = evolve(MODEL, **HIDDEN[keys])
    paths = [f"model.{key}" for key in keys.split(", ")]
    listed = ", ".join(f'"{path}"' for path in paths)
    with refuses("checkpoint.load.accept_changes", f"accept_changes = [{listed}]"):
        run(tmp_path, model=model, checkpoint={"load": Parts(path=base)})
    printed = run(tmp_path, model=model, checkpoint={"load": Parts(path=base, accept_changes=tuple(paths))})
    assert [line.split(":")[1].strip() for line in printed if line.startswith("  accepted: ")] == paths


def test_settings_that_weights_do_not_depend_on_may_differ(base: str, tmp_path: Path) -> None:
    model = evolve(MODEL, init_std=0.1, attention=evolve(ATTENTION, documents="mask", head_dim=4))
    assert run(tmp_path, model=model, checkpoint={"load": Parts(path=base)})


def test_settings_of_the_training_alone_may_differ(tmp_path: Path) -> None:
    def experts(**keys: Any) -> Transformer:
        return evolve(MODEL, ffn=MoE(experts=4, hidden=8, router=SigmoidTopK(**keys)))

    run(tmp_path, model=experts(), job={"name": "base"})
    load = Parts(path=str(tmp_path / "base"))
    model = experts(z_loss=0.1, bias_rate=0.1, sequence_balance=0.1)
    assert run(tmp_path, model=model, checkpoint={"load": load})
    with refuses("checkpoint.load.accept_changes", "model.ffn.router.scaling: 1.0 -> 2.5"):
        run(tmp_path, model=experts(scaling=2.5), job={"name": "b"}, checkpoint={"load": load})


def test_a_setting_that_the_names_of_weights_show_is_listed(base: str, tmp_path: Path) -> None:
    printed = run(tmp_path, model=evolve(MODEL, layers=3), checkpoint={"load": Parts(path=base, strict=False)})
    assert [line for line in printed if line.endswith(": model.layers: 2 -> 3")]


def test_a_language_model_is_found_in_a_model_that_sees_images(base: str, tmp_path: Path) -> None:
    def start(language: Transformer, **keys: Any) -> list[str]:
        model = VisionLanguage(language=language, vision=tiny_vision())
        load = Parts(path=base, exclude=("vision.*",), **keys)
        return run(tmp_path, model=model, seq_len=24, data={"sources": (RandomImages(),)}, checkpoint={"load": load})

    with refuses("checkpoint.load.accept_changes", "model.language.norm.eps: 1e-05 -> 1.0"):
        start(evolve(MODEL, norm=RMSNorm(eps=1.0)))
    assert start(MODEL)


def test_a_part_is_compared_alone_where_it_is_loaded_alone(tmp_path: Path) -> None:
    sources = {"seq_len": 24, "data": {"sources": (RandomImages(),)}}
    model = VisionLanguage(language=MODEL, vision=tiny_vision())
    run(tmp_path, model=model, job={"name": "seeing"}, **sources)
    load = Parts(path=str(tmp_path / "seeing"), include=("vision.encoder.*",))
    other = evolve(MODEL, norm=RMSNorm(eps=1.0))
    assert run(tmp_path, model=evolve(model, language=other), checkpoint={"load": load}, **sources)
    vision = evolve(tiny_vision(), encoder=evolve(tiny_vision().encoder, eps=1.0))
    with refuses("checkpoint.load.accept_changes", "model.vision.encoder.eps"):
        run(tmp_path, model=evolve(model, vision=vision), job={"name": "b"}, checkpoint={"load": load}, **sources)
