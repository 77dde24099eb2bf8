"""Laws of the loss: how it falls with parameters and tokens. Kind `law`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from forge_core import Component

# numpy is imported where it computes: a job with the hook `branch_points` imports this package to be checked
if TYPE_CHECKING:
    from forge_plugin_ladder.values import Values


@frozen(kw_only=True)
class Sizes:
    """What a law is a function of; arrays (P,) of one length, P points."""

    parameters: Values
    tokens: Values
    unique_tokens: Values


@frozen(kw_only=True)
class Law(Component):
    """A form of the loss: a sum of terms, each a coefficient times a function of few exponents.

    Given the exponents, the coefficients follow from linear least squares (variable projection, Golub and Pereyra
    1973), so that a fit searches for the exponents alone.
    """

    kind = "law"

    coefficients: ClassVar[tuple[str, ...]]
    """Names of the coefficients, none of them negative. The first is the loss that remains, with a term of 1."""
    exponents: ClassVar[Mapping[str, tuple[float, float]]]
    """Names of the exponents, each with the least and the largest value that is searched."""
    source: ClassVar[str]
    """Paper and equation."""

    def terms(self, exponents: Values, sizes: Sizes) -> Values:
        """Returns each coefficient's factor at each point: (P, coefficients), positive.

        Args:
            exponents: (exponents,), in the order of their names.
            sizes: of the points.
        """
        raise NotImplementedError

    def loss(self, coefficients: Values, exponents: Values, sizes: Sizes) -> Values:
        """Returns the loss at each point: (P,)."""
        return self.terms(exponents, sizes) @ coefficients


@frozen(kw_only=True)
class Additive(Law):
    """L = E + A / N^alpha + B / D^beta, for N parameters and D tokens that are not repeated."""

    coefficients = ("E", "A", "B")
    exponents = {"alpha": (0.02, 2.0), "beta": (0.02, 2.0)}
    source = "Hoffmann et al. 2022 (arXiv:2203.15556), equation 2"

    def terms(self, exponents: Values, sizes: Sizes) -> Values:
        import numpy as np

        alpha, beta = exponents
        return np.stack([np.ones_like(sizes.tokens), sizes.parameters**-alpha, sizes.tokens**-beta], axis=1)


@frozen(kw_only=True)
class Repeated(Law):
    """The additive law over data that repeats: D is replaced by U + U r (1 - exp(-(D / U - 1) / r)).

    U are the unique tokens: a token that is seen again is worth less each time, and repetition adds r U tokens at most.
    """

    coefficients = ("E", "A", "B")
    exponents = {"alpha": (0.02, 2.0), "beta": (0.02, 2.0), "r": (0.5, 60.0)}
    source = "Muennighoff et al. 2023 (arXiv:2305.16264), equation 5, without the decay of parameters"

    def terms(self, exponents: Values, sizes: Sizes) -> Values:
        import numpy as np

        # expm1, as r (1 - exp(-x / r)) is x for the largest r, where exp would round
        alpha, beta, r = exponents
        # Of tokens that are not all used, only those that are
        unique = np.minimum(sizes.unique_tokens, sizes.tokens)
        worth = unique * (1 - r * np.expm1(-(sizes.tokens / unique - 1) / r))
        return np.stack([np.ones_like(worth), sizes.parameters**-alpha, worth**-beta], axis=1)
