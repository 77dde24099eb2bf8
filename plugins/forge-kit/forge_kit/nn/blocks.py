"""The blocks of a model that stages wrap one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from forge_core.contracts.model import Model


def blocks_of(model: Model) -> list[nn.Module]:
    """Returns the layers, then the blocks of `Model.further_blocks`; in a pipeline, only the ones on this rank."""
    return [*model.layers.values(), *further_blocks(model)]


def further_blocks(model: Model) -> list[nn.Module]:
    """Returns the blocks of `Model.further_blocks`, run by `embed` or `finish`; in a pipeline, only this rank's."""
    return [model.get_submodule(name) for name in model.further_blocks()]
