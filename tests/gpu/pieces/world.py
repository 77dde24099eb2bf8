"""A world of one rank: the process groups of a GPU run, fsdp of one, and parameters on the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.launch.watchdog import unfinished_collectives
from forge_core.parallel.mesh import any_rank, gather_objects
from forge_plugin_parallel import collectives
from gpu.bench import Bench, piece, relative_error
from gpu.runs import copy_weights, decoder, load, merged, steps_of, train


@piece("world", "NCCL with a world of one, fsdp of one against none, parameters offloaded to the host")
def world(bench: Bench) -> None:
    if not bench.on_gpu:
        bench.notes.append("gloo in the place of NCCL: there is no CUDA device.")
    for precision, limit in (("fp32", 1e-5), ("bf16", 3e-2)):
        with bench.case(f"fsdp of one, {precision}"):
            _fsdp(bench, precision, limit)
    for part in (_collectives, _offload):
        with bench.case(part.__name__):
            part(bench)


def _fsdp(bench: Bench, precision: str, limit: float) -> None:
    """Two steps with fsdp over one rank, against the same without."""
    numerics = {"precision": precision}
    jobs = [load(bench, decoder(bench, train=numerics, parallel=stages)) for stages in ({}, {"fsdp": {}})]
    with steps_of(jobs[0]) as plain, steps_of(jobs[1]) as sharded:
        copy_weights(plain.run, sharded.run)
        pairs = [(plain(), sharded()) for _ in range(2)]
    for number, (expected, found) in enumerate(pairs, 1):
        for what, own, reference in zip(("loss", "gradient norm"), found, expected, strict=True):
            own = own.full_tensor() if hasattr(own, "full_tensor") else own
            cells: dict[str, Any] = {"precision": precision, "step": number, "what": what}
            bench.within("fsdp of one against none", relative_error(own, reference), limit, **cells)


def _collectives(bench: Bench) -> None:
    """Everything that stages send, over the group of all ranks; a world of one gives back what it sends."""
    group = dist.group.WORLD
    assert group is not None
    bench.row("process group", backends=str(dist.get_backend_config()), ranks=dist.get_world_size())
    x = torch.randn(64, 32, device=bench.device)
    sends: dict[str, Callable[[Tensor], Tensor]] = {
        "all_gather": lambda x: collectives.all_gather(x, 0, group),
        "reduce_scatter": lambda x: collectives.reduce_scatter(x, 0, group),
        "all_reduce": lambda x: collectives.all_reduce(x, group),
        "all_to_all": lambda x: collectives.all_to_all(x, 0, 1, group),
        "exchange_rows": lambda x: collectives.exchange_rows(x, [64], [64], group),
        "send_rows": lambda x: collectives.send_rows(x, [64], [64], group)(),
    }
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    for name, send in sends.items():
        for dtype in dtypes:
            value = x.mul(100).to(dtype)
            bench.within("collectives", relative_error(send(value), value), 0.0, what=name, dtype=str(dtype))
    if bench.on_gpu:  # gloo sends no float8
        value = x.to(torch.float8_e4m3fn)
        gathered = collectives.all_gather(value, 0, group).float()
        bench.within(
            "collectives", relative_error(gathered, value.float()), 0.0, what="all_gather", dtype="float8_e4m3fn"
        )
    bench.check(gather_objects({"a": [1]}) == [{"a": [1]}], "objects are not gathered")
    bench.check(any_rank([True, False]) == [True, False], "flags on the host are not reduced by gloo")
    dist.all_gather_object([None], "an object", group)
    bench.synchronize()
    bench.row("flight recorder", unfinished=unfinished_collectives() or "none")


def _offload(bench: Bench) -> None:
    """A whole run with parameters, gradients and optimizer state on the host: its metrics come from both."""
    changes = {"train": {"steps": 3}, "parallel": {"fsdp": {"offload": True}}, "checkpoint": {"interval": 0}}
    sections = merged(decoder(bench), changes)
    if not bench.tiny:
        sections["model"] |= {"dim": 256, "layers": 4}
    summary = train(load(bench, sections))
    lines = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    norms = [line["grad_norm"] for line in lines if "grad_norm" in line]
    bench.check(len(norms) == 3 and all(norm > 0 for norm in norms), f"offloaded: gradient norms are {norms}")
    bench.row("parameters on the host", loss=summary.loss, grad_norm=norms[-1] if norms else None)
