"""An adapter that a stranger writes in one file, the example of docs/how-to/lora.md: exact under every layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.engine.trainer import Trainer
from forge_kit.nn.adapters import adapter_names, adapters_off, merge_adapters
from forge_kit.tools.trained_model import load_model
from forge_plugin_checkpoints import Parts
from forge_plugin_lora import LoRA
from forge_plugin_moe import MoE
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, curves, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, same_curve
from forge_testing.laws import Case, layout_law
from forge_testing.refusals import at, check_problems, problems_of

sys.path.append(str(Path(__file__).parents[3] / "docs" / "examples"))

IA3 = import_module("ia3").IA3

MODEL = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2))


def job(folder: Path, changes: Mapping[str, Any]) -> Any:
    settings: dict[str, Any] = {"steps": 4, "precision": "fp64", "global_batch_size": 8, "seq_len": 16}
    data = {"sources": (Numbers(ignored=3),)}
    return tiny_job(str(folder), installed(), data=data, **{"model": MODEL, **settings, **changes})


def observe(folder: Path, changes: Mapping[str, Any]) -> Curve:
    return curves.train(job(folder, {"plugins": {"ia3": IA3()}, **changes}), installed())


def same_training(ranks: Sequence[Curve], alone: Curve) -> None:
    """Factors have moved, and nothing else has by a bit; all as in one process."""
    moved = {name for name, weight in alone.weights.items() if not weight.equal(alone.initial[name])}
    assert moved == {name for name in alone.weights if "ia3" in name}
    same_curve(ranks, alone)


test_layouts = layout_law(
    Case("ia3", observe=observe, compare=same_training, layouts=("fsdp2", "tp2", "pp2", "cp2", "traced"))
)


def test_a_checkpoint_has_the_factors_alone_and_the_merged_model_is_the_same(tmp_path: Path) -> None:
    base = Trainer(job(tmp_path / "base", {"steps": 2}), catalog=installed(), echo=lambda text: None).run()
    load = {"checkpoint": {"load": Parts(path=str(base.folder))}}
    adapted = job(tmp_path / "adapted", {"plugins": {"ia3": IA3()}, **load})
    run = Trainer(adapted, catalog=installed(), echo=lambda text: None).run()
    written = json.loads((run.folder / "checkpoints/step-4/index.json").read_text())
    saved = {name for name in written if name.startswith("model.")}
    assert saved == {f"model.{name}" for name in adapter_names(load_model(run.folder).model)}
    model, plain = load_model(run.folder).model, load_model(base.folder).model
    ids = torch.arange(16).view(1, 16)
    batch = {"input_ids": ids, "positions": ids}
    with adapters_off(model):
        assert model(dict(batch)).equal(plain(dict(batch)))
    after = model(dict(batch))
    assert not after.equal(plain(dict(batch)))
    plain.load_state_dict({**plain.state_dict(), **merge_adapters(model)})
    torch.testing.assert_close(plain(dict(batch)), after)


LORA = LoRA(rank=2, random_base=True)
LORA_ON_O = LoRA(rank=2, random_base=True, targets=("o",))


@pytest.mark.parametrize(
    ("plugins", "table"),
    [
        ({"ia3": IA3(), "lora": LORA}, "plugins"),
        ({"lora": LORA, "ia3": IA3()}, "plugins.lora"),
        ({"lora": LORA_ON_O, "ia3": IA3()}, "plugins.lora"),  # other matrices: each would still freeze the other's
        ({"ia3": IA3(), "lora": LORA_ON_O}, "plugins"),
        ({"lora": LORA, "more": LORA_ON_O}, "plugins.lora"),
        ({"ia3": IA3(), "more": IA3(targets=("*.o",))}, "plugins"),
    ],
)
def test_adapters_of_two_plugins_are_refused(tmp_path: Path, plugins: Mapping[str, Any], table: str) -> None:
    check_problems(problems_of(job(tmp_path, {"plugins": plugins})), at(table, "adapters of another plugin"))


@pytest.mark.parametrize(
    ("targets", "words"),
    [(("*.experts.up",), "layers.0.ffn.experts.up"), (("embedding",), "embedding"), (("*.nothing",), "nothing")],
)
def test_what_is_no_linear_layer_is_refused(tmp_path: Path, targets: tuple[str, ...], words: str) -> None:
    model = Transformer(vocab_size=32, dim=16, layers=1, attention=GroupedQueryAttention(heads=4), ffn=MoE(experts=2))
    problems = problems_of(job(tmp_path, {"model": model, "plugins": {"ia3": IA3(targets=targets)}}))
    check_problems(problems, at("plugins.ia3.targets", words))
