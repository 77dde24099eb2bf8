"""GPT-2 and GPT-NeoX: layer norms, biases, and a feed-forward part of two matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import frozen

from forge_plugin_weights.architectures.dense import TRANSFORMER, all_biases
from forge_plugin_weights.fields import SHARE, Choice, Derived, Dropout, Fixed, Key, Only, Rope
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.rules import Columns, HeadRows, Repeated, Rows, Same, Transposed

BLOCK = "transformer.h.{layer}"
LAYER = "gpt_neox.layers.{layer}"


def gelu(key: str, default: str, *, bias: bool | None = True) -> Field:
    """Returns the key of the activation; the matrices have biases, or for None by another key."""
    biases: Flat = {} if bias is None else {"ffn.bias": bias}
    names = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}
    # Of names that mean the same, an export has the first.
    options: dict[str, Flat] = {
        name: {"ffn.type": f"{TRANSFORMER}/gelu", "ffn.approximate": names[name], **biases}
        for name in sorted(names, key=lambda name: name != default)
    }
    return Choice(key, options, default, "gelu, exact or by its tanh approximation")


def common_fields() -> Sequence[Field]:
    """Returns the settings that no key specifies.

    Layer norms have biases, and heads divide the width, each with its own keys.
    """
    return (
        Fixed({"type": f"{TRANSFORMER}/transformer", "norm.type": f"{TRANSFORMER}/layernorm"}),
        Fixed({"attention.type": f"{TRANSFORMER}/gqa"}),
        Derived("attention.kv_heads", lambda model: model["attention.heads"]),
        Derived("attention.head_dim", lambda model: model["dim"] // model["attention.heads"]),
    )


@frozen(kw_only=True)
class GPT2(ArchitectureComponent):
    """GPT-2: learned positions, and matrices that files hold by columns."""

    name = "GPT2LMHeadModel"
    # The published files have the names of `GPT2Model`, which the class with the head has as `transformer`.
    renames = {r"^(?!transformer\.|lm_head\.)": "transformer."}
    harmless = (
        *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("n_ctx", "task_specific_params", "gradient_checkpointing", "reorder_and_upcast_attn"),
    )
    ignored = ("*.attn.bias", "*.attn.masked_bias")  # causal masks, which old versions saved

    def fields(self) -> Sequence[Field]:
        return (
            *common_fields(),
            Key("n_embd", "dim", 768),
            Key("n_layer", "layers", 12),
            Key("n_head", "attention.heads", 12),
            Key("vocab_size", "vocab_size", 50257),
            Key("n_positions", "learned_positions", 1024),
            # transformers takes it for the key before; an export has both, and they are equal.
            Key("max_position_embeddings", "learned_positions", lambda config: config.get("n_positions", 1024)),
            Key(
                "n_inner",
                "ffn.hidden",
                lambda config: 4 * config.get("n_embd", 768),
                derived=lambda model: 4 * model["dim"],
            ),
            Key("layer_norm_epsilon", "norm.eps", 1e-5),
            Key("tie_word_embeddings", "tie_embeddings", True),
            gelu("activation_function", "gelu_new"),
            Fixed({"attention.bias": True, "attention.rope.type": f"{TRANSFORMER}/none"}),
            *(Dropout(key) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
            Only("scale_attn_weights", True, "scores are divided by the square root of a head's width"),
            Only("scale_attn_by_inverse_layer_idx", False, "all layers have the same factor on scores"),
            Only("add_cross_attention", False, "there is no second sequence"),
        )

    def repeated(self, config: Config) -> Config:
        return {"n_ctx": config["n_positions"]}

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Transposes matrices, which `Conv1D` of `transformers` holds by columns; queries, keys and values are one."""
        ends = {"embedding.weight": "transformer.wte.weight", "positions.weight": "transformer.wpe.weight"}
        norms = {"attention_norm": "ln_1", "ffn_norm": "ln_2"}
        attention, theirs = [f"layers.{{layer}}.attention.{ours}" for ours in "qkv"], f"{BLOCK}.attn.c_attn"
        single = {"attention.o": "attn.c_proj", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}
        head = Repeated("embedding.weight", "lm_head.weight") if model["tie_embeddings"] else SAME_HEAD
        return (
            *(Same(ours, theirs) for ours, theirs in ends.items()),
            Same("norm.{tensor}", "transformer.ln_f.{tensor}"),
            *(Same(f"layers.{{layer}}.{o}.{{tensor}}", f"{BLOCK}.{t}.{{tensor}}") for o, t in norms.items()),
            Columns([f"{name}.weight" for name in attention], f"{theirs}.weight"),
            Rows([f"{name}.bias" for name in attention], f"{theirs}.bias"),
            *(Transposed(f"layers.{{layer}}.{o}.weight", f"{BLOCK}.{t}.weight") for o, t in single.items()),
            *(Same(f"layers.{{layer}}.{o}.bias", f"{BLOCK}.{t}.bias") for o, t in single.items()),
            head,
        )


