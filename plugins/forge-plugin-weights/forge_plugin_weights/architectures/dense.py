"""Llama, Mistral, Qwen2, Qwen2.5 and Qwen3, and all that publish their weights as one of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from forge_plugin_transformer import huggingface_names
from forge_plugin_transformer.huggingface_names import PARTS
from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.fields import Choice, Dropout, Fixed, Irrelevant, Key, Only, Rope, Synonym
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule
from forge_plugin_weights.layer_fields import LayerWindows, Window, depth
from forge_plugin_weights.rules import Repeated, RotaryRows, Same

TRANSFORMER = "forge-plugin-transformer"


def renamed(modules: Mapping[str, str]) -> Sequence[Rule]:
    """Returns the rules of modules of a layer: theirs by ours, with biases if there are any."""
    return [
        Same(f"layers.{{layer}}.{ours}.{{tensor}}", f"model.layers.{{layer}}.{theirs}.{{tensor}}")
        for ours, theirs in modules.items()
    ]


def named_alike(*modules: str) -> Sequence[Rule]:
    """Returns the rules of modules of a layer, by our names, that are called as in Llama and Qwen3."""
    return renamed({module: PARTS[module] for module in modules})


ENDS: Sequence[Rule] = [Same(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in huggingface_names.ENDS.items()]
ENDS_WITH_BIAS: Sequence[Rule] = (*ENDS[::2], Same("norm.{tensor}", "model.norm.{tensor}"))
"""Ends of models whose last norm has a bias."""
NORMS = named_alike("attention_norm", "ffn_norm")
ATTENTION = named_alike(*(f"attention.{matrix}" for matrix in "qkvo"))
QK_NORM = named_alike("attention.q_norm", "attention.k_norm")
FFN = named_alike("ffn.gate", "ffn.up", "ffn.down")


OF_7B: Config = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
"""Sizes that tables of language models leave out; see `ArchitectureComponent.defaults`."""


def tied_head(model: Flat) -> Sequence[Rule]:
    """Returns the rule by which files may repeat the embedding as the head of a model that ties the two."""
    return [Repeated("embedding.weight", "lm_head.weight")] if model["tie_embeddings"] else []


def shape_fields(*, tied: bool = False, norm: str = "rmsnorm") -> Sequence[Field]:
    """Returns the keys of width, depth, vocabulary and head that all of them have.

    Args:
        tied: the default of the key by which the head is the embedding.
        norm: type of the norms.
    """
    return (
        Fixed({"type": f"{TRANSFORMER}/transformer", "norm.type": f"{TRANSFORMER}/{norm}"}),
        Key("hidden_size", "dim"),
        Key("num_hidden_layers", "layers"),
        Key("vocab_size", "vocab_size"),
        Key("tie_word_embeddings", "tie_embeddings", tied),
    )


def attention_fields(
    *, theta: float = 10000.0, head_dim: object = None, kv_heads: int | None = None, rope: Field | None = None
) -> Sequence[Field]:
    """Returns the keys of grouped-query attention.

    Args:
        theta: base of the position encoding where no key specifies it.
        head_dim: the default of the key; None: the width by heads.
        kv_heads: the value where the key is missing; None, and where the key is null: as many as there are heads.
        rope: the position encoding, where it is not one for all layers.
    """
    by_width = lambda config: config["hidden_size"] // config["num_attention_heads"]  # noqa: E731
    key = "num_key_value_heads"
    return (
        Fixed({"attention.type": f"{TRANSFORMER}/gqa"}),
        Key("num_attention_heads", "attention.heads"),
        Key(
            key,
            "attention.kv_heads",
            # A null means as many as heads, where a missing key has the default of the class.
            default=lambda config: config["num_attention_heads"] if key in config or kv_heads is None else kv_heads,
            derived=lambda model: model["attention.heads"],
        ),
        Key(
            "head_dim",
            "attention.head_dim",
            default=by_width if head_dim is None else head_dim,
            null=by_width,
            derived=lambda model: model["dim"] // model["attention.heads"],
        ),
        # Without biases or norms these keys change nothing, so that models are equal whatever they are.
        Irrelevant("attention.output_bias", True, {"attention.bias": False}),
        Irrelevant("attention.qk_norm_eps", 1e-6, {"attention.qk_norm": False}),
        Synonym("attention.qk_norm", "head", True),
        Dropout("attention_dropout"),
        rope or Rope(theta=theta),
    )


def swiglu_fields(path: str = "ffn") -> Sequence[Field]:
    """Returns the keys of a gated feed-forward part at `path`."""
    return (
        Choice("hidden_act", {"silu": {f"{path}.type": f"{TRANSFORMER}/swiglu"}}, "silu", "swiglu"),
        Key("intermediate_size", f"{path}.hidden", derived=lambda model: default_hidden(model["dim"])),
    )


def rotated_in_pairs(width: int, rotated: int | None = None) -> Sequence[Rule]:
    """Returns the rules of queries and keys where neighbours are rotated together, and not halves of a head.

    Args:
        width: of a head.
        rotated: how much of it is rotated; None: all.
    """
    return [
        RotaryRows(
            f"layers.{{layer}}.attention.{ours}.{{tensor}}",
            f"model.layers.{{layer}}.self_attn.{ours}_proj.{{tensor}}",
            width=width,
            rotated=width if rotated is None else rotated,
        )
        for ours in "qk"
    ]


def dense_fields(
    attention: Sequence[Field],
    *further: Field,
    tied: bool = False,
    eps: float = 1e-6,
    eps_of: str | tuple[str, ...] = "norm.eps",
) -> Sequence[Field]:
    """Returns the keys of a model with a gated feed-forward part in all layers.

    Args:
        attention: the keys of attention; see `attention_fields`.
        further: keys of the family.
        tied: the default of the key by which the head is the embedding.
        eps: added to the variance in norms, where the key is missing.
        eps_of: keys of `[model]` that it stands for; `EPS_OF_ALL` where queries and keys are normalised.
    """
    norms = Key("rms_norm_eps", eps_of, eps)
    return (*shape_fields(tied=tied), *attention, *further, *swiglu_fields(), norms)


EPS_OF_ALL = ("norm.eps", "attention.qk_norm_eps")


def all_biases(default: bool = False) -> Field:
    """Returns the key `attention_bias`: all four projections, or none."""
    settings: dict[bool, Flat] = {
        False: {"attention.bias": False},
        True: {"attention.bias": True, "attention.output_bias": True},
    }
    return Choice("attention_bias", settings, default)


QKV_BIASES: Mapping[bool, Flat] = {
    False: {"attention.bias": False},
    True: {"attention.bias": True, "attention.output_bias": False},
}
"""Settings of a key by which queries, keys and values have biases, or nothing has."""


def late_windows(config: Config) -> Sequence[bool]:
    """Returns which layers of Qwen2 and Qwen3 have a window if no list specifies them: all from a number on."""
    # As `Qwen2Config` makes `layer_types`; 28 is its default
    first = config.get("max_window_layers", 28)
    return [layer >= first for layer in range(depth(config))]


PLAIN = Fixed({"attention.bias": False, "attention.qk_norm": False, "ffn.bias": False})
"""Of a family without keys of biases and of norms in attention."""
QWEN_WINDOWS = LayerWindows(default=4096, switched=True, rule=late_windows, further=("max_window_layers",))


@frozen(kw_only=True)
class Dense(ArchitectureComponent):
    """A base: Llama's matrices by Llama's names, but for what a family has otherwise, one attribute for each part."""

    ends: ClassVar[Sequence[Rule]] = ENDS
    norms: ClassVar[Sequence[Rule]] = NORMS
    qk_norm: ClassVar[Sequence[Rule]] = ()
    ffn: ClassVar[Sequence[Rule]] = FFN

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of all parts, and of a head that is the embedding."""
        return (*self.ends, *self.norms, *ATTENTION, *self.qk_norm, *self.ffn, *tied_head(model))


