"""The components `none` of the kinds `attention` and `ffn`: a layer without one of its two parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_transformer.kinds import AttentionComponent, FFNComponent, InitStd

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext


def _refuse(context: BuildContext, what: str) -> NoReturn:
    """Raises a JobError: only a layer of `transformer` can be without a part."""
    message = f'type = "none": {context.path} needs {what}; only a layer of `transformer` can be without'
    raise JobError([Problem("model", message)])


@frozen(kw_only=True)
class NoAttention(AttentionComponent):
    """No attention: the layer has its feed-forward part alone.

    A kind of a `pattern`, for layers of a single part (Nemotron-H). The layer has neither the norms nor the residual
    connection of attention.
    """

    def left_out(self, layer: int) -> bool:
        """Returns true."""
        return True

    def build(self, context: BuildContext, dim: int, init: InitStd) -> NoReturn:
        """Raises a JobError: `transformer` leaves the part out, and nothing else can."""
        _refuse(context, "attention")


@frozen(kw_only=True)
class NoFFN(FFNComponent):
    """No feed-forward part: the layer has attention alone.

    A kind of a `pattern`, for layers of a single part (Nemotron-H). The layer has neither the norms nor the residual
    connection of the feed-forward part.
    """

    def left_out(self, layer: int) -> bool:
        """Returns true."""
        return True

    def build(self, context: BuildContext, dim: int, init: InitStd) -> NoReturn:
        """Raises a JobError: `transformer` leaves the part out, and nothing else can."""
        _refuse(context, "a feed-forward part")
