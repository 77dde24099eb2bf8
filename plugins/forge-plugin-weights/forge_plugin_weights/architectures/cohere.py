"""Command R, Command R7B, Command A and Aya of Cohere: blocks with one norm, which has no bias, and scaled logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    ENDS,
    FFN,
    all_biases,
    attention_fields,
    named_alike,
    rotated_in_pairs,
    shape_fields,
    swiglu_fields,
    tied_head,
)
from forge_plugin_weights.architectures.glm import QK_EPS, NormEps
from forge_plugin_weights.architectures.olmo import RopeInWindows
from forge_plugin_weights.fields import Choice, Fixed, Key, Only, Rope
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule
from forge_plugin_weights.layer_fields import LayerWindows, every_nth_is_full
from forge_plugin_weights.rules import RotaryColumns

PATTERN = "sliding_window_pattern"


@frozen(kw_only=True)
class WindowsOfSome(LayerWindows):
    """Windows of a class that requires their width, also where no layer has one."""

    def _written(self, width: Any) -> dict[str, Any]:
        return super()._written(width or self.default)


WINDOWS = WindowsOfSome(default=4096, rule=every_nth_is_full(PATTERN, 4), further=(PATTERN,))


def cohere_fields(rope: Rope) -> Sequence[Field]:
    """Returns the keys of both; `rope` is the position encoding."""
    return (
        *shape_fields(tied=True, norm="layernorm"),
        Fixed({"norm.bias": False, "residual": "parallel", "norm_placement": "shared", "ffn.bias": False}),
        *attention_fields(rope=rope),
        all_biases(),
        *swiglu_fields(),
        Key("logit_scale", "logit_scale", 0.0625),
    )


@frozen(kw_only=True)
class Cohere(ArchitectureComponent):
    """Command R and R+, Aya 23 and Aya Expanse."""

    name = "CohereForCausalLM"
    harmless: ClassVar[Sequence[str]] = ("model_max_length",)

    def fields(self) -> Sequence[Field]:
        """Returns the keys; one of them chooses norms of queries and keys."""
        norms: dict[bool, Flat] = {False: {"attention.qk_norm": False}, True: {"attention.qk_norm": "layer"}}
        return (
            *cohere_fields(Rope(theta=500000.0)),
            Choice("use_qk_norm", norms, False),
            NormEps("layer_norm_eps", ("norm.eps", QK_EPS), 1e-5),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; neighbours are rotated together there."""
        gains = (
            RotaryColumns(
                f"layers.{{layer}}.attention.{ours}_norm.weight", f"model.layers.{{layer}}.self_attn.{ours}_norm.weight"
            )
            for ours in "qk"
        )
        return (
            *ENDS,
            *named_alike("attention_norm", "attention.v", "attention.o"),
            *rotated_in_pairs(model["attention.head_dim"]),
            *gains,
            *FFN,
            *tied_head(model),
        )


@frozen(kw_only=True)
class Cohere2(Cohere):
    """Command R7B, Command A and Tiny Aya: three layers of four have a window, the others no encoding of positions."""

    name = "Cohere2ForCausalLM"
    # How programs of the publisher hold a cache and the embeddings.
    harmless: ClassVar[Sequence[str]] = (
        "model_max_length",
        "cache_implementation",
        "layer_switch",
        "use_parallel_embedding",
    )

    def fields(self) -> Sequence[Field]:
        """Returns the keys; the encoding is read by the windows. Some repeat what the class has at all times."""
        always = {
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_gated_activation": True,
            "use_parallel_block": True,
        }
        return (
            *cohere_fields(RopeInWindows(windows=WINDOWS, without_windows=False)),
            Fixed({"attention.qk_norm": False}),
            Key("layer_norm_eps", "norm.eps", 1e-5),
            Only("use_qk_norm", False, "the class has no norms of queries and keys"),
            WINDOWS,
            *(Only(key, value, "the class has it always", write_it=False) for key, value in always.items()),
            Only("use_embedding_sharing", True, "`tie_word_embeddings` ties the head", write_it=False),
        )

    def repeated(self, config: Config) -> Config:
        return {"rotary_pct": 1.0}
