"""Short runs on several ranks, each with a device of its own, under every stage that divides a model or its memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forge_core import Job
from forge_plugin_compile.offload import saved_tensors
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_resilience.health import stragglers
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, train
from forge_testing.layouts import LAYOUTS, LayoutCase
from forge_testing.pretend import NAME, PretendTensor
from forge_testing.processes import run_in_turn_on_ranks
from gpu.whole_runs import Outcome, train_all

CASES: Mapping[str, LayoutCase] = {
    **{name: LAYOUTS[name] for name in ("tp2", "pp2", "cp2", "hsdp2x2")},
    "recomputed_and_on_the_host": LayoutCase(
        ranks=2, parallel={"fsdp": {"offload": True}, "ep": {"degree": 2}, "activation_checkpointing": {}}
    ),
    "gathered": LayoutCase(ranks=2, parallel={"fsdp": {}, "ep": {"degree": 2, "dispatcher": {"type": "all_gather"}}}),
    "offloaded": LayoutCase(ranks=2, parallel={"fsdp": {}, "activation_offload": {"min_mb": 0}}),
}

MODEL = Transformer(
    dim=16,
    layers=2,
    vocab_size=32,
    attention=GroupedQueryAttention(heads=4, kv_heads=2),
    ffn=MoE(experts=4, hidden=16, router=SigmoidTopK(bias_rate=0.01)),
)


def job_of(layout: str, device: str, folder: Path) -> Job:
    """Two steps in float64 under a layout; empty: in one process."""
    changes: dict[str, Any] = dict(CASES[layout].changes(installed())) if layout else {}
    return tiny_job(
        str(folder),
        installed(),
        precision="fp64",
        global_batch_size=8,
        steps=2,
        seq_len=16,
        device=device,
        gc_interval=0,
        model=MODEL,
        data={"sources": (Numbers(ignored=7, held_out=5),)},
        **changes,
    )


def curve(layout: str, device: str, rank: int = 0) -> Curve | None:
    """The curve, on rank 0: all ranks have the same whole tensors."""
    # Tensors of the device are no plain ones, as a GPU's are: offloading would leave them where they are
    plain = (*saved_tensors.PLAIN, PretendTensor)
    with tempfile.TemporaryDirectory() as folder, patch.object(saved_tensors, "PLAIN", plain):
        found = train(job_of(layout, device, Path(folder)), installed())
    return None if rank else found.on_host()


def compared(folder: str, rank: int) -> Outcome:
    """A whole run on two ranks with the hooks that compare them."""
    with patch.object(stragglers, "MATMUL", (64, 64)):  # a product for GPUs takes minutes here
        return train_all(folder, NAME, ["ranks"])["ranks"]


def results_on_devices(folder: str) -> dict[str, Any]:
    """By layout, the curve or why there is none, and by `ranks` the outcome of a whole run in a folder of data.

    On ranks that are forked here, before this process uses its device.
    """
    found: dict[str, Any] = {}
    for ranks in (2, 4):
        tasks: dict[str, Callable[[int], Any]] = {
            name: partial(curve, name, NAME) for name, case in CASES.items() if case.ranks == ranks
        }
        if ranks == 2:
            tasks["ranks"] = partial(compared, folder)
        done, error = run_in_turn_on_ranks(ranks, list(tasks.values()))
        found |= {name: results[0] for name, results in zip(tasks, done, strict=False)}
        found |= dict.fromkeys(list(tasks)[len(done) :], error)
    return found
