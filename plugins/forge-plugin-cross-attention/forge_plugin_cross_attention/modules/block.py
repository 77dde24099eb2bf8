"""A block of cross-attention.

Shapes: B sequences, S positions, M features of a row, D model width, H query heads, K key/value heads, E width of a
head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from forge_kit.nn.modules import Linear
from forge_kit.nn.taps import TapPoint, tap_points
from forge_plugin_cross_attention.modules.sight import MASK, SEEN
from forge_plugin_transformer.modules.attention_core import torch_attention
from forge_plugin_transformer.modules.norms import RootMeanSquareNorm
from forge_plugin_vision.modules.cost import LayerCost
from forge_plugin_vision.modules.gate import Gate

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_plugin_cross_attention.modules.cache import LayerCache
    from forge_plugin_transformer import InitStd


class FeatureAttention(nn.Module):
    """q (B, S, H, E), k and v (B, M, K, E), and which features a position sees, (B, 1, S, M) bool -> (B, S, H, E)."""

    # A module, so that taps find its input and output
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attends where `mask` is true, neither causally nor by position; K divides H."""
        return torch_attention(q, k, v, mask)


class Attention(nn.Module):
    """o(attention(q(x), k(features), v(features))), without positions: (B, S, D) and (B, M, D) to (B, S, D)."""

    def __init__(
        self, dim: int, *, heads: int, kv_heads: int, head_dim: int, qk_norm_eps: float | None, init: InitStd
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = Linear(dim, heads * head_dim, std=init.inner)
        self.k = Linear(dim, kv_heads * head_dim, std=init.inner)
        self.v = Linear(dim, kv_heads * head_dim, std=init.inner)
        self.o = Linear(heads * head_dim, dim, std=init.residual)
        self.q_norm, self.k_norm = (
            RootMeanSquareNorm(head_dim, eps=qk_norm_eps) if qk_norm_eps is not None else nn.Identity()
            for _ in range(2)
        )
        self.core = FeatureAttention()

    def forward(self, x: Tensor, features: Tensor | None, batch: Batch, cache: LayerCache | None = None) -> Tensor:
        """`features`: None where there are none but those whose keys and values `cache` holds."""
        q = self.q_norm(self._heads(self.q(x)))
        new = None if features is None else self._keys_and_values(features)
        # Keys and values are kept, not features: each image is projected once, in the call that brings it.
        k, v = cache.extend(new) if cache is not None else new  # type: ignore[misc]
        return self.o(self.core(q, k, v, batch[MASK]).flatten(2))

    def _keys_and_values(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both, (B, M, K, E)."""
        return self.k_norm(self._heads(self.k(features))), self._heads(self.v(features))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def flops(self, seq_len: int, features: int) -> float:
        """Returns FLOPs of a token, forward and backward, in rows of `seq_len` positions and `features` features."""
        cost = self.cost()
        return cost.weights + cost.feature_weights * features / seq_len + cost.feature_attention * features

    def cost(self) -> LayerCost:
        """Counts 6 a weight, and 12 for each element of a query and feature of its row."""
        of_text, of_features = (
            6.0 * sum(part.weight.numel() for part in pair) for pair in ((self.q, self.o), (self.k, self.v))
        )
        # Tokens attend to features alone: no term grows with the length of the sequence.
        return LayerCost(of_text, 0.0, of_features, 12.0 * self.q.out_features)

    def float8_exempt(self) -> Sequence[str]:
        """Exempts the projections of features."""
        # Products in float8 need a multiple of 16 rows, and nothing makes the number of features one.
        return ["k", "v"]

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Splits heads over ranks. Only x is gathered here: features are whole already, see `Whole`."""
        plan = {"": "whole_input", "q": "column", "k": "column", "v": "column", "o": "row"}
        # An `nn.Identity` has no parameters to split.
        normed = isinstance(self.q_norm, RootMeanSquareNorm)
        return plan | ({"q_norm": "replicate", "k_norm": "replicate"} if normed else {})

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the queries and results of positions; keys and values belong to features, which are not positions."""
        return {"q": TapPoint("core", "input", axes="heads"), "z": TapPoint("core", axes="heads")}


class CrossAttentionBlock(nn.Module):
    """x + gate(attention(norm(x), features)), then x + gate(ffn(norm(x))), with zeros added where no image is seen."""

    PARTS = ("attention_norm", "attention", "attention_gate", "ffn_norm", "ffn", "ffn_gate")

    def __init__(
        self,
        *,
        attention_norm: nn.Module,
        attention: Attention,
        ffn_norm: nn.Module,
        ffn: nn.Module,
        gate_start: float | None,
    ) -> None:
        """Args: `gate_start`, the initial value of both gates; None: there are none."""
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.ffn_norm, self.ffn = ffn_norm, ffn
        self.attention_gate, self.ffn_gate = (
            nn.Identity() if gate_start is None else Gate(gate_start) for _ in range(2)
        )

    def forward(self, x: Tensor, features: Tensor | None, batch: Batch, cache: LayerCache | None = None) -> Tensor:
        """(B, S, D), and features (B, M, D) if there are new ones, to (B, S, D)."""
        seen = batch[SEEN]
        # `seen` is a factor of both parts: where it is 0, attention has averaged over all features of the row, and the
        # feed-forward part would change text without images.
        x = x + self.attention_gate(seen * self.attention(self.attention_norm(x), features, batch, cache))
        return x + self.ffn_gate(seen * self.ffn(self.ffn_norm(x), batch))

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the points of the residual stream in the block, which only runs in batches with images."""
        points = {
            "resid_pre": TapPoint("attention_norm", "input"),
            "attn_out": TapPoint("attention_gate"),
            "resid_mid": TapPoint("ffn_norm", "input"),
            "mlp_out": TapPoint("ffn_gate"),
            "resid_post": TapPoint(""),
        }
        return points | tap_points(self.attention, "attention") | tap_points(self.ffn, "ffn")
