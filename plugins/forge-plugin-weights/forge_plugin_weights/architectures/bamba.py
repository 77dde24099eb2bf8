"""Bamba: Mamba-2 in most layers, attention that rotates half of each head in the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    all_biases,
    attention_fields,
    shape_fields,
    swiglu_fields,
    tied_head,
)
from forge_plugin_weights.architectures.granite_hybrid import MAMBA, MambaLayers, mamba_fields, mixer_rules
from forge_plugin_weights.fields import LONGEST, Dropout, Fixed, Key, Rope
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import depth
from forge_plugin_weights.rules import Same

HALF = 0.5
"""The share of a head that is rotated, in the code of the class."""
INDICES = "attn_layer_indices"
NAMES: Mapping[str, str] = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.final_layernorm.weight",
    "layers.{layer}.attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "layers.{layer}.ffn_norm.weight": "model.layers.{layer}.pre_ff_layernorm.weight",
    **{
        f"layers.{{layer}}.ffn.{name}.{{tensor}}": f"model.layers.{{layer}}.feed_forward.{name}_proj.{{tensor}}"
        for name in ("gate", "up", "down")
    },
}
"""Tensors of all layers and of the ends: ours, theirs."""


@frozen(kw_only=True)
class IndexedLayers(MambaLayers):
    """Mamba-2 in all layers but those whose indices a key lists."""

    @property
    def keys(self) -> Collection[str]:
        return (INDICES, *(key for key in super().keys if key != "layer_types"))

    @property
    def written(self) -> Collection[str]:
        """The list, which a class of `transformers` makes the types of layers of."""
        return (INDICES,)

    def layers(self, config: Config) -> Sequence[bool]:
        """Returns which layers have attention: none without a list."""
        chosen, layers = config.get(INDICES) or (), range(depth(config))
        if unknown := [index for index in chosen if index not in layers]:
            raise Unsupported(f"{INDICES} has {unknown[0]}, where there are {len(layers)} layers")
        return [layer in chosen for layer in layers]

    def write(self, model: Flat) -> Config:
        """Writes the list in the place of types of layers, which the class cannot be given."""
        config = dict(super().write(model))
        types = config.pop("layer_types")
        return {**config, INDICES: [layer for layer, entry in enumerate(types) if entry == "attention"] or None}


@frozen(kw_only=True)
class HalfRope(Rope):
    """The position encoding of a half of each head, unless a table gives another share: a key beside it means none."""

    def read(self, config: Config) -> Flat:
        return super().read({key: value for key, value in config.items() if key != self.share_key})

    def write(self, model: Flat) -> Config:
        """Writes another share into the table of version 5 alone: in version 4, the class has one."""
        config = super().write(model)
        if config[self.share_key] == HALF:
            return config
        return {key: value for key, value in config.items() if key in ("rope_parameters", LONGEST)}


@frozen(kw_only=True)
class Bamba(ArchitectureComponent):
    """Bamba-9B (IBM, Princeton and UIUC, 2024)."""

    name = "BambaForCausalLM"
    # Of training, and of generation; the rotated width is half a head whatever the last one is.
    harmless = ("mamba_chunk_size", "z_loss_coefficient", "num_logits_to_keep", "attn_rotary_emb")
    training_only = ("attention.chunk",)

    def fields(self) -> Sequence[Field]:
        """Returns the keys."""
        gqa = attention_fields(kv_heads=8, rope=HalfRope(share=HALF))
        full = (
            *(each for each in gqa if not isinstance(each, Dropout)),
            Fixed({"attention.qk_norm": False}),
            all_biases(),
        )
        return (
            *shape_fields(),
            IndexedLayers(full=full, linear=mamba_fields(eps=1e-5), component=MAMBA, further=()),
            Dropout("attention_dropout"),
            Key("mlp_bias", "ffn.bias", False),
            *swiglu_fields(),
            Key("rms_norm_eps", "norm.eps", 1e-5),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of layers of both kinds, each for its layers."""
        return (*(Same(ours, theirs) for ours, theirs in NAMES.items()), *mixer_rules(model), *tied_head(model))
