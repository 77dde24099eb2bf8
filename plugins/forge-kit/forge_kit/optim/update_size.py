"""How large the updates of an optimizer are, for rules by which rates follow from the width of a model."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

HIDDEN = ("matrix", "stack", "fused")
"""Roles of the matrices of hidden layers."""


@runtime_checkable
class HasUpdateSize(Protocol):
    """A component of kind `optimizer` that declares how its updates grow with the sizes of a matrix.

    One that does not is refused by `forge-plugin-mup`. A class attribute `adam_rule = True` further declares that every
    parameter is stepped by AdamW, with `betas` and `eps` in its groups, so that rules for batch and length apply.
    """

    # Of the component and not of the optimizer that it builds: a check of the job builds no optimizer.
    def update_size(self, role: str, outputs: int, inputs: int) -> float:
        """Returns by how much an update at rate 1 changes what a parameter computes, up to a constant.

        It is the largest factor from the root mean square of inputs to that of the change of outputs, for the update of
        a gradient of low rank: the operator norm that the spectral condition has (Yang et al. 2023, arXiv 2310.17813).

        Args:
            role: of the parameter, see `forge_core.contracts.model.ROLES`.
            outputs: rows of the matrix; the size of a vector or of an embedding.
            inputs: columns of the matrix; 1 of a vector or an embedding, which looks one row up.
        """
        ...


def elementwise(inputs: int) -> float:
    """`update_size` of optimizers whose elements all move by about the rate, as Adam's and Lion's do."""
    # The elements of such an update that meet one output add up, as they all have the sign of their gradient
    return float(inputs)
