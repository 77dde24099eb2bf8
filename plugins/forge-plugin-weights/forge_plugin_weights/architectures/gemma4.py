"""Gemma 4 without images and sounds: layers without a window have wider heads, whose values may be their keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from attrs import field, frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    EPS_OF_ALL,
    FFN,
    QK_NORM,
    TRANSFORMER,
    all_biases,
    attention_fields,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.architectures.experts import BALANCE, MATRICES, MOE
from forge_plugin_weights.architectures.gemma import ACTIVATIONS, EMBEDDING_SCALE, NORMS
from forge_plugin_weights.fields import (
    REQUIRED,
    ROPES,
    Fixed,
    Irrelevant,
    Key,
    Only,
    OrNone,
    Rope,
    RopeType,
    setting,
    value_of,
)
from forge_plugin_weights.keys_by_layer import merged, of_layers
from forge_plugin_weights.kinds import OTHER, ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.layer_fields import FULL, SLIDING, WINDOW, LayerWindows, depth, every_nth_is_full, windows_of
from forge_plugin_weights.rules import Same, StackedRows

PROPORTIONAL = RopeType(
    component="forge-plugin-transformer/proportional",
    keys=("partial_rotary_factor", "factor"),
    unsaid={"partial_rotary_factor": 1.0, "factor": 1.0},  # of `_compute_proportional_rope_parameters`
)
ENCODING = Rope(types={"default": ROPES["default"], "proportional": PROPORTIONAL})
ENCODINGS: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""`rope_parameters` where the configuration has none."""
WIDTH, KV_HEADS, K_EQ_V = "attention.head_dim", "attention.kv_heads", "attention.k_eq_v"
FFN_WIDTH, TABLE = "ffn.hidden", "per_layer_inputs"
ROUTER, NORM = "ffn.router", "ffn.branch_norm"
OF_EXPERTS: Mapping[str, str] = {
    "num_experts": "ffn.experts",
    "top_k_experts": f"{ROUTER}.top_k",
    "moe_intermediate_size": FFN_WIDTH,
}
MOE_ALWAYS: Flat = {
    "ffn.type": f"{MOE}/moe",
    "ffn.activation": "geglu",
    f"{ROUTER}.type": f"{MOE}/softmax_topk",
    f"{ROUTER}.normalise": "after",
    f"{ROUTER}.input_norm": True,
    f"{ROUTER}.expert_scale": True,
}
"""Settings of a part with experts that no key has."""
UNUSED = ("k_proj", "v_proj", "k_norm")
OF_LAYERS: Mapping[str, str] = {"head_dim": WIDTH, "num_key_value_heads": KV_HEADS}
"""Keys that `per_layer_config` may have for a layer."""


@frozen(kw_only=True)
class WindowsButLast(LayerWindows):
    """`sliding_window`, which the last layer never has, whatever `layer_types` has for it."""

    def layers(self, config: Config) -> Sequence[bool]:
        """Returns which layers have a window; the last has none, as in transformers."""
        return [*super().layers(config)[:-1], False]

    def write(self, model: Flat) -> Config:
        """Writes no width where there is no window: the class takes a number always."""
        if windows_of(model)[-1]:
            raise Unsupported("the last layer has attention.window, and has none there always")
        return {key: value for key, value in super().write(model).items() if value is not None}


