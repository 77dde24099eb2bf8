"""Fields of keys that differ between layers: windows and position encodings, of the tables of `keys_by_layer`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress
from typing import Any

from attrs import frozen

from forge_plugin_weights.fields import REQUIRED, Rope, setting, value_of
from forge_plugin_weights.keys_by_layer import NO_ROPE, PerLayer, merged, of_layers
from forge_plugin_weights.kinds import Config, Field, Flat, Unsupported

FULL, SLIDING = "full_attention", "sliding_attention"
"""Entries of `layer_types`."""
WINDOW = "attention.window"


def depth(config: Config) -> int:
    """Returns the number of layers."""
    return int(value_of(config, "num_hidden_layers", REQUIRED))


@frozen(kw_only=True)
class Window(Field):
    """`sliding_window`, which all layers have."""

    default: int | None = None
    """The window where the configuration has no such key."""
    switched: bool = False
    """Whether `use_sliding_window` must be true for there to be one."""

    @property
    def keys(self) -> Collection[str]:
        """With the switch only where the architecture has one; for others it is an unknown key."""
        return ("sliding_window", "use_sliding_window") if self.switched else ("sliding_window",)

    def width(self, config: Config) -> int:
        """Returns the window; 0 if there is none."""
        if self.switched and not config.get("use_sliding_window"):
            return 0
        return config.get("sliding_window", self.default) or 0

    def read(self, config: Config) -> Flat:
        """Reads one width for all layers, 0 for none."""
        return {WINDOW: self.width(config)}

    def write(self, model: Flat) -> Config:
        """Writes one width; a model whose layers differ is refused by `tables`, as its width is a `PerLayer`."""
        return self._written(setting(model, WINDOW))

    def _written(self, width: Any) -> dict[str, Any]:
        # Without the switch, transformers ignores the width.
        switch = {"use_sliding_window": bool(width)} if self.switched else {}
        return {"sliding_window": width or None, **switch}


@frozen(kw_only=True)
class LayerWindows(Window):
    """`sliding_window`, and which layers have it: `layer_types`, or a rule where that is missing."""

    rule: Callable[[Config], Sequence[bool]]
    """Returns which layers have a window by keys other than `layer_types`."""
    further: Sequence[str] = ()
    """Keys that the rule reads. They mean nothing beside `layer_types`, which is written."""

    @property
    def keys(self) -> Collection[str]:
        """With the keys of the rule, which nothing reads where `layer_types` is there."""
        return (*super().keys, "layer_types", *self.further)

    def layers(self, config: Config) -> Sequence[bool]:
        """Returns which layers have a window."""
        types = config.get("layer_types")
        # The list has precedence over the rule, as in transformers.
        if types is None:
            return self.rule(config) if self.width(config) else [False] * depth(config)
        if unknown := [entry for entry in types if entry not in (FULL, SLIDING)]:
            raise Unsupported(f"layer_types has {unknown[0]!r}; Forge has {FULL!r}, {SLIDING!r}")
        # Unlike a job's pattern, the list does not repeat.
        if len(types) != depth(config):
            raise Unsupported(f"layer_types has {len(types)} entries, where there are {depth(config)} layers")
        return [entry == SLIDING for entry in types]

    def read(self, config: Config) -> Flat:
        """Reads the window of each layer; a list that names windows is refused without their width."""
        width, layers = self.width(config), self.layers(config)
        if any(layers) and not width:
            raise Unsupported(f"layer_types has {SLIDING!r}, and sliding_window is missing, null or switched off")
        return merged([{WINDOW: width if windowed else 0} for windowed in layers])

    def write(self, model: Flat) -> Config:
        """Writes `layer_types` always, so that no rule applies; raises `Unsupported` for several widths."""
        windows = windows_of(model)
        widths = {window for window in windows if window}
        if len(widths) > 1:
            raise Unsupported(f"{WINDOW} = {setting(model, WINDOW)}, where layers have one window, or none")
        types = [SLIDING if window else FULL for window in windows]
        return {**self._written(next(iter(widths), 0)), "layer_types": types}


def windows_of(model: Flat) -> Sequence[int]:
    """Returns the window of each layer."""
    window = setting(model, WINDOW)
    return window.values if isinstance(window, PerLayer) else [window] * setting(model, "layers")


def every_nth_is_full(n: int | str, default: int = 0) -> Callable[[Config], Sequence[bool]]:
    """Returns a rule: each n-th layer has no window, all others have one.

    Args:
        n: the number, or the key that has it.
        default: where that key is missing.
    """

    def windowed(config: Config) -> Sequence[bool]:
        period = int(value_of(config, n, default)) if isinstance(n, str) else n
        return [(layer + 1) % period != 0 for layer in range(depth(config))]  # layers count from 1 here

    return windowed


@frozen(kw_only=True)
class RopeOfSomeLayers(Rope):
    """A position encoding that some layers are without: `no_rope_layers` has a 0 for each of those (SmolLM3)."""

    interval: int = 4
    """The period of layers without it, where no key specifies them."""

    @property
    def keys(self) -> Collection[str]:
        return (*super().keys, "no_rope_layers", "no_rope_layer_interval")

    def layers(self, config: Config) -> Sequence[bool]:
        """Returns which layers have the encoding."""
        encoded = config.get("no_rope_layers")
        if encoded is None:
            return every_other(value_of(config, "no_rope_layer_interval", self.interval), depth(config))
        if len(encoded) != depth(config):
            raise Unsupported(f"no_rope_layers has {len(encoded)} entries, where there are {depth(config)} layers")
        return [bool(entry) for entry in encoded]

    def read(self, config: Config) -> Flat:
        """Reads one encoding for all layers, and replaces it by the type `none` in those without."""
        rope = super().read(config)
        return merged([rope if encoded else {f"{self.path}.type": NO_ROPE} for encoded in self.layers(config)])

    def write(self, model: Flat) -> Config:
        """Writes the encoding of the layers that have one, the list of all layers, and their period if there is one."""
        layers = of_layers(model)
        encoded = [layer.get(f"{self.path}.type") != NO_ROPE for layer in layers]
        # Without the other layers, whose keys are absent, which would make each value a `PerLayer`
        own = super().write(merged(list(compress(layers, encoded)))) if any(encoded) else {}
        # The list has precedence; the number is for programs that have a period only.
        count = len(layers)
        period = next((period for period in range(1, count + 1) if every_other(period, count) == encoded), 0)
        named = {"no_rope_layer_interval": period} if period else {}
        return {**own, "no_rope_layers": [*map(int, encoded)], **named}


def every_other(period: int, layers: int) -> list[bool]:
    """Returns which layers encode positions if the last of each `period` layers does not."""
    return [(layer + 1) % period != 0 for layer in range(layers)]


@frozen(kw_only=True)
class RopeByWindow(Field):
    """Position encodings that differ between layers with a window and those without (Gemma 3, OLMo 3).

    `rope_parameters` has a table for each type of layer (transformers 5). In version 4, `rope_theta` and `rope_scaling`
    apply to layers without a window, and a further key has the base of the others.
    """

    windows: LayerWindows
    """Which layers have a window."""
    full: Rope
    """The encoding of layers without one."""
    near: Rope
    """The encoding of layers with one."""
    near_theta: str
    """The key of version 4 with the base of layers with a window; it may be `rope_theta`, too."""

    @property
    def keys(self) -> Collection[str]:
        return (*self.full.keys, self.near_theta)

    def read(self, config: Config) -> Flat:
        """Reads both encodings, and gives each layer one of them by its window."""
        tables = config.get("rope_parameters") or {}
        if unknown := [name for name in tables if name not in (FULL, SLIDING)]:
            raise Unsupported(f"rope_parameters has {', '.join(unknown)}; Forge has {FULL!r}, {SLIDING!r}")
        # Without `rope_scaling`, which in version 4 applies to layers without a window alone
        near: dict[str, Any] = {"rope_theta": config[self.near_theta]} if self.near_theta in config else {}
        ropes = {
            False: self.full.read({**config, "rope_parameters": tables.get(FULL)}),
            True: self.near.read({**near, "rope_parameters": tables.get(SLIDING)}),
        }
        return merged([ropes[windowed] for windowed in self.windows.layers(config)])

    def write(self, model: Flat) -> Config:
        """Writes a table for each type of layer, and the keys of version 4 where they express the same."""
        windows, layers = windows_of(model), of_layers(model)
        tables: dict[str, Mapping[str, Any]] = {}
        for name, rope, windowed in ((FULL, self.full, False), (SLIDING, self.near, True)):
            if own := [layer for layer, window in zip(layers, windows, strict=True) if bool(window) == windowed]:
                tables[name] = rope.write(merged(own))
        return {
            **self._first_form(tables),
            "rope_parameters": {name: table["rope_parameters"] for name, table in tables.items()},
        }

    def _first_form(self, tables: Mapping[str, Mapping[str, Any]]) -> Config:
        """Returns the keys of version 4; none if they cannot say it."""
        full, near = tables.get(FULL), tables.get(SLIDING)
        if full is None or (near is not None and near["rope_scaling"]):
            return {}
        own = {"rope_theta": full["rope_theta"], "rope_scaling": full["rope_scaling"]}
        if near is None:
            return own
        theta = near["rope_theta"]
        # One key may have both bases (OLMo 3), which have to be equal then.
        return {} if own.get(self.near_theta, theta) != theta else {**own, self.near_theta: theta}
