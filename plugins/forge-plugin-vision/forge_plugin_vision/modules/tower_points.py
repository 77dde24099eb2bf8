"""Tap points of vision towers, alike in all encoders. Their rows are images or rows of patches, not of tokens.

Shapes: B sequences, P patches, W width of the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from forge_kit.nn.taps import TapPoint, below

STREAM: Mapping[str, TapPoint] = {
    "resid_pre": TapPoint("", "input", axes="images"),
    "z": TapPoint("o", "input", axes="images"),
    "resid_mid": TapPoint("ffn_norm", "input", axes="images"),
    "resid_post": TapPoint("", axes="images"),
}
"""Points of a block with `o` and `ffn_norm`: the residual stream, and the mixed values of all heads, joined."""
PLAIN: Mapping[str, TapPoint] = {
    **STREAM,
    **{name: TapPoint(name, axes="images") for name in "qkv"},
    "mlp_hidden": TapPoint("down", "input", axes="images"),
    "attn_out": TapPoint("o", axes="images"),
    "mlp_out": TapPoint("down", axes="images"),
}
"""Points of a block in which each matrix is a separate submodule; q, k and v have all heads, joined."""


def tower_points(blocks: nn.ModuleList, of_block: Mapping[str, TapPoint]) -> dict[str, TapPoint]:
    """Returns the points of all `blocks` of an encoder: `layers.3.resid_post`."""
    return {
        f"layers.{number}.{name}": below(f"blocks.{number}", point)
        for number in range(len(blocks))
        for name, point in of_block.items()
    }