SAME_HEAD: Rule = Same("head.weight", "lm_head.weight")


@frozen
class NeoXRope(Rope):
    """The position encoding, whose keys have different names; later versions 4 also wrote the usual ones."""

    theta_key: str = "rotary_emb_base"
    share: float | None = 0.25
    share_key: str = "rotary_pct"

    @property
    def aliases(self) -> Mapping[str, str]:
        """Usual names of keys, each with its name in GPT-NeoX."""
        return {"rope_theta": self.theta_key, SHARE: self.share_key}

    @property
    def keys(self) -> Collection[str]:
        """With the usual names, beside which later files have GPT-NeoX's."""
        return (*super().keys, *self.aliases)

    def read(self, config: Config) -> Flat:
        """Reads a key under either name; raises `Unsupported` if both are there and differ."""
        own = dict(config)
        for alias, name in self.aliases.items():
            if alias in config and own.setdefault(name, config[alias]) != config[alias]:
                raise Unsupported(f"{name} = {config[name]!r} and {alias} = {config[alias]!r} disagree")
        return super().read(own)


@frozen(kw_only=True)
class GPTNeoX(ArchitectureComponent):
    """GPT-NeoX and Pythia: attention and feed-forward part side by side, a quarter of each head rotated."""

    name = "GPTNeoXForCausalLM"
    harmless = ("classifier_dropout", "is_decoder", "gradient_checkpointing")
    ignored = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")  # of old versions, likewise

    def fields(self) -> Sequence[Field]:
        residual = {value: {"residual": name} for value, name in ((True, "parallel"), (False, "sequential"))}
        return (
            *common_fields(),
            Key("hidden_size", "dim"),
            Key("num_hidden_layers", "layers"),
            Key("num_attention_heads", "attention.heads"),
            Key("vocab_size", "vocab_size"),
            Key("intermediate_size", "ffn.hidden", derived=lambda model: 4 * model["dim"]),
            Key("layer_norm_eps", "norm.eps", 1e-5),
            Key("tie_word_embeddings", "tie_embeddings", False),
            gelu("hidden_act", "gelu"),
            Choice("use_parallel_residual", residual, True),
            all_biases(True),
            NeoXRope(),
            *(Dropout(key) for key in ("hidden_dropout", "attention_dropout")),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; queries, keys and values are one tensor, head by head, and the head is `embed_out`."""
        modules = {
            "attention_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attention.o": "attention.dense",
            "ffn.up": "mlp.dense_h_to_4h",
            "ffn.down": "mlp.dense_4h_to_h",
        }
        attention = [f"layers.{{layer}}.attention.{ours}.{{tensor}}" for ours in "qkv"]
        head = Repeated("embedding.weight", "embed_out.weight")
        return (
            Same("embedding.weight", "gpt_neox.embed_in.weight"),
            Same("norm.{tensor}", "gpt_neox.final_layer_norm.{tensor}"),
            head if model["tie_embeddings"] else Same("head.weight", "embed_out.weight"),
            *(Same(f"layers.{{layer}}.{o}.{{tensor}}", f"{LAYER}.{t}.{{tensor}}") for o, t in modules.items()),
            HeadRows(attention, f"{LAYER}.attention.query_key_value.{{tensor}}", model["attention.heads"]),
        )
