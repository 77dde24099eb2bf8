"""The table `[model.altup]` of `transformer`: residual streams that are predicted and corrected by each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, le

from forge_core.contracts.components import when_resumed

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_transformer.kinds import InitStd, NormComponent


@frozen(kw_only=True)
class AltUp:
    """Alternating updates (Baykal et al. 2023, arXiv 2301.13310; Gemma 3n).

    Of n residual streams a layer predicts what it will make of each, by coefficients from the active one, computes on
    the prediction of the active one alone, and corrects all by the difference. The first stream begins as the
    embeddings, each other one as a linear function of them, of the same magnitude; the last norm gets their mean, the
    others mapped back. Inputs of layers (`[model.per_layer_inputs]`) are added to all streams but the first.
    """

    inputs: int = field(default=4, validator=[ge(2), le(64)])
    """n, the residual streams."""
    active: int = field(default=0, validator=ge(0))
    """Number of the stream that layers compute on, from 0."""
    coef_clip: float = field(default=120.0, validator=ge(0), metadata=when_resumed("flag"))
    """Bound of the weights that coefficients are computed from, in training; 0: none."""

    def build(self, context: BuildContext, norm: NormComponent, *, dim: int, init: InitStd) -> nn.Module:
        """Returns the module of a layer.

        Args:
            context: of the module.
            norm: the model's.
            dim: D.
            init: deviations of matrices.
        """
        from forge_plugin_transformer.modules.altup import AlternatingUpdate

        own = context.at("norm").build(norm, dim=dim)
        return AlternatingUpdate(dim, self.inputs, active=self.active, clip=self.coef_clip, norm=own, std=init.inner)

    def build_ends(self, dim: int, std: float) -> tuple[nn.Module, nn.Module]:
        """Returns what makes the streams of embeddings, and what makes one stream of them; `std` is of matrices."""
        from forge_plugin_transformer.modules.altup import MeanOfStreams, StreamsOfEmbeddings

        return StreamsOfEmbeddings(dim, self.inputs, std=std), MeanOfStreams(dim, self.inputs, std=std)