@frozen(kw_only=True)
class HeadsByWindow(Field):
    """Widths and numbers of heads, which layers without a window have others of, and whether their values are keys.

    Files as published have keys `global_…` for those layers. `transformers` writes `per_layer_config` instead.
    """

    windows: LayerWindows

    @property
    def keys(self) -> Collection[str]:
        return (*OF_LAYERS, "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config")

    @property
    def written(self) -> Collection[str]:
        """Without what only `transformers` writes, and a number that some models have alone."""
        return (*OF_LAYERS, "global_head_dim", "attention_k_eq_v")

    def read(self, config: Config) -> Flat:
        """Reads the keys of each layer.

        Raises:
            Unsupported: layers with a window differ, or layers without one do, or both spellings disagree.
        """
        shared = bool(value_of(config, "attention_k_eq_v", False))
        near = {WIDTH: value_of(config, "head_dim", 256), KV_HEADS: value_of(config, "num_key_value_heads", 4)}
        full: Flat = {**near, WIDTH: value_of(config, "global_head_dim", 512)}
        if shared and config.get("num_global_key_value_heads") is not None:
            full = {**full, KV_HEADS: config["num_global_key_value_heads"]}
        windowed = self.windows.layers(config)
        if config.get("per_layer_config", {}) is None:  # by which `transformers` has equal heads in all layers
            raise Unsupported("per_layer_config = None; leave it out, or name each layer without a window there")
        if "per_layer_config" in config:
            listed = self._listed(config["per_layer_config"], near, windowed)
            if "global_head_dim" in config and listed != full:
                raise Unsupported(f"per_layer_config has {listed}, and keys beside it have {full}")
            full = listed
        if full[KV_HEADS] != near[KV_HEADS] and not shared:
            raise Unsupported("per_layer_config has num_key_value_heads, which differ with attention_k_eq_v only")
        return merged([{**near, K_EQ_V: False} if window else {**full, K_EQ_V: shared} for window in windowed])

    def _listed(self, config: Mapping[Any, Config], near: Flat, windowed: Sequence[bool]) -> Flat:
        """Returns what `per_layer_config` has for layers without a window."""
        own = {int(layer): keys for layer, keys in config.items()}
        if unknown := [key for keys in own.values() for key in keys if key not in OF_LAYERS]:
            raise Unsupported(f"per_layer_config has {unknown[0]}; Forge has {', '.join(OF_LAYERS)}")
        layers = [
            {**near, **{OF_LAYERS[key]: value for key, value in own.get(layer, {}).items()}}
            for layer in range(len(windowed))
        ]
        full = [layer for layer, window in zip(layers, windowed, strict=True) if not window]
        if any(layer != (near if window else full[-1]) for layer, window in zip(layers, windowed, strict=True)):
            raise Unsupported("per_layer_config has layers that differ by more than their window")
        return full[-1]

    def write(self, model: Flat) -> Config:
        """Writes the keys of published files; raises `Unsupported` where layers differ by more than their window."""
        windows, layers = windows_of(model), of_layers(model)
        paths = (WIDTH, KV_HEADS, K_EQ_V)
        if missing := [path for path in paths if any(path not in layer for layer in layers)]:
            raise Unsupported(f"there is no model.{missing[0]} in all layers")
        kinds = {
            bool(window): {
                tuple(own[path] for path in paths) for own, w in zip(layers, windows, strict=True) if w == window
            }
            for window in windows
        }
        if False not in kinds:
            raise Unsupported(f"all layers have {WINDOW}, and the last has none there always")
        if uneven := [kind for kind in kinds.values() if len(kind) > 1]:
            raise Unsupported(f"{', '.join(paths)} differ between layers of equal windows: {sorted(uneven[0])}")
        width, heads, shared = next(iter(kinds[False]))
        near = next(iter(kinds.get(True, {(width, heads, False)})))
        if near[2]:
            raise Unsupported(f"{K_EQ_V} = true in layers with a window")
        if heads != near[1] and not shared:
            raise Unsupported(f"{KV_HEADS} = {heads} in layers without a window needs {K_EQ_V} there")
        own = {"num_global_key_value_heads": heads} if shared else {}
        keys = {"head_dim": near[0], "num_key_value_heads": near[1], "global_head_dim": width, **own}
        return {**keys, "attention_k_eq_v": shared}

    def resolve(self, model: Flat) -> Flat:
        """Returns the values that 0 stands for."""
        derived = {WIDTH: lambda: model["dim"] // model["attention.heads"], KV_HEADS: lambda: model["attention.heads"]}
        return {path: value() for path, value in derived.items() if path in model and not model[path]}


@frozen(kw_only=True)
class RopeByType(Field):
    """`rope_parameters`, a table for each type of layer."""

    windows: LayerWindows
    encoding: Rope = ENCODING
    defaults: Mapping[str, Mapping[str, Any]] = field(default=ENCODINGS, repr=False)
    """By type, of a configuration without the key; there are no other types."""

    @property
    def keys(self) -> Collection[str]:
        return ("rope_parameters",)

    def read(self, config: Config) -> Flat:
        """Reads the table of each layer's type."""
        tables: Mapping[str, Any] = config.get("rope_parameters") or self.defaults
        if unknown := [name for name in tables if name not in self.defaults]:
            raise Unsupported(f"rope_parameters has {', '.join(unknown)}; Forge has {', '.join(self.defaults)}")
        types = [SLIDING if windowed else FULL for windowed in self.windows.layers(config)]
        if missing := [name for name in dict.fromkeys(types) if not tables.get(name)]:
            raise Unsupported(f"rope_parameters has no {', '.join(missing)}")
        ropes = {name: self.encoding.read({"rope_parameters": tables[name]}) for name in dict.fromkeys(types)}
        return merged([ropes[name] for name in types])

    def write(self, model: Flat) -> Config:
        """Writes a table for both types, for the one that no layer is of, too."""
        tables: dict[str, Any] = {}
        for window, layer in zip(windows_of(model), of_layers(model), strict=True):
            table = self.encoding.write(layer)["rope_parameters"]
            name = SLIDING if window else FULL
            if tables.setdefault(name, table) != table:
                raise Unsupported(f"{self.encoding.path} differs between layers of type {name}")
        return {"rope_parameters": {**self.defaults, **tables}}


@frozen(kw_only=True)
class FeedForward(Field):
    """The feed-forward part: dense, or with `enable_moe_block` experts beside a dense one.

    The dense one is twice as wide in layers with keys and values of others if `use_double_wide_mlp` is set.
    """

    @property
    def keys(self) -> Collection[str]:
        return ("hidden_activation", "intermediate_size", "use_double_wide_mlp", "enable_moe_block", *OF_EXPERTS)

    @property
    def written(self) -> Collection[str]:
        """Without the keys of experts, which a dense model has no numbers of."""
        return ("hidden_activation", "intermediate_size", "use_double_wide_mlp", "enable_moe_block")

    def read(self, config: Config) -> Flat:
        """Reads one part for all layers, but for the width of dense ones.

        Raises:
            Unsupported: layers with experts are to differ, or the dense one is no multiple of an expert's width.
        """
        activation = value_of(config, "hidden_activation", "gelu_pytorch_tanh")
        if activation not in ACTIVATIONS:
            raise Unsupported(f"hidden_activation = {activation!r}; Forge has {', '.join(ACTIVATIONS)}")
        width, layers = value_of(config, "intermediate_size", 9216), depth(config)
        shared = value_of(config, "num_kv_shared_layers", 0) if config.get("use_double_wide_mlp") else 0
        if config.get("enable_moe_block"):
            return self._experts(config, activation, width, shared)
        dense = {**ACTIVATIONS[activation], "ffn.bias": False}
        return merged([{**dense, FFN_WIDTH: width * (1 + (layer >= layers - shared))} for layer in range(layers)])

    def _experts(self, config: Config, activation: str, width: int, shared: int) -> Flat:
        if shared:
            raise Unsupported("use_double_wide_mlp = True; with enable_moe_block all layers are alike")
        if activation != "gelu_pytorch_tanh":
            raise Unsupported(f"hidden_activation = {activation!r}; experts have 'gelu_pytorch_tanh'")
        numbers = {ours: value_of(config, theirs, REQUIRED) for theirs, ours in OF_EXPERTS.items()}
        own = numbers[FFN_WIDTH]
        if width % own:
            raise Unsupported(f"intermediate_size = {width} is no multiple of moe_intermediate_size = {own}")
        eps = value_of(config, "rms_norm_eps", 1e-6)
        norms = {f"{NORM}.type": f"{TRANSFORMER}/rmsnorm", f"{NORM}.eps": eps, f"{ROUTER}.input_norm_eps": eps}
        return {**MOE_ALWAYS, **numbers, **norms, "ffn.shared_experts": width // own}

    def write(self, model: Flat) -> Config:
        """Writes the keys of either; raises `Unsupported` for a part that the class does not have."""
        if model.get("ffn.type") == MOE_ALWAYS["ffn.type"]:
            return self._written_experts(model)
        alike = [key for key, flat in ACTIVATIONS.items() if all(model.get(path) == own for path, own in flat.items())]
        if not alike or model.get("ffn.bias"):
            raise Unsupported(f"ffn.type = {model.get('ffn.type')!r}, where it is geglu without biases")
        widths = [layer.get(FFN_WIDTH, 0) for layer in of_layers(model)]
        shared, width = setting(model, "kv_shared_layers"), widths[0]
        doubled = shared > 0 and widths[-1] == 2 * width
        if widths != [width * (1 + (doubled and n >= len(widths) - shared)) for n in range(len(widths))]:
            raise Unsupported(f"{FFN_WIDTH} = {widths}, where all are equal, or twice the first in the last {shared}")
        keys = {"hidden_activation": alike[0], "intermediate_size": width}
        return {**keys, "use_double_wide_mlp": doubled, "enable_moe_block": False}

    def _written_experts(self, model: Flat) -> Config:
        always = {**MOE_ALWAYS, f"{NORM}.type": f"{TRANSFORMER}/rmsnorm"}
        eps = setting(model, "norm.eps")
        always |= {f"{NORM}.eps": eps, f"{ROUTER}.input_norm_eps": eps}
        if others := [path for path, own in always.items() if model.get(path) != own]:
            raise Unsupported(f"{others[0]} = {model.get(others[0])!r}, where it has {always[others[0]]!r} always")
        numbers = {theirs: setting(model, ours) for theirs, ours in OF_EXPERTS.items()}
        width = setting(model, "ffn.shared_experts") * numbers["moe_intermediate_size"]
        keys = {"hidden_activation": "gelu_pytorch_tanh", "intermediate_size": width, **numbers}
        return {**keys, "use_double_wide_mlp": False, "enable_moe_block": True}

    def resolve(self, model: Flat) -> Flat:
        """Returns the width that 0 stands for."""
        return {FFN_WIDTH: default_hidden(model["dim"])} if FFN_WIDTH in model and not model[FFN_WIDTH] else {}


@frozen(kw_only=True)
class PerLayerEmbeddings(Field):
    """`hidden_size_per_layer_input`, which is 0 without inputs of layers, and the rows of their table."""

    default: int
    """Of the width."""
    rows: int
    """The default of the rows."""

    @property
    def keys(self) -> Collection[str]:
        return ("hidden_size_per_layer_input", "vocab_size_per_layer_input")

    def read(self, config: Config) -> Flat:
        """Reads width and rows; the activation is the one of feed-forward parts."""
        width = value_of(config, "hidden_size_per_layer_input", self.default)
        if not width:
            return {}
        activation = value_of(config, "hidden_activation", "gelu_pytorch_tanh")
        rows = value_of(config, "vocab_size_per_layer_input", self.rows)
        approximate = ACTIVATIONS.get(activation, {}).get("ffn.approximate", "tanh")  # others are refused elsewhere
        return {f"{TABLE}.dim": width, f"{TABLE}.vocab_size": rows, f"{TABLE}.approximate": approximate}

    def write(self, model: Flat) -> Config:
        """Writes a width of 0 for a model without such inputs, and rows that nothing reads."""
        if not model.get(f"{TABLE}.dim"):
            return {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": self.rows}
        if model.get(f"{TABLE}.approximate") != model.get("ffn.approximate", "tanh"):
            raise Unsupported(f"{TABLE}.approximate and ffn.approximate must be equal: hidden_activation is one key")
        rows = model[f"{TABLE}.vocab_size"]
        return {"hidden_size_per_layer_input": model[f"{TABLE}.dim"], "vocab_size_per_layer_input": rows}

    def resolve(self, model: Flat) -> Flat:
        """Returns the rows that 0 stands for."""
        rows = f"{TABLE}.vocab_size"
        return {rows: model["vocab_size"]} if rows in model and not model[rows] else {}


@frozen(kw_only=True)
class PaddedEmbeddings(PerLayerEmbeddings):
    """With `pad_token_id`, whose row is that of places of images in Gemma 4; published models have row 0."""

    @property
    def keys(self) -> Collection[str]:
        return (*super().keys, "pad_token_id")

    @property
    def written(self) -> Collection[str]:
        """Without that key, which exports have for what generates with them, too."""
        return super().keys

    def read(self, config: Config) -> Flat:
        model = super().read(config)
        return {**model, f"{TABLE}.padding_row": config.get("pad_token_id") or 0} if model else model

    def write(self, model: Flat) -> Config:
        """Writes a row other than the first, which a configuration without the key has."""
        row = model.get(f"{TABLE}.padding_row", 0)
        return {**super().write(model), **({"pad_token_id": row} if row else {})}


INPUTS: Sequence[Rule] = tuple(
    Same(f"{ours}.weight", f"model.{theirs}.weight")
    for ours, theirs in {
        "per_layer_inputs.table": "embed_tokens_per_layer",
        "per_layer_inputs.projection": "per_layer_model_projection",
        "per_layer_inputs.norm": "per_layer_projection_norm",
        "layers.{layer}.layer_input.gate": "layers.{layer}.per_layer_input_gate",
        "layers.{layer}.layer_input.projection": "layers.{layer}.per_layer_projection",
        "layers.{layer}.layer_input.norm": "layers.{layer}.post_per_layer_input_norm",
    }.items()
)
"""Inputs of layers; no tensor is of these rules in a model without them."""
LAYER = "model.layers.{layer}"
EXPERTS: Sequence[Rule] = (
    *(
        Same(f"layers.{{layer}}.ffn.{ours}", f"{LAYER}.{theirs}")
        for ours, theirs in {
            "router.weight": "router.proj.weight",
            "router.scale": "router.scale",
            "router.expert_scale": "router.per_expert_scale",
            "experts.down.weight": "experts.down_proj",
            "shared_norm.weight": "pre_feedforward_layernorm.weight",
            "shared_post_norm.weight": "post_feedforward_layernorm_1.weight",
            "routed_norm.weight": "pre_feedforward_layernorm_2.weight",
            "routed_post_norm.weight": "post_feedforward_layernorm_2.weight",
            **{f"shared.{ours}.weight": f"mlp.{theirs}.weight" for ours, theirs in MATRICES.items()},
        }.items()
    ),
    StackedRows(
        [f"layers.{{layer}}.ffn.experts.{name}.weight" for name in ("gate", "up")], f"{LAYER}.experts.gate_up_proj"
    ),
)
"""The feed-forward part of a layer with experts; the dense one is that of shared experts."""
VALUES_NORMED: Sequence[Field] = (
    Fixed({"attention.qk_norm": True, "attention.v_norm": True, "attention.scale": 1.0}),
    Key("rms_norm_eps", EPS_OF_ALL, 1e-6),
)
"""Queries, keys and values are normalised."""
# Files have matrices of keys and values in all layers, as published; those that read others' compute nothing.
LEFT_OUT = (*ArchitectureComponent.left_out, *(f"*.self_attn.{name}.weight" for name in UNUSED))
OF_WHOLES: Mapping[str, str] = {r"^model\.(embed_vision|embed_audio|audio_tower)\.": rf"{OTHER}\1."}
"""`renames` of a language model that is published with images and sounds."""
WINDOWS = WindowsButLast(default=512, rule=every_nth_is_full(6))


@frozen(kw_only=True)
class Gemma4Text(ArchitectureComponent):
    """The language model of Gemma 4: E2B, E4B, 26B-A4B, 31B."""

    name = "Gemma4ForCausalLM"
    training_only = BALANCE
    left_out = LEFT_OUT
    renames: ClassVar[Mapping[str, str]] = OF_WHOLES
    defaults: ClassVar[Config] = {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
    }

    def fields(self) -> Sequence[Field]:
        """Returns the keys; without `layer_types`, every sixth layer and the last have no window."""
        by_window = ("head_dim", "num_key_value_heads")
        return (
            *shape_fields(tied=True),
            Fixed({"norm_placement": "both", "layer_scalar": True}),
            EMBEDDING_SCALE,
            WINDOWS,
            *(
                field
                for field in attention_fields(rope=RopeByType(windows=WINDOWS))
                if not (isinstance(field, Key) and field.theirs in by_window)
            ),
            HeadsByWindow(windows=WINDOWS),
            all_biases(),
            *VALUES_NORMED,
            OrNone("final_logit_softcapping", "logit_soft_cap"),
            Only("use_bidirectional_attention", None, "attention is causal", also=("vision",), write_it=False),
            Only("is_causal", True, "attention is causal", write_it=False),
            Key("num_kv_shared_layers", "kv_shared_layers", 0),
            FeedForward(),
            Irrelevant("ffn.dense.hidden", 0, {"ffn.first_dense": 0, "ffn.every": 1}),  # no layer is without experts
            PaddedEmbeddings(default=256, rows=262144),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; a matrix of keys or values that a layer does not have is missing on both sides."""
        scalar = Same("layers.{layer}.scalar.value", "model.layers.{layer}.layer_scalar")
        ffn = EXPERTS if model.get("ffn.type") == MOE_ALWAYS["ffn.type"] else FFN
        return (*ENDS, *NORMS, *ATTENTION, *QK_NORM, *ffn, scalar, *INPUTS, *tied_head(model))
