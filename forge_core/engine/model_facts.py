"""Facts of a whole model, taken before stages change it: a pipeline rank keeps only some of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import nn

from forge_core.checkpoint.state import model_tensors
from forge_core.contracts.model import HasBackendChoices, Role
from forge_core.contracts.parameters import roles_of
from forge_core.metrics.flops import flops_per_token
from forge_core.parallel.initialise import ties

if TYPE_CHECKING:
    from forge_core.contracts.model import Model


@frozen(kw_only=True)
class Outline:
    """Facts of the bare model."""

    roles: Mapping[str, Role]
    """Role of each parameter, by name."""
    sizes: Mapping[str, int]
    """Elements of each parameter, by name; tied ones once."""
    tensors: Mapping[str, torch.Size]
    """Shapes of parameters and persistent buffers, by name; tied ones once."""
    ties: Mapping[str, str]
    """Other names of tied parameters, with the name under which each is listed."""
    flops: float | None
    """Model FLOPs a token at the job's sequence length, if the model states them."""
    backend_choices: Sequence[tuple[str, str, str]]
    """Kernels that the model chose: (what, choice, why)."""

    @classmethod
    def of(cls, model: Model, seq_len: int) -> Outline:
        """
        Raises:
            ForgeError: the model declares roles wrongly.
        """
        assert isinstance(model, nn.Module)
        return cls(
            roles=roles_of(model),
            sizes={name: parameter.numel() for name, parameter in model.named_parameters()},
            tensors={name: tensor.shape for name, tensor in model_tensors(model).items()},
            ties=ties(model),
            flops=flops_per_token(model, seq_len),
            backend_choices=model.backend_choices(seq_len) if isinstance(model, HasBackendChoices) else (),
        )
