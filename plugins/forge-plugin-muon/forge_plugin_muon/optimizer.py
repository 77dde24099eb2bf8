"""Muon as a `torch.optim.Optimizer`, usable without a Forge job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.parallel.mesh import local_part
from forge_kit.optim.groups import Groups, as_groups
from forge_kit.optim.matrix_optimizer import WORKING_BYTES, MatrixOptimizer, matrices_in
from forge_kit.optim.whole_matrices import Matrix, WholeMatrices
from forge_kit.torch_internals import LocalAdamW, foreach_lerp_, foreach_mul_
from forge_plugin_muon import newton_schulz
from forge_plugin_muon.muon import Scaling, scale_of
from forge_plugin_muon.newton_schulz import JORDAN, fast_dtype, orthogonalise

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ADAM_SHARE: Mapping[Scaling, float] = {"original": 0.15, "match_rms_adamw": 1.0}
"""AdamW's rate for all other parameters, as a share of the rate of matrices. The second scaling makes updates of
matrices as large as AdamW's, so that one rate serves both. With the first, an update of a square matrix of width n has
entries of 1 / √n in the root mean square, and AdamW's of about 0.2: 0.15 was measured (docs/optimizers.md)."""


class MuonOptimizer(MatrixOptimizer):
    """Muon (Jordan et al. 2024) for matrices of hidden layers, AdamW for all other parameters.

    With gradient G, momentum M and matrix W (rows, columns), and NS the Newton-Schulz iteration,

        M ← μ M + (1 - μ) G;  U = NS(μ M + (1 - μ) G if nesterov else M);  W ← (1 - lr λ) W - lr s U

    where s depends on the shape, as set by `scaling`. State: `momentum_buffer`, like each matrix, and the state of
    AdamW.

    Args:
        matrices: parameters of two dimensions, or of three that stack matrices, or groups of them. A group may set
            each of the settings but `ns_dtype`.
        others: all other parameters, or groups of them, as `torch.optim.AdamW` takes them.
        lr: learning rate of matrices.
        momentum: μ.
        nesterov: whether the present gradient counts once more.
        weight_decay: λ.
        scaling: "original" or "match_rms_adamw", which determines s; see `forge_plugin_muon.Muon`.
        ns_steps: steps of the iteration.
        ns_coefficients: coefficients of its polynomial.
        ns_dtype: dtype of the iteration. None: the one that is fast on the device of the matrices (`fast_dtype`).
        ns_eps: lower bound of the norm that a matrix is divided by before the iteration.
        adam_lr: learning rate of all other parameters; their groups may set it and the next three. None: `lr` times
            the factor of `scaling` in `ADAM_SHARE`.
        adam_betas: decay of AdamW's averages.
        adam_eps: added to the root of AdamW's averaged square.
        adam_weight_decay: weight decay of all other parameters.
        fused: whether AdamW's update is one kernel.
        working_bytes: upper bound of the bytes of whole matrices that a rank holds at a time.
        mesh: the mesh over which DTensor parameters are split, or whose ranks share the work on replicated ones.

    Raises:
        ValueError: one of `matrices` has another number of dimensions.
    """

    matrix_key = "momentum"

    def __init__(
        self,
        matrices: Groups,
        others: Groups = (),
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        scaling: Scaling = "original",
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = JORDAN,
        ns_dtype: torch.dtype | None = None,
        ns_eps: float = 1e-7,
        adam_lr: float | None = None,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        adam_weight_decay: float = 0.1,
        fused: bool = True,
        working_bytes: int = WORKING_BYTES,
        mesh: DeviceMesh | None = None,
    ) -> None:
        adam_lr = ADAM_SHARE[scaling] * lr if adam_lr is None else adam_lr
        adam = LocalAdamW(as_groups(others), adam_lr, adam_betas, adam_eps, adam_weight_decay, fused=fused)
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "ns_eps": ns_eps,
            "scaling": scaling,
        }
        groups = as_groups(matrices)
        super().__init__(groups, settings, WholeMatrices(matrices_in(groups), mesh), adam, working_bytes)
        self._ns_dtype = ns_dtype

    def step_matrices(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not trained:
            return
        gradients = {parameter: local_part(parameter.grad) for parameter in trained}
        averages = {parameter: local_part(self._average(parameter)) for parameter in trained}
        weights = {parameter: local_part(parameter) for parameter in trained}
        foreach_lerp_(list(averages.values()), list(gradients.values()), 1 - group["momentum"])
        # Decoupled: the decay is of the weight before the update, as in AdamW.
        foreach_mul_(list(weights.values()), 1 - group["lr"] * group["weight_decay"])
        # Nesterov's direction is the average with the present gradient once more; without it, the average alone.
        share = group["momentum"] if group["nesterov"] else 1.0
        dtype = self._dtype_for(weights[trained[0]])

        # This rank's part only. `each_matrix` gathers the parts on the matrix's owner, in the dtype of the iteration,
        # so that bfloat16 halves the communication too.
        def direction(parameter: Tensor, matrix: Matrix) -> Tensor:
            place = matrix.own_place
            return torch.lerp(gradients[parameter][place], averages[parameter][place], share).to(dtype)

        def directions_to_updates(owned: Sequence[Matrix], wholes: list[Tensor]) -> Sequence[Tensor]:
            return self.updates_of(group, owned, wholes)

        updates = self.each_matrix(trained, dtype, direction, directions_to_updates, stacked=newton_schulz.TOGETHER)
        for parameter, matrix, update in updates:
            rows, columns = matrix.shape
            rate = group["lr"] * scale_of(rows, columns, group["scaling"])
            weights[parameter][matrix.own_place].add_(update, alpha=-rate)

    def updates_of(self, group: dict[str, Any], owned: Sequence[Matrix], directions: list[Tensor]) -> Sequence[Tensor]:
        """Returns U, before rate and scale, of whole matrices that this rank owns. Subclasses may change it.

        Args:
            group: the group of parameters.
            owned: the matrices.
            directions: the momentum of each (rows, columns), in the dtype of the iteration and of the results.
        """
        return orthogonalise(directions, group["ns_coefficients"], group["ns_steps"], group["ns_eps"])

    def _dtype_for(self, weight: Tensor) -> torch.dtype:
        dtype = fast_dtype(weight.device) if self._ns_dtype is None else self._ns_dtype
        # ns_dtype float32 means full precision, so parameters in float64 keep theirs.
        return dtype if dtype == torch.bfloat16 else torch.promote_types(dtype, weight.dtype)

    def _average(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum_buffer"]
        return average
