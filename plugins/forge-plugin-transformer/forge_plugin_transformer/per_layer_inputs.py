"""The table `[model.per_layer_inputs]` of `transformer`: an input of each layer beside the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge, gt

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_transformer.kinds import InitStd, NormComponent


@frozen(kw_only=True)
class PerLayerInputs:
    """Per-layer embeddings (Gemma 3n, Gemma 4 E2B and E4B): each layer has P numbers for each token.

    With the embeddings x of the tokens, the input of layer l is p_l = (norm(W_l x / sqrt(D)) + sqrt(P) E_l[token]) /
    sqrt(2), and behind its two parts the layer adds norm(B_l (gelu(A_l x) * p_l)) to the stream x. Tables E_l of all
    layers are one, and look-ups cost next to nothing: most of the weights need not be on the device that computes.
    """

    dim: int = field(validator=gt(0))
    """P, the width of an input."""
    vocab_size: int = field(default=0, validator=ge(0))
    """Rows of the table; 0: as many as the model's."""
    padding_row: int = field(default=0, validator=ge(0))
    """The row of tokens beyond the table, and of places of images; in Gemma 4 the row of the padding token."""
    approximate: Literal["tanh", "none"] = "tanh"
    """The activation by its tanh approximation (Gemma), or exactly."""

    def build(
        self, context: BuildContext, norm: NormComponent, *, dim: int, layers: int, vocab_size: int, std: float
    ) -> nn.Module:
        """Returns the module that makes the inputs of all layers.

        Args:
            context: of the table.
            norm: the model's.
            dim: D.
            layers: their number.
            vocab_size: the model's.
            std: deviation of initial matrices.
        """
        from forge_plugin_transformer.modules.per_layer_inputs import LayerInputs

        return LayerInputs(
            self.vocab_size or vocab_size,
            dim,
            width=self.dim,
            layers=layers,
            padding_row=self.padding_row,
            norm=context.at("norm").build(norm, dim=self.dim),
            dtype=context.dtype,
            std=std,
        )

    def build_reader(self, context: BuildContext, norm: NormComponent, *, dim: int, init: InitStd) -> nn.Module:
        """Returns the module by which a layer reads its input."""
        from forge_plugin_transformer.modules.per_layer_inputs import LayerInputReader

        own = context.at("norm").build(norm, dim=dim)
        return LayerInputReader(dim, self.dim, norm=own, approximate=self.approximate, init=init)
