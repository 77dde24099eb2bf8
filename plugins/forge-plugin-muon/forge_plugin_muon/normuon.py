"""The component `normuon`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, lt

from forge_plugin_muon.muon import Muon

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.optimizer import NamedParameters


@frozen(kw_only=True)
class NorMuon(Muon):
    """Muon whose rows are made equally large; AdamW for all other parameters.

    By Li et al. 2025, "NorMuon: Making Muon more efficient and scalable" (arXiv 2510.05491). Orthogonalised momentum
    has rows of different lengths. Each row, which holds the weights of a neuron, is divided by the root of an average
    of its mean square, and the matrix is scaled back to the norm that it had. All else is as `muon` does it, and its
    keys mean the same.

    State: as Muon's, and a number for each row of a matrix, on the rank that orthogonalises it.
    """

    beta2: float = field(default=0.95, validator=[ge(0), lt(1)])
    """Decay of the average of each row's mean square."""

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        from forge_plugin_muon.normuon_optimizer import NorMuonOptimizer

        return self.build_as(NorMuonOptimizer, context, parameters, beta2=self.beta2)
