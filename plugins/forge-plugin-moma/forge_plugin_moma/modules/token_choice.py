"""The router `moma` with `choose = "tokens"`. Shapes: B sequences, S positions, D width, E experts, K of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from forge_plugin_moe.modules.topk import SigmoidRouter
from forge_plugin_moma.modules.groups import Groups, masked
from forge_plugin_moma.modules.noise import GumbelNoise
from forge_plugin_moma.modules.skip_metrics import Skipped

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_plugin_moma.moma import MoMa


class ModalityTokenChoice(SigmoidRouter):
    """See `forge_plugin_moma.MoMa`.

    A position whose modality has no experts has weights of 0 and any experts: -1 for none would make the host wait in
    every layer for the number of choices.
    """

    def __init__(self, component: MoMa, context: BuildContext, dim: int) -> None:
        groups = Groups(dict(component.experts))
        super().__init__(component.sigmoid_topk(), context, dim, groups.count, list(groups.sizes.values()))
        self.groups, self.expert_sets = groups, groups.sizes
        self.noise = GumbelNoise(self.layer, groups.count) if component.gumbel_noise else None
        self.skipped = Skipped(context, groups)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the weights and numbers of K experts of each position's group, (B, S, K) each."""
        closed = self.groups.closed(batch["input_ids"])
        logits = self.logits(x)
        if self.noise is not None and self.training:
            logits = logits + self.noise(batch, logits.dtype)
        logits = masked(logits, closed)
        self.skipped.count(batch["input_ids"], closed.all(-1))
        # 0, so that experts of other modalities have no share in the balance losses
        return self.route(logits, logits.sigmoid().masked_fill(closed, 0), batch, closed)
