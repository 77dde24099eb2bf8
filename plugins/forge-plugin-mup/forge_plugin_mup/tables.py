"""Tables of the parametrisations: factors on initial values, rate, decay and epsilon of a parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from attrs import frozen

from forge_plugin_mup.shapes import Place

Parametrization = Literal["mup", "complete_p", "u_mup"]
UpdateSize = Callable[[str, int, int], float]
"""See `forge_kit.optim.update_size.HasUpdateSize`."""
READERS = ("head", "router")
"""Roles of matrices whose outputs do not grow with the width: logits."""


@frozen(order=True)
class Factors:
    """Relative to the base model, for one parameter."""

    rate: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0
    initial: float = 1.0

    def __str__(self) -> str:
        named = {"rate": self.rate, "weight decay": self.decay, "epsilon": self.epsilon, "initial values": self.initial}
        return ", ".join(f"{name} x {value:.4g}" for name, value in named.items() if value != 1) or "as in the base"


def initial(place: Place) -> float:
    """Returns the factor on the initial values of a parameter, which does not depend on the optimizer."""
    ratio = place.input_ratio
    # Logits are a sum over features that agree once trained: 1 / r, where a sum of random terms has 1 / sqrt(r)
    return place.absorbed / (ratio if place.role in READERS else math.sqrt(ratio))


def factors(place: Place, size: UpdateSize, depth: float, parametrization: Parametrization) -> Factors:
    """Returns the factors of a parameter.

    A factor c on what a parameter computes is absorbed by its values, so that the forward pass stays as it is, and so
    do kernels, exports and generation. The training is the same: with c in the forward pass, gradients of W are c times
    as large; for V = c W, rate, epsilon and decay are c, 1 / c and 1 / c times as large (Yang and Hu 2021, arXiv
    2011.14522, on the symmetry of parametrisations).

    Args:
        place: sizes here and in the base, and the factors that are absorbed.
        size: of the optimizer's updates.
        depth: layers relative to the base; of `u_mup` all, as the base is of width and depth 1.
        parametrization: the table.
    """
    # What a parameter computes changes as much as in the base: the papers' factor on the rate, by optimizer
    rate = size(place.role, place.base_outputs, place.base_inputs) / size(place.role, place.outputs, place.inputs)
    rate *= place.absorbed
    epsilon = 1.0
    if parametrization == "u_mup":
        # Table 2 of Blake et al.: paths of a deep model move together, and rows of a wide embedding share one gradient
        rate /= math.sqrt(depth) if place.in_block else 1
        rate /= math.sqrt(place.outputs) if place.role == "embedding" else 1
    if parametrization != "mup":
        # As the elements of gradients: each output of a wider model has a smaller part in the loss, and so has a block
        # of a deeper one
        epsilon = 1 / (place.output_ratio * (depth if place.in_block else 1) * place.absorbed)
    # Decoupled decay is multiplied by the rate: what a step takes away, rate times decay, stays as it is
    return Factors(rate=rate, decay=1 / rate, epsilon=epsilon, initial=initial(place))
