"""The components `add`, `hyper_connections` and `manifold_hyper_connections`: how a part joins the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt, le

from forge_core.contracts.components import when_resumed
from forge_plugin_transformer.kinds import InitStd, ResidualComponent

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext

MOST = 64
"""Streams at most: the papers have 2 to 8, and the coefficients of a position grow with the square of the number."""


@frozen(kw_only=True)
class Add(ResidualComponent):
    """x + f(x)."""

    def build(self, context: BuildContext, dim: int, init: InitStd, part: int) -> nn.Module:
        """Returns a module without parameters."""
        from forge_plugin_transformer.modules.residual import Addition

        return Addition()


@frozen(kw_only=True)
class HyperConnections(ResidualComponent):
    """n residual streams that learned coefficients mix (Zhu et al. 2024).

    "Hyper-Connections", arXiv 2409.19606: equations 2 and 5, and 10 to 13 if `dynamic` is set. A part reads a weighted
    sum of the streams; its result is added to each with a weight, and the streams are mixed. At first every stream is
    the stream of plain addition, and parts read them in turns. Their sum goes to the last norm.
    """

    streams: int = field(default=4, validator=[ge(1), le(MOST)])
    """n, the residual streams. 1: one stream, whose two summands are weighted."""
    dynamic: bool = True
    """Whether the coefficients depend on the position, by a matrix and a tanh on the normalised streams. Its norm has
    no parameters, as the matrix contains a gain."""

    def stream_count(self) -> int:
        return self.streams

    def build(self, context: BuildContext, dim: int, init: InitStd, part: int) -> nn.Module:
        """Returns a `HyperConnection`, which begins as plain addition that reads stream `part` modulo n."""
        from forge_plugin_transformer.modules.residual import HyperConnection

        return HyperConnection(dim, self.streams, part=part, dynamic=self.dynamic, dtype=context.dtype)


@frozen(kw_only=True)
class ManifoldHyperConnections(ResidualComponent):
    """Hyper-connections whose mixing matrix is doubly stochastic (mHC).

    "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, as in DeepSeek-V4: coefficients are computed from
    all streams of a position together; those of reading and adding are bounded by a sigmoid, and the n x n matrix that
    mixes the streams is made doubly stochastic by iterations of Sinkhorn and Knopp, so that deep stacks neither amplify
    nor lose what the streams have in common.
    """

    streams: int = field(default=4, validator=[ge(2), le(MOST)])
    """n, the residual streams."""
    iterations: int = field(default=20, validator=[ge(1), le(999)], metadata=when_resumed("flag"))
    """Normalisations of rows and columns of the mixing matrix."""
    eps: float = field(default=1e-6, validator=gt(0), metadata=when_resumed("flag"))
    """Added to coefficients and sums before a division (`hc_eps` of DeepSeek-V4)."""
    norm_eps: float = field(default=1e-6, validator=gt(0), metadata=when_resumed("flag"))
    """Added to the mean square when the streams are normalised, without a gain."""

    def stream_count(self) -> int:
        return self.streams

    def build(self, context: BuildContext, dim: int, init: InitStd, part: int) -> nn.Module:
        """Returns a `ManifoldHyperConnection`; its matrix is drawn, as equal streams would else learn alike."""
        from forge_plugin_transformer.modules.residual import ManifoldHyperConnection

        return ManifoldHyperConnection(
            dim,
            self.streams,
            iterations=self.iterations,
            eps=self.eps,
            norm_eps=self.norm_eps,
            std=init.inner,
            dtype=context.dtype,
        )
