"""A model with experts, for routers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import ModelComponent, RouterComponent
from forge_core.contracts.errors import Problem
from forge_testing.tiny import VOCABULARY

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.job import Job


@frozen(kw_only=True)
class RoutedModel(ModelComponent):
    """`TinyModel` with experts in each layer, for tests of routers.

    Every expert computes every token, which only a model this small can afford.
    """

    router: RouterComponent
    """Assigns tokens to experts."""
    experts: int = field(default=4, validator=ge(1))
    """Number of experts in a layer."""
    dim: int = 16
    layers: int = 2

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        yield from (problem.below("router") for problem in self.router.expert_problems(self.experts))

    def build(self, context: BuildContext) -> Model:
        from forge_testing.routed_model import RoutedNetwork

        routers = [
            context.at(f"layers.{number}", layer=number).build(self.router, dim=self.dim, experts=self.experts)
            for number in range(self.layers)
        ]
        return RoutedNetwork(self.dim, self.experts, routers, VOCABULARY, context.dtype)
