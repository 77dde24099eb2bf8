"""Hunyuan's dense models: queries and keys are normalised after they are rotated."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    EPS_OF_ALL,
    Dense,
    all_biases,
    attention_fields,
    dense_fields,
    renamed,
)
from forge_plugin_weights.fields import Fixed, Only, Rope, value_of
from forge_plugin_weights.kinds import Config, Field, Flat

ALPHA = "alpha"
ATTN = "model.layers.{layer}.self_attn"
WITHOUT_EFFECT = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Keys that published files have beside `alpha`, which the class does not read then."""


@frozen(kw_only=True)
class AlphaRope(Rope):
    """The position encoding; one of the type `dynamic` with `alpha` is a plain one of a larger base."""

    def read(self, config: Config) -> Flat:
        """Reads a table with `alpha` as a plain encoding."""
        tables = [key for key in ("rope_scaling", "rope_parameters") if (config.get(key) or {}).get(ALPHA)]
        plain = {}
        for key in tables:
            table = {name: value for name, value in config[key].items() if name not in WITHOUT_EFFECT}
            if table.pop("rope_type", table.pop("type", "dynamic")) == "dynamic":
                table.pop("type", None)
                # As `compute_ntk_alpha_rope_parameters` of transformers: only the base changes
                alpha, width = table.pop(ALPHA), self.width(config)
                base = table.get(self.theta_key, value_of(config, self.theta_key, self.theta))
                plain[key] = {**table, "rope_type": "default", self.theta_key: base * alpha ** (width / (width - 2))}
        return super().read({**config, **plain})

    def width(self, config: Config) -> int:
        """Returns the width of a head."""
        return int(value_of(config, "head_dim", lambda each: each["hidden_size"] // each["num_attention_heads"]))


@frozen(kw_only=True)
class HunyuanDense(Dense):
    """Hunyuan 0.5B to 7B, Hunyuan-MT."""

    name = "HunYuanDenseV1ForCausalLM"
    qk_norm = renamed(
        {
            "attention.q_rotated_norm": "self_attn.query_layernorm",
            "attention.k_rotated_norm": "self_attn.key_layernorm",
        }
    )
    # Ids of tokens, and what the class does not read
    harmless = (
        *("pretraining_tp", "eod_token_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "pad_id"),
        *("text_end_id", "image_token_id", "video_start_id", "video_end_id", "mask_init_id", "cla_share_factor"),
        *("attention_head_dim", "org_vocab_size", "add_classification_head", "class_num", "pool_type"),
    )

    def fields(self) -> Sequence[Field]:
        return dense_fields(
            attention_fields(rope=AlphaRope()),
            all_biases(),
            Fixed({"attention.qk_norm": True, "attention.qk_norm_rotated": True, "ffn.bias": False}),
            Only("use_qk_norm", True, "queries and keys are normalised always", write_it=False),
            Only("use_cla", False, "no layer takes the keys of another", write_it=False),
            Only("mlp_bias", False, "feed-forward parts have no biases", write_it=False),
            eps=1e-5,
            eps_of=EPS_OF_ALL,
        )
