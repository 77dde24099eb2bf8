"""The component `chunked_cross_entropy`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import and_, ge, lt

from forge_core.contracts.components import LossComponent, when_resumed

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.runtime import LossFunction


@frozen(kw_only=True)
class ChunkedCrossEntropy(LossComponent):
    """Next-token cross-entropy in nats that never holds all logits, forward or backward.

    The positions of a micro-batch pass through the head in chunks; each chunk's gradient is made at once, while its
    logits are still in the cache. Same objective, head and vocabulary splits as the core's `cross_entropy`.
    """

    chunk_tokens: int = field(default=0, validator=ge(0), metadata=when_resumed("safe"))
    """Positions whose logits exist at a time. 0: 512 on the CPU, as measured (see the README), 4096 elsewhere."""
    label_smoothing: float = field(default=0.0, validator=and_(ge(0), lt(1)))
    """Share of the target that is spread evenly over the vocabulary (Szegedy et al. 2016). What the model has of that
    even part is logged unweighted as `loss/uniform`; the reported loss does not contain it."""
    z_loss: float = field(default=0.0, validator=ge(0))
    """Weight of log(Z)² in the objective, Z the softmax's normaliser, which keeps logits from drifting (PaLM, Chowdhery
    et al. 2022, section 5, uses 1e-4). Logged unweighted as `loss/z_loss`; the reported loss does not contain it."""

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        from forge_plugin_losses.chunked import default_chunk_tokens

        if self.chunk_tokens:
            yield "loss", f"chunks of {self.chunk_tokens} positions", "loss.chunk_tokens"
        else:
            why = "measured" if context.device.type == "cpu" else "by arithmetic, not measured"
            yield "loss", f"chunks of {default_chunk_tokens(context.device)} positions", why

    def build(self, context: BuildContext) -> LossFunction:
        from forge_plugin_losses.chunked import chunked_loss, default_chunk_tokens

        chunk_tokens = self.chunk_tokens or default_chunk_tokens(context.device)
        return chunked_loss(chunk_tokens, context.auxiliary, label_smoothing=self.label_smoothing, z_loss=self.z_loss)
