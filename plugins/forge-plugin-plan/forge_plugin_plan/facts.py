"""A plan as plain types, for JSON. Bytes, FLOPs and seconds, all of one step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from attrs import asdict

from forge_core.parallel.layout import micro_batches
from forge_plugin_plan.bounds import bounds
from forge_plugin_plan.error import Error
from forge_plugin_plan.estimate import Plan
from forge_plugin_plan.machine import Machine
from forge_plugin_plan.simulate import RankPlan, Traffic
from forge_plugin_plan.storages import Purpose


def facts(plan: Plan, machine: Machine | None, error: Error | None = None) -> dict[str, Any]:
    """Returns the estimates; see `report` for the arguments."""
    train, (count, rows) = plan.job.train, micro_batches(plan.job, plan.layout)
    tokens = train.global_batch_size * train.seq_len
    # The outline describes the whole model, and is the same on all ranks
    per_token = plan.ranks[0].outline.flops
    return {
        "world_size": plan.layout.world_size,
        "layout": str(plan.layout),
        "device": plan.device,
        "precision": train.precision,
        "parameters": plan.parameters,
        "trained_parameters": plan.trained,
        "tokens": tokens,
        "micro_batches": count,
        "micro_batch_size": rows,
        "model_flops": per_token * tokens if per_token else None,
        "gpu": machine.name if machine else None,
        "gpu_memory": machine.memory if machine and math.isfinite(machine.memory) else None,
        "calibration": asdict(error) if error else None,
        "lines": [{"title": title, "text": text} for title, text in plan.lines],
        "ranks": [_rank(rank, machine) for rank in plan.ranks],
    }


def _rank(rank: RankPlan, machine: Machine | None) -> dict[str, Any]:
    memory, traffic = rank.memory, rank.traffic
    lower = bounds(rank, machine) if machine and traffic else None
    return {
        "rank": rank.rank,
        "pipeline_rank": rank.pipeline_rank,
        "state": {purpose.value: value for purpose, value in rank.training_state.items()},
        "peak": memory.peak if memory else None,
        "most": {purpose.value: memory.most[purpose] for purpose in Purpose} if memory else None,
        "at_peak": {purpose.value: memory.at_peak[purpose] for purpose in Purpose} if memory else None,
        "flops": traffic.flops if traffic else None,
        "sent": [*_sent(traffic)] if traffic else None,
        "seconds_at_least": {b.what: b.seconds for b in lower} if lower else None,
        "latency": {b.what: b.latency for b in lower if b.latency} if lower else None,
        "launches": traffic.launches if traffic else None,
        "compiled": rank.compiled,
        "failure": rank.failure,
    }


def _sent(traffic: Traffic) -> Iterator[dict[str, Any]]:
    for transfer, times in sorted(traffic.transfers.items(), key=str):
        if transfer.sent:
            line = str(traffic.lines[transfer.group])
            yield {"along": line, "kind": transfer.kind, "times": times, "bytes": transfer.sent * times}
