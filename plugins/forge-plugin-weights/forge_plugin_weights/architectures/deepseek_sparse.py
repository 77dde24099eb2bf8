"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention, whose keys an indexer chooses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_plugin_weights.architectures.deepseek import (
    FIRST_DENSE,
    LATENT_ATTENTION,
    LAYER,
    NOPE,
    ROTATED,
    TRAINING_ONLY,
    DeepSeekV3,
    DenseLayers,
    Predictions,
    ValueWidth,
    layer_rules,
    moe_fields,
    with_predictions,
)
from forge_plugin_weights.architectures.dense import shape_fields
from forge_plugin_weights.fields import Dropout, Fixed, Key, Only, Rope, setting
from forge_plugin_weights.kinds import Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import depth
from forge_plugin_weights.rules import Same

INDEXER: Mapping[str, str] = {"q": "wq_b", "k": "wk", "k_norm": "k_norm", "weights": "weights_proj"}
"""Modules of the indexer, by our names."""
INDEXER_RULES: Sequence[Rule] = [
    Same(f"layers.{{layer}}.attention.indexer.{ours}.{{tensor}}", f"{LAYER}.self_attn.indexer.{theirs}.{{tensor}}")
    for ours, theirs in INDEXER.items()
]


@frozen
class EveryLayer(Field):
    """A list with the same entry for each layer."""

    theirs: str
    entry: str
    why: str
    """The option that is missing for others."""

    @property
    def keys(self) -> Collection[str]:
        return (self.theirs,)

    def read(self, config: Config) -> Flat:
        """Reads nothing; raises `Unsupported` for another list."""
        entries = config.get(self.theirs)
        if entries is not None and list(entries) != [self.entry] * depth(config):
            other = next((entry for entry in entries if entry != self.entry), f"{len(entries)} entries")
            raise Unsupported(f"{self.theirs} has {other!r}; {self.why}")
        return {}

    def write(self, model: Flat) -> Config:
        return {self.theirs: [self.entry] * setting(model, "layers")}


@frozen
class QueryLatent(Key):
    """The width of the latent of queries, without which these classes have no indexer."""

    def read(self, config: Config) -> Flat:
        """Reads the width; raises `Unsupported` for null."""
        width = config.get(self.theirs, self.default)
        if not width:
            raise Unsupported(f"{self.theirs} = {width!r}; the indexer's queries are made of that latent")
        return super().read(config)

    def write(self, model: Flat) -> Config:
        """Writes the width; raises `Unsupported` for a model without that latent."""
        if not setting(model, "attention.q_lora_rank"):
            raise Unsupported("attention.q_lora_rank = 0; the indexer's queries are made of that latent there")
        return super().write(model)


@frozen(kw_only=True)
class DeepSeekV32(DeepSeekV3):
    """DeepSeek-V3.2-Exp and V3.2 (DeepSeek-AI 2025)."""

    name = "DeepseekV32ForCausalLM"
    training_only = (*TRAINING_ONLY, "attention.index_loss_weight")
    query_latent: ClassVar[int] = 1536
    index_heads: ClassVar[int] = 64
    interleaved: ClassVar[bool] = False
    """Whether the indexer rotates neighbouring dimensions together, as the attention does."""
    experts: ClassVar[Mapping[str, Any]] = {}
    """Defaults of `moe_fields`."""
    eps: ClassVar[float] = 1e-6

    def fields(self) -> Sequence[Field]:
        """Returns the keys of latent attention and its indexer, of experts and of multi-token prediction."""
        return (
            *shape_fields(),
            Fixed(
                {
                    "attention.type": "forge-plugin-mla/dsa",
                    "attention.rope_interleave": True,
                    "attention.index_rope_interleave": self.interleaved,
                    "attention.dense_warmup": False,
                    "attention.norm_eps": 1e-6,  # the norms of latents ignore `rms_norm_eps`
                    "ffn.every": 1,
                }
            ),
            Key("num_attention_heads", "attention.heads"),
            QueryLatent("q_lora_rank", "attention.q_lora_rank", self.query_latent),
            *(Key(name, f"attention.{name}") for name in ("kv_lora_rank", NOPE, ROTATED)),
            ValueWidth("v_head_dim", "attention.v_head_dim"),
            Key("index_n_heads", "attention.index_n_heads", self.index_heads),
            Key("index_head_dim", "attention.index_head_dim", 128),
            Key("index_topk", "attention.index_topk", 2048),
            Only("rope_interleave", True, "neighbouring dimensions are rotated together in this class"),
            Only(
                "indexer_rope_interleave",
                self.interleaved,
                f"in this class it is {str(self.interleaved).lower()} always",
            ),
            EveryLayer("layer_types", "indexed_attention", "every layer has sparse attention"),
            Only("attention_bias", False, "dsa has no biases"),
            Only("mlp_bias", False, "experts and dense layers have no biases"),
            Dropout("attention_dropout"),
            Rope(),
            *(field for field in moe_fields(**self.experts) if FIRST_DENSE not in field.keys),
            DenseLayers(default=3),
            Only("moe_layer_freq", 1, "all layers behind the dense ones have experts"),
            Only("scoring_func", "sigmoid", "the router is sigmoid_topk"),
            Only("topk_method", "noaux_tc", "groups are chosen by their two largest scores"),
            Key("rms_norm_eps", "norm.eps", self.eps),
            Predictions(),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; a block of multi-token prediction is a further layer there, with an indexer too."""
        return with_predictions(model, layer_rules([*LATENT_ATTENTION, *INDEXER_RULES]))


@frozen(kw_only=True)
class GlmMoeDsa(DeepSeekV32):
    """GLM-5; models whose layers share an indexer's choice, such as GLM-5.2, are refused."""

    name = "GlmMoeDsaForCausalLM"
    # Without shared choices, the layer from which they would begin means nothing.
    harmless = (*DeepSeekV32.harmless, "index_skip_topk_offset")
    query_latent = 2048
    index_heads = 32
    interleaved = True
    experts: ClassVar[Mapping[str, Any]] = {"groups": 1, "top_groups": 1}
    eps = 1e-5

    def fields(self) -> Sequence[Field]:
        """Adds the keys by which layers take the choice of an earlier one."""
        why = "each layer has its own indexer"
        return (
            *super().fields(),
            EveryLayer("indexer_types", "full", why),
            Only("index_topk_freq", 1, why, write_it=False),
            Only("index_topk_pattern", None, why, write_it=False),
        )
