"""phi-1, phi-1.5 and phi-2: blocks with one norm. Phi-3 to Phi-4: fused projections, and positions by LongRoPE."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from forge_plugin_weights.architectures.dense import (
    ENDS,
    NORMS,
    attention_fields,
    named_alike,
    renamed,
    shape_fields,
    swiglu_fields,
    tied_head,
)
from forge_plugin_weights.architectures.gpt import gelu
from forge_plugin_weights.fields import LONGEST, ORIGINAL, ROPES, Dropout, Fixed, Key, Only, Rope, RopeType
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import Window
from forge_plugin_weights.rules import Rows, Same

LAYER = "model.layers.{layer}"
# `Phi3Config` takes the last two for the first.
NAMES = ("longrope", "su", "yarn")
"""Names that LongRoPE has in configurations of Phi-3."""


@frozen(kw_only=True)
class Phi(ArchitectureComponent):
    """phi-1, phi-1.5 and phi-2: one norm for both parts of a block, and biases everywhere."""

    name = "PhiForCausalLM"

    def fields(self) -> Sequence[Field]:
        return (
            *shape_fields(norm="layernorm"),
            Fixed({"residual": "parallel", "norm_placement": "shared", "norm.bias": True, "head_bias": True}),
            *attention_fields(rope=Rope(share=0.5)),
            Fixed({"attention.bias": True, "attention.output_bias": True, "attention.qk_norm": False}),
            gelu("hidden_act", "gelu_new"),
            Key("intermediate_size", "ffn.hidden", derived=lambda model: 4 * model["dim"]),
            Key("layer_norm_eps", "norm.eps", 1e-5),
            Only("qk_layernorm", False, "queries and keys are not normalised by a layer norm"),
            *(Dropout(key) for key in ("resid_pdrop", "embd_pdrop")),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; the last norm has another name than in Llama, and the head a bias, tied or not."""
        return (
            # Of the ends, the embedding alone has Llama's name
            ENDS[0],
            Same("norm.{tensor}", "model.final_layernorm.{tensor}"),
            Same("head.{tensor}", "lm_head.{tensor}"),
            *named_alike("attention_norm", "attention.q", "attention.k", "attention.v"),
            *renamed({"attention.o": "self_attn.dense", "ffn.up": "mlp.fc1", "ffn.down": "mlp.fc2"}),
            *tied_head(model),
        )


@frozen
class PhiRope(Rope):
    """The position encoding: the ratio of two keys beside it is the factor of LongRoPE, and one its original length."""

    share: float | None = 1.0
    types: Mapping[str, RopeType] = field(default={name: ROPES[name] for name in ("default", "longrope")}, repr=False)

    @property
    def keys(self) -> Collection[str]:
        return (*super().keys, ORIGINAL)

    def read(self, config: Config) -> Flat:
        """Completes the forms by the factor, which is the ratio of two keys beside them."""
        forms = {key: self._whole(config, key) for key in ("rope_scaling", "rope_parameters")}
        return super().read({**config, **forms})

    def _whole(self, config: Config, key: str) -> Mapping[str, Any]:
        form = config.get(key) or {}
        if form.get("rope_type", form.get("type")) not in NAMES:
            return form
        # The key beside the form has precedence, as in `standardize_rope_params`; 4096 is the default of `Phi3Config`.
        original = config.get(ORIGINAL) or form.get(ORIGINAL) or 4096
        factor = form.get("factor") or config.get(LONGEST, original) / original
        return {**form, "rope_type": "longrope", ORIGINAL: original, "factor": factor}

    def write(self, model: Flat) -> Config:
        """Writes two lengths in place of the factor; raises `Unsupported` if the longer one is not whole."""
        config = dict(super().write(model))
        if config["rope_parameters"]["rope_type"] != "longrope":
            return config
        original, factor = (model[f"{self.path}.{name}"] for name in (ORIGINAL, "factor"))
        longest = round(original * factor)
        if longest / original != factor:
            raise Unsupported(f"{self.path}.factor = {factor!r} times {original} is not a whole number of positions")
        del config["rope_parameters"]["factor"]  # transformers computes it from the lengths
        scaling = {name: config["rope_scaling"][name] for name in ("short_factor", "long_factor")}
        # transformers 4 refuses a fourth key.
        return {**config, "rope_scaling": {"type": "longrope", **scaling}, ORIGINAL: original, LONGEST: longest}


@frozen(kw_only=True)
class Phi3(ArchitectureComponent):
    """Phi-3, Phi-3.5, Phi-4 and Phi-4-mini."""

    name = "Phi3ForCausalLM"

    def fields(self) -> Sequence[Field]:
        absent = ("attention_bias", "mlp_bias", "lm_head_bias")
        return (
            *shape_fields(),
            *attention_fields(rope=PhiRope()),
            Window(),
            *swiglu_fields(),
            Fixed({"attention.bias": False, "ffn.bias": False}),
            *(Only(key, False, "there are no such biases", write_it=False) for key in absent),
            *(Dropout(key) for key in ("resid_pdrop", "embd_pdrop")),
            *(
                Only(key, 1, "its meaning is not known: published models have 1", write_it=False)
                for key in ("full_attn_mod", "interpolate_factor")
            ),
            Key("rms_norm_eps", "norm.eps", 1e-5),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; queries, keys and values are rows of one matrix, and so are gate and up projection."""
        attention = [f"layers.{{layer}}.attention.{ours}.weight" for ours in "qkv"]
        gates = [f"layers.{{layer}}.ffn.{ours}.weight" for ours in ("gate", "up")]
        fused = (
            Rows(attention, f"{LAYER}.self_attn.qkv_proj.weight"),
            Same("layers.{layer}.attention.o.weight", f"{LAYER}.self_attn.o_proj.weight"),
            Rows(gates, f"{LAYER}.mlp.gate_up_proj.weight"),
            Same("layers.{layer}.ffn.down.weight", f"{LAYER}.mlp.down_proj.weight"),
        )
        return (*ENDS, *NORMS, *fused, *tied_head(model))
