"""Helium and ERNIE 4.5: Llamas that rotate neighbours together, where Llama rotates halves of a head."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    ENDS,
    FFN,
    NORMS,
    attention_fields,
    named_alike,
    rotated_in_pairs,
    shape_fields,
    swiglu_fields,
    tied_head,
)
from forge_plugin_weights.fields import Choice, Derived, Dropout, Fixed, Key, setting, value_of
from forge_plugin_weights.keys_by_layer import PerLayer
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported

BIASES: dict[bool, Flat] = {
    False: {"attention.bias": False, "ffn.bias": False},
    True: {"attention.bias": True, "attention.output_bias": True, "ffn.bias": True},
}
"""Settings of a key by which all matrices have biases, or none."""


def rules_of_neighbours(model: Flat) -> Sequence[Rule]:
    """Returns the rules of Llama, whose rows of queries and keys are in another order."""
    queries_and_keys = rotated_in_pairs(model["attention.head_dim"])
    return (*ENDS, *NORMS, *queries_and_keys, *named_alike("attention.v", "attention.o"), *FFN, *tied_head(model))


@frozen
class HeadsOfTheWidth(Field):
    """`head_dim`, which heads times it has to be the width: the output projection of `HeliumAttention` is square."""

    @property
    def keys(self) -> Collection[str]:
        return ("head_dim",)

    def read(self, config: Config) -> Flat:
        """Raises `Unsupported` for another width of heads."""
        width, heads = config["hidden_size"], config["num_attention_heads"]
        if (given := value_of(config, "head_dim", 128)) * heads != width:
            raise Unsupported(f"head_dim = {given}, but {heads} heads together have hidden_size = {width}")
        return {"attention.head_dim": given}

    def write(self, model: Flat) -> Config:
        """Raises `Unsupported` for another width of heads."""
        given, heads = setting(model, "attention.head_dim"), setting(model, "attention.heads")
        if isinstance(given, PerLayer) or isinstance(heads, PerLayer):  # of a model with attention of several kinds
            raise Unsupported("attention.head_dim and attention.heads are one for all layers")
        if given * heads != setting(model, "dim"):
            raise Unsupported(f"attention.head_dim = {given}, where {heads} heads together have the width dim always")
        return {"head_dim": given}


@frozen(kw_only=True)
class Helium(ArchitectureComponent):
    """Helium 1 2B; the output projection has no bias."""

    name = "HeliumForCausalLM"
    seldom = True
    harmless = ("pretraining_tp",)

    def fields(self) -> Sequence[Field]:
        """Returns the keys; the output projection has no bias."""
        biases: dict[bool, Flat] = {
            False: {"attention.bias": False},
            True: {"attention.bias": True, "attention.output_bias": False},
        }
        return (
            *shape_fields(),
            Fixed({"attention.qk_norm": False}),
            *(field for field in attention_fields(theta=1e5, kv_heads=20) if "head_dim" not in field.keys),
            Derived("attention.head_dim", lambda model: model["dim"] // model["attention.heads"]),
            HeadsOfTheWidth(),
            Choice("attention_bias", biases, False),
            Key("mlp_bias", "ffn.bias", False),
            *swiglu_fields(),
            Key("rms_norm_eps", "norm.eps", 1e-8),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        return rules_of_neighbours(model)


@frozen(kw_only=True)
class Ernie45(ArchitectureComponent):
    """ERNIE 4.5 0.3B, which has no experts."""

    name = "Ernie4_5ForCausalLM"
    seldom = True

    def fields(self) -> Sequence[Field]:
        """Returns the keys; the class has no dropout."""
        return (
            *shape_fields(tied=True),
            Fixed({"attention.qk_norm": False}),
            *(
                field
                for field in attention_fields(theta=5e5, head_dim=128, kv_heads=2)
                if not isinstance(field, Dropout)
            ),
            Choice("use_bias", BIASES, False),
            *swiglu_fields(),
            Key("rms_norm_eps", "norm.eps", 1e-5),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        return rules_of_neighbours(model)
