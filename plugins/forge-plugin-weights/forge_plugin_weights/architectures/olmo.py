"""OLMo 2, OLMo 3 and EXAONE 4: norms after attention and feed-forward part, and of queries and keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress

from attrs import frozen

from forge_plugin_weights.architectures.dense import (
    EPS_OF_ALL,
    QK_NORM,
    Dense,
    all_biases,
    attention_fields,
    dense_fields,
    renamed,
)
from forge_plugin_weights.fields import Fixed, Rope
from forge_plugin_weights.keys_by_layer import NO_ROPE, merged, of_layers
from forge_plugin_weights.kinds import Config, Field, Flat, Unsupported
from forge_plugin_weights.layer_fields import (
    WINDOW,
    LayerWindows,
    RopeByWindow,
    depth,
    every_nth_is_full,
    windows_of,
)

POST_NORMS = renamed({"attention_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"})
"""All norms of a layer: none stands before attention or feed-forward part."""
WINDOWS = LayerWindows(default=4096, rule=every_nth_is_full(4))


def olmo_fields(rope: Field | None = None) -> Sequence[Field]:
    """Returns the keys of both; `rope` is the position encoding, where it differs between layers."""
    post = Fixed({"norm_placement": "post", "attention.qk_norm": "all"})
    return dense_fields(attention_fields(rope=rope), post, all_biases(), eps=1e-5, eps_of=EPS_OF_ALL)


@frozen(kw_only=True)
class Olmo2(Dense):
    """OLMo 2."""

    name = "Olmo2ForCausalLM"
    norms = POST_NORMS
    qk_norm = QK_NORM

    def fields(self) -> Sequence[Field]:
        return olmo_fields()


@frozen(kw_only=True)
class Olmo3(Dense):
    """OLMo 3: three layers of four have a window, and an encoding of positions that is not stretched."""

    name = "Olmo3ForCausalLM"
    norms = POST_NORMS
    qk_norm = QK_NORM

    def fields(self) -> Sequence[Field]:
        # One base for both kinds of layers, of which those with a window are not stretched
        base = Rope(theta=500000.0)
        return (*olmo_fields(RopeByWindow(windows=WINDOWS, full=base, near=base, near_theta="rope_theta")), WINDOWS)


PATTERN = "sliding_window_pattern"


def exaone_windows(config: Config) -> Sequence[bool]:
    """Returns which layers of EXAONE 4 have a window if no list specifies them: all but each n-th, or by letters."""
    pattern = config.get(PATTERN, 4)
    if not isinstance(pattern, str):
        return every_nth_is_full(pattern or 1)(config)  # 0 and null stand for no window
    if not pattern or {*pattern} - {*"LG"}:
        raise Unsupported(f"{PATTERN} = {pattern!r}; a text of L and G works")
    layers = [pattern[layer % len(pattern)] == "L" for layer in range(depth(config))]
    return [*layers[:-1], False]  # the last is never local, whatever its letter


@frozen(kw_only=True)
class RopeInWindows(Rope):
    """A position encoding that only layers with a window have (EXAONE 4, Cohere 2)."""

    windows: LayerWindows
    without_windows: bool = True
    """Whether all layers have the encoding if none has a window."""

    @property
    def keys(self) -> Collection[str]:
        """With the key that decides it, which `windows` writes."""
        return (*super().keys, "sliding_window")

    def read(self, config: Config) -> Flat:
        """Reads one encoding for all layers, and replaces it by the type `none` in those without a window."""
        rope = super().read(config)
        if self.without_windows and not self.windows.width(config):
            return rope
        try:
            layers = self.windows.layers(config)
        except Unsupported:
            return rope  # the field of windows reports it
        return merged([rope if windowed else {f"{self.path}.type": NO_ROPE} for windowed in layers])

    def write(self, model: Flat) -> Config:
        """Writes the encoding of the layers that have one; raises `Unsupported` if other ones have a window."""
        layers = of_layers(model)
        encoded = [layer.get(f"{self.path}.type") != NO_ROPE for layer in layers]
        windowed = [bool(window) for window in windows_of(model)]
        if (any(windowed) or not self.without_windows) and encoded != windowed:
            raise Unsupported(f"layers with {WINDOW} are others than those with {self.path}, where they are the same")
        if len({*encoded}) > 1 and not any(windowed):
            raise Unsupported(f"{self.path} differs between layers, where all have one if none has {WINDOW}")
        own = super().write(merged(list(compress(layers, encoded)))) if any(encoded) else {}
        # Without a width, all layers would have the encoding: a width that no layer uses takes it from them.
        return own if any(encoded) or not self.without_windows else {"sliding_window": self.windows.default}


@frozen(kw_only=True)
class Exaone4(Dense):
    """EXAONE 4.0: of the 32B, three layers of four have a window, and the others no encoding of positions."""

    name = "Exaone4ForCausalLM"
    norms = POST_NORMS
    qk_norm = QK_NORM

    def fields(self) -> Sequence[Field]:
        """Returns the keys; the encoding is written behind the windows, whose width it may set."""
        windows = LayerWindows(default=4096, rule=exaone_windows, further=(PATTERN,))
        attention = attention_fields(kv_heads=32, rope=RopeInWindows(windows=windows))
        post = Fixed({"norm_placement": "post", "attention.qk_norm": True, "attention.bias": False, "ffn.bias": False})
        return dense_fields([windows, *attention], post, eps=1e-5, eps_of=EPS_OF_ALL)
