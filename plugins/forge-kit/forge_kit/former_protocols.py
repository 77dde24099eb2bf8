"""Protocols of version 0.1, each of one method that a model may have; `forge_core.contracts.model.Model` has them now.

`forge_core.protocols` has them until version 0.3.
"""

from __future__ import annotations

from types import new_class
from typing import Any, Protocol, runtime_checkable

from forge_core.contracts.model import Model

_FORMER = {
    "Prepares": "prepare",
    "PreparesSequences": "prepare_sequences",
    "HasSequenceEntries": "sequence_entries",
    "HasFlops": "flops",
    "HasLayerFlops": "layer_flops",
    "HasRoles": "parameter_roles",
    "HasTies": "tied_parameters",
    "HasTensorParallelPlan": "tensor_parallel_plan",
    "HasSequenceMixers": "sequence_mixers",
    "HasExpertStacks": "expert_stacks",
    "HasEnds": "ends",
    "HasFurtherBlocks": "further_blocks",
    "HasFSDPUnits": "fsdp_units",
    "HasFloat8Exemptions": "float8_exempt",
    "HasBackendChoices": "backend_choices",
}
"""Name of the protocol -> the method."""


def __getattr__(name: str) -> Any:
    if name not in _FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    method = {_FORMER[name]: getattr(Model, _FORMER[name])}
    return runtime_checkable(new_class(name, (Protocol,), exec_body=lambda body: body.update(method)))
