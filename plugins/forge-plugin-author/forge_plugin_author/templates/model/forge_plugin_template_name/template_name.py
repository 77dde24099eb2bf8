"""The component template_name: its keys in a job file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core import ModelComponent, Problem

if TYPE_CHECKING:
    from forge_core import Job
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model


@frozen(kw_only=True)
class TemplateName(ModelComponent):
    """A small transformer without positions: causal attention and a feed-forward part in each layer, norms before."""

    vocab_size: int = field(validator=ge(1))
    """Number of ids, from 0."""
    dim: int = field(default=64, validator=ge(1))
    """Width of the activations."""
    layers: int = field(default=4, validator=ge(1))
    """Number of pairs of attention and feed-forward part."""
    heads: int = field(default=4, validator=ge(1))
    """Heads of attention; `dim` must be a multiple."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.dim % self.heads:
            yield Problem("heads", f"{self.heads} do not divide dim = {self.dim}; choose a divisor")

    def build(self, context: BuildContext) -> Model:
        from forge_plugin_template_name.network import Network

        return Network(self.vocab_size, self.dim, self.layers, self.heads, context.dtype)
