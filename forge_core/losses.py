"""The core's own loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import and_, ge, lt

from forge_core.contracts.components import LossComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.runtime import LossFunction


@frozen(kw_only=True)
class CrossEntropy(LossComponent):
    """Next-token cross-entropy in nats, from the logits of a whole micro-batch, computed in float32.

    Plain and exact, on any head and any split of the vocabulary; it holds the logits and their gradient.
    `chunked_cross_entropy` (forge-plugin-losses) is the same objective in a fraction of the memory.
    """

    label_smoothing: float = field(default=0.0, validator=and_(ge(0), lt(1)))
    """Share of the target that is spread evenly over the vocabulary (Szegedy et al. 2016). What the model has of that
    even part is logged unweighted as `loss/uniform`; the reported loss does not contain it."""
    z_loss: float = field(default=0.0, validator=ge(0))
    """Weight of log(Z)² in the objective, Z the softmax's normaliser, which keeps logits from drifting (PaLM, Chowdhery
    et al. 2022, section 5, uses 1e-4). Logged unweighted as `loss/z_loss`; the reported loss does not contain it."""

    def build(self, context: BuildContext) -> LossFunction:
        from forge_core.cross_entropy import cross_entropy_loss

        return cross_entropy_loss(context.auxiliary, label_smoothing=self.label_smoothing, z_loss=self.z_loss)
