"""Qwen3.5 and Qwen3.6, dense and with experts: layers as Qwen3-Next's, with a tower for images and videos."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from forge_plugin_weights.architectures.dense import ENDS, FFN, NORMS, swiglu_fields, tied_head
from forge_plugin_weights.architectures.experts import BALANCE, expert_rules, router_fields
from forge_plugin_weights.architectures.qwen3_next import (
    OURS,
    SHARED_EXPERT,
    THEIRS,
    attention_rules,
    hybrid_fields,
    shared_expert_rules,
)
from forge_plugin_weights.architectures.qwen_vl import DEEPSTACK, SECTIONS, TURNS, Qwen3Vision, Qwen3VL, SpatialRope
from forge_plugin_weights.architectures.vision_towers import Tower
from forge_plugin_weights.composites import LANGUAGE, LanguageTable
from forge_plugin_weights.fields import Fixed, Irrelevant, Only, Rope
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Shapes
from forge_plugin_weights.rules import Rows, Same, StackedRows

PREDICTIONS = ("mtp.*",)
"""Patterns of the tensors of blocks of multi-token prediction, which the classes of `transformers` do not read."""
CHUNK = "attention.chunk"
OF_PREDICTIONS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
PER_EXPERT = "mlp.experts.0.gate_proj.weight"
"""End of a name that files have in which each expert is separate."""


def projections_apart(_: Flat) -> Sequence[Rule]:
    """Returns the rules of Gated DeltaNet's projections: one matrix for queries, keys and values, and three others."""
    alike = {"gate": "in_proj_z", "beta": "in_proj_b", "step": "in_proj_a"}
    return (
        Rows([f"{OURS}.{name}.weight" for name in "qkv"], f"{THEIRS}.in_proj_qkv.weight"),
        *(Same(f"{OURS}.{ours}.weight", f"{THEIRS}.{theirs}.weight") for ours, theirs in alike.items()),
    )


@frozen(kw_only=True)
class RopeOfText(Rope):
    """A plain encoding: how many pairs turn with row and column changes nothing for texts."""

    def read(self, config: Config) -> Flat:
        """Reads the encoding without the keys of frame, row and column."""
        tables = {
            key: {name: value for name, value in config[key].items() if name not in (SECTIONS, TURNS)}
            for key in ("rope_scaling", "rope_parameters")
            if config.get(key)
        }
        return super().read({**config, **tables})


