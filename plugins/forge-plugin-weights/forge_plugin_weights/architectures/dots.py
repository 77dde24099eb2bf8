"""dots.llm1: attention as Qwen3's, experts as DeepSeek-V3's."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from forge_plugin_weights.architectures.deepseek import TRAINING_ONLY, layer_rules, moe_fields
from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    QK_NORM,
    all_biases,
    attention_fields,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.fields import Fixed, Key, Only
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule
from forge_plugin_weights.layer_fields import LayerWindows, depth

NORMED = "norm_topk_prob"


def windows_after(config: Config) -> Sequence[bool]:
    """Returns which layers have a window where no list specifies them: all from a number on."""
    # As `Dots1Config` makes `layer_types`; 62 is its default
    first = config.get("max_window_layers", 62)
    return [layer >= first for layer in range(depth(config))]


@frozen(kw_only=True)
class Dots1(ArchitectureComponent):
    """dots.llm1 142B-A14B."""

    name = "Dots1ForCausalLM"
    # The class has windows by the layers' numbers alone.
    harmless = ("output_router_logits", "pretraining_tp", "ep_size", "aux_loss_alpha", "seq_aux", "use_sliding_window")
    training_only = TRAINING_ONLY

    def fields(self) -> Sequence[Field]:
        """Returns the keys; weights of the chosen experts add up to 1 by a key."""
        experts = moe_fields(first_dense=0, scaling=1.0, groups=1, top_groups=1)
        return (
            *shape_fields(),
            *attention_fields(kv_heads=32),
            LayerWindows(default=4096, rule=windows_after, further=("max_window_layers",)),
            all_biases(),
            Fixed({"attention.qk_norm": True, "ffn.every": 1}),
            *(field for field in experts if NORMED not in field.keys),
            Key(NORMED, "ffn.router.normalise", False),
            Only("scoring_func", "sigmoid", "the router is sigmoid_topk", write_it=False),
            Only("topk_method", "noaux_tc", "groups are chosen by their two largest scores", write_it=False),
            Key("rms_norm_eps", ("norm.eps", "attention.qk_norm_eps"), 1e-6),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        return (*ENDS, *layer_rules([*ATTENTION, *QK_NORM]), *tied_head(model))