@frozen(kw_only=True)
class Llama(Dense):
    """Llama 1 to 3.3, and models in its format: SmolLM, SmolLM2, TinyLlama, Yi, DeepSeek's first models."""

    name = "LlamaForCausalLM"
    defaults: ClassVar[Config] = {**OF_7B, "vocab_size": 32000, "intermediate_size": 11008}
    harmless = ("pretraining_tp", "is_llama_config")

    def fields(self) -> Sequence[Field]:
        return dense_fields(
            attention_fields(),
            Only("rope_interleaved", False, "pairs of a rotation are half a head apart", write_it=False),
            all_biases(),
            Key("mlp_bias", "ffn.bias", False),
        )


@frozen(kw_only=True)
class Mistral(Dense):
    """Mistral 7B, Mistral Nemo, Mistral Small."""

    name = "MistralForCausalLM"
    defaults: ClassVar[Config] = {
        **OF_7B,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
    }

    def fields(self) -> Sequence[Field]:
        return dense_fields(attention_fields(kv_heads=8), Window(default=4096))


@frozen(kw_only=True)
class Qwen2(Dense):
    """Qwen2 and Qwen2.5: biases of queries, keys and values."""

    name = "Qwen2ForCausalLM"
    defaults: ClassVar[Config] = {
        **OF_7B,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
    }

    def fields(self) -> Sequence[Field]:
        return dense_fields(
            attention_fields(kv_heads=32),
            QWEN_WINDOWS,
            Only("use_mrope", False, "positions count text only", write_it=False),
            # Always, in `Qwen2Attention`
            Fixed({"attention.bias": True, "attention.output_bias": False}),
        )


@frozen(kw_only=True)
class Qwen3(Dense):
    """Qwen3: queries and keys are normalised per head."""

    name = "Qwen3ForCausalLM"
    qk_norm = QK_NORM

    def fields(self) -> Sequence[Field]:
        return dense_fields(
            # `Qwen3Config` has heads of 128, whatever the width
            attention_fields(head_dim=128, kv_heads=32),
            QWEN_WINDOWS,
            all_biases(),
            Fixed({"attention.qk_norm": True}),  # always, in `Qwen3Attention`
            eps_of=EPS_OF_ALL,
        )
