"""Stages that need torch alone: `fsdp`, `tp`, `pp`, `cp`, `ep` and `activation_checkpointing`."""

from forge_plugin_parallel.activation_checkpointing import ActivationCheckpointing
from forge_plugin_parallel.cp import ContextParallel
from forge_plugin_parallel.dispatchers import AllGather, AllToAll, DispatcherComponent
from forge_plugin_parallel.ep import ExpertParallel
from forge_plugin_parallel.fsdp import FSDP
from forge_plugin_parallel.pp import PipelineParallel
from forge_plugin_parallel.tp import TensorParallel

__all__ = [
    "FSDP",
    "ActivationCheckpointing",
    "AllGather",
    "AllToAll",
    "ContextParallel",
    "DispatcherComponent",
    "ExpertParallel",
    "PipelineParallel",
    "TensorParallel",
]