@frozen(kw_only=True)
class Qwen35Text(ArchitectureComponent):
    """The language model of Qwen3.5: Qwen3-Next without experts, whose projections are apart."""

    name = "Qwen3_5ForCausalLM"
    # The state is in float32 always, and blocks of multi-token prediction are left out.
    harmless: ClassVar[Collection[str]] = ("mamba_ssm_dtype", *OF_PREDICTIONS)
    training_only: ClassVar[Collection[str]] = (CHUNK,)
    left_out = (*ArchitectureComponent.left_out, *PREDICTIONS)
    defaults: ClassVar[Config] = {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    rope: ClassVar[Rope] = RopeOfText(share=0.25)
    of_rope: ClassVar[Flat] = {}
    """Settings of the position encoding that no key gives."""

    def fields(self) -> Sequence[Field]:
        """Returns the keys of attention and of a dense feed-forward part in every layer."""
        return *self.shared(kv_heads=4), *swiglu_fields()

    def shared(self, kv_heads: int) -> Sequence[Field]:
        """Returns the keys that models with experts have, too."""
        return (
            *hybrid_fields(self.rope, kv_heads=kv_heads, of_rope=self.of_rope),
            Only("attn_output_gate", True, "a gate is behind attention always", write_it=False),
            Only("output_gate_type", "swish", "the gate of Gated DeltaNet is silu", also=("silu",), write_it=False),
            Only("mlp_only_layers", [], "feed-forward parts of all layers are alike", write_it=False),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of layers of both kinds."""
        return (*ENDS, *NORMS, *attention_rules(model, projections_apart), *FFN, *tied_head(model))


@frozen(kw_only=True)
class Qwen35MoEText(Qwen35Text):
    """The language model of Qwen3.5 with experts, and a shared one behind a gate, in every layer."""

    name = "Qwen3_5MoeForCausalLM"
    seldom = True  # its models are Qwen3-Next's, too
    harmless = (*Qwen35Text.harmless, "output_router_logits", "router_aux_loss_coef")
    training_only = (*Qwen35Text.training_only, *BALANCE)
    defaults: ClassVar[Config] = {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }

    def fields(self) -> Sequence[Field]:
        """Returns the keys of attention and of experts, whose weights add up to 1."""
        return (
            *self.shared(kv_heads=2),
            *router_fields(normalised=True),
            Irrelevant("ffn.dense.hidden", 0, {"ffn.first_dense": 0, "ffn.every": 1}),  # no layer is dense
            *SHARED_EXPERT,
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of published files, in which all experts of a layer are one tensor."""
        layer = "model.layers.{layer}.mlp"
        attention = attention_rules(model, projections_apart)
        return (*ENDS, *NORMS, *attention, *shared_expert_rules(layer), *self.experts(layer), *tied_head(model))

    def experts(self, layer: str) -> Sequence[Rule]:
        """Returns the rules of routed experts below the name of their layer's part."""
        ours = "layers.{layer}.ffn.experts"
        return (
            StackedRows([f"{ours}.{name}.weight" for name in ("gate", "up")], f"{layer}.experts.gate_up_proj"),
            Same(f"{ours}.down.weight", f"{layer}.experts.down_proj"),
        )

    def of_files(self, shapes: Shapes) -> ArchitectureComponent:
        """Returns another class for files that have experts apart, as `transformers` and FP8 releases write them."""
        return Qwen35MoETextApart() if any(name.endswith(PER_EXPERT) for name in shapes) else self


@frozen(kw_only=True)
class Qwen35MoETextApart(Qwen35MoEText):
    """The same, of files in which each matrix of an expert is a tensor."""

    def experts(self, layer: str) -> Sequence[Rule]:
        return expert_rules(layer)


# --- with images -------------------------------------------------------------------------------------------------

SPATIAL = SpatialRope(share=0.25, sections=(11, 11, 10), interleaved=True)
APART: Flat = {"attention.rope.time": "apart"}


@frozen(kw_only=True)
class Qwen35SpatialText(Qwen35Text):
    """The language model inside of Qwen3.5, which encodes rows and columns of images."""

    name = "Qwen3_5TextModel"
    rope = SPATIAL
    of_rope = APART


@frozen(kw_only=True)
class Qwen35SpatialMoEText(Qwen35MoEText):
    """The same, with experts."""

    name = "Qwen3_5MoeTextModel"
    rope = SPATIAL
    of_rope = APART


@frozen(kw_only=True)
class Qwen35SpatialMoETextApart(Qwen35MoETextApart):
    """The same, of files in which each matrix of an expert is a tensor."""

    name = "Qwen3_5MoeTextModel"
    rope = SPATIAL
    of_rope = APART


@frozen(kw_only=True)
class Qwen35Vision(Qwen3Vision):
    """The tower of Qwen3.5: that of Qwen3-VL without DeepStack."""

    name = "Qwen3_5VisionModel"

    def deepstack(self) -> Sequence[Field]:
        """Returns the key of published files, which is an empty list."""
        key = "deepstack_visual_indexes"
        return Fixed({DEEPSTACK: []}), Only(key, [], "features of one block alone are read", write_it=False)


@frozen(kw_only=True)
class Qwen35(Qwen3VL):
    """Qwen3.5 and Qwen3.6 (Qwen team 2026), 0.8B to 27B."""

    name = "Qwen3_5ForConditionalGeneration"
    left_out = (*Qwen3VL.left_out, *PREDICTIONS)
    training_only = (*Qwen3VL.training_only, f"{LANGUAGE}{CHUNK}")
    language = LanguageTable(default="qwen3_5_text", only=Qwen35SpatialText())
    towers: ClassVar[Mapping[str, Tower]] = {name: Qwen35Vision() for name in ("qwen3_5_vision", "qwen3_5")}

    def fields(self) -> Sequence[Field]:
        """Returns the tables; a key of published files says that there is a tower."""
        return *super().fields(), Only("language_model_only", False, "there is a tower always", write_it=False)


@frozen(kw_only=True)
class Qwen35MoE(Qwen35):
    """Qwen3.5 and Qwen3.6 with experts, 35B-A3B to 397B-A17B."""

    name = "Qwen3_5MoeForConditionalGeneration"
    training_only = (*Qwen35.training_only, *(f"{LANGUAGE}{pattern}" for pattern in BALANCE))
    language = LanguageTable(default="qwen3_5_moe_text", only=Qwen35SpatialMoEText())
    towers: ClassVar[Mapping[str, Tower]] = {name: Qwen35Vision() for name in ("qwen3_5_moe_vision", "qwen3_5_moe")}

    def of_files(self, shapes: Shapes) -> ArchitectureComponent:
        """Returns another class for files that have experts apart, as `transformers` and FP8 releases write them."""
        return Qwen35MoEApart() if any(name.endswith(PER_EXPERT) for name in shapes) else self


@frozen(kw_only=True)
class Qwen35MoEApart(Qwen35MoE):
    """The same, of files in which each matrix of an expert is a tensor."""

    language = LanguageTable(default="qwen3_5_moe_text", only=Qwen35SpatialMoETextApart())
