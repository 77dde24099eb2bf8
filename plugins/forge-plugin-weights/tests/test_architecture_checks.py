"""The check for authors of architectures finds mistakes in either table."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from attrs import frozen
from published_models import SIZES

from forge_core.contracts.errors import JobError
from forge_plugin_weights.architectures.dense import ATTENTION, ENDS, NORMS, Llama
from forge_plugin_weights.fields import Key
from forge_plugin_weights.rules import Same
from forge_testing.architectures import check_architecture

CONFIG = {**SIZES, "num_hidden_layers": 2, "rms_norm_eps": 0.5}


def exchanged(ours: str, theirs: str) -> Same:
    return Same(f"layers.{{layer}}.ffn.{ours}.weight", f"model.layers.{{layer}}.mlp.{theirs}.weight")


@frozen(kw_only=True)
class Exchanged(Llama):
    """Takes the gate for what it gates."""

    model_type = "llama"

    def rules(self, model):
        ffn = exchanged("gate", "up_proj"), exchanged("up", "gate_proj"), exchanged("down", "down_proj")
        return (*ENDS, *NORMS, *ATTENTION, *ffn)


@frozen(kw_only=True)
class Forgetful(Llama):
    """Has another epsilon than the configuration, and does not know the key."""

    model_type = "llama"
    harmless = (*Llama.harmless, "rms_norm_eps")

    def fields(self):
        return tuple(field for field in super().fields() if "rms_norm_eps" not in field.keys)


@frozen(kw_only=True)
class Unsaid(Llama):
    """Reads a key under the name of another."""

    model_type = "llama"

    def fields(self):
        others = [field for field in super().fields() if "rms_norm_eps" not in field.keys]
        return (*others, Key("epsilon", "norm.eps", 0.5))


@frozen(kw_only=True)
class Untyped(Llama):
    """Exports another class of transformers."""

    model_type = "mistral"
    name = "MistralForCausalLM"


def check(cls: type[Llama], folder: Path) -> None:
    check_architecture(f"{__name__}:{cls.__name__}", transformers.LlamaConfig(**CONFIG), folder)


def test_it_passes_for_an_installed_architecture(tmp_path):
    check_architecture("llama", transformers.LlamaConfig(**CONFIG), tmp_path)


@pytest.mark.parametrize(
    ("cls", "error", "words"),
    [
        (Exchanged, AssertionError, "logits differ by"),
        (Forgetful, AssertionError, "logits differ by"),
        (Unsaid, JobError, "rms_norm_eps: 0.5 is not known"),
        (Untyped, AssertionError, "the export is a MistralForCausalLM"),
    ],
)
def test_it_fails_by_name_for_a_mistake(tmp_path, cls, error, words):
    with pytest.raises(error, match=words):
        check(cls, tmp_path)
