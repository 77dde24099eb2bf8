"""What a rank computes in a step, by the model's own count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forge_core.devices import query_device
from forge_core.metrics.flops import peak_flops

if TYPE_CHECKING:
    from forge_core.contracts.contexts import TrainContext
    from forge_core.contracts.model import Model


def model_facts(context: TrainContext, step: int) -> dict[str, Any]:
    """Returns layout, device and FLOPs of a step (from 1) on this rank, as plain types; None for unknown values."""
    assert context.build is not None
    job, layout, device = context.job, context.build.layout, context.build.device
    tokens = job.train.batch_size(step) * job.train.seq_len / layout.run[1]
    # Of each layer a rank computes an equal share of the tokens, or with `tp` of the products.
    share = tokens * layout.pp / layout.world_size
    layers = layer_flops(context.model, job.train.seq_len)
    whole = context.model.flops(job.train.seq_len) if layout.pp == 1 else None  # a pipeline rank has only some parts
    return {
        "layout": str(layout),
        "world_size": layout.world_size,
        "device": query_device(device, "get_device_name") or device.type,
        "precision": job.train.precision,
        "tokens": tokens,
        "peak_flops": peak_flops(job, device),
        "layer_flops": {f"layers.{name}": share * value for name, value in layers.items()},
        "flops": whole and share * whole,
    }


def layer_flops(model: Model, seq_len: int) -> dict[str, float]:
    """Returns FLOPs a token, forward and backward, of each of this rank's layers by its key."""
    stated = model.layer_flops(seq_len)
    if stated is None:  # then by their weights, as the contract has it
        # A weight takes 2 FLOPs a token forward and 4 backward; vectors take part in no product
        return {name: 6.0 * sum(p.numel() for p in layer.parameters() if p.ndim > 1) for name, layer in _layers(model)}
    by_number = len(stated) != len(model.layers)  # a model cut by a pipeline may still state the FLOPs of all layers
    return {name: float(stated[int(name) if by_number else i]) for i, (name, _) in enumerate(_layers(model))}


def _layers(model: Model) -> list[tuple[str, torch.nn.Module]]:
    return [*model.layers.items()]
