"""Writes samples to a folder of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contracts.errors import JobError, Problem
from forge_core.parallel.mesh import global_rank
from forge_plugin_taps.kinds import Sink

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_taps.kinds import TapsInfo
    from forge_plugin_taps.samples import Sample
    from forge_plugin_taps.store import Store

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
"""Names of safetensors."""


class StoreWriter(Sink):
    """See `Store`."""

    def __init__(self, component: Store, context: BuildContext, taps: TapsInfo) -> None:
        if context.folder is None:
            raise JobError([Problem("parallel.taps.sinks", "a store needs a run folder; set job.output")])
        self._folder = context.folder / "taps"

    def consume(self, sample: Sample) -> None:
        step = self._folder / f"step-{sample.step}"
        if global_rank() == 0:
            step.mkdir(parents=True, exist_ok=True)
            _write(step / "tokens.safetensors", dict(sample.tokens))
        for name in sample.points:
            whole = sample.gather(name, to=0)
            if whole is not None:
                _write(step / f"{name}.safetensors", {name: whole.cpu()})


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file."""
    header: dict[str, object] = {}
    begin = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.nbytes],
        }
        begin += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
