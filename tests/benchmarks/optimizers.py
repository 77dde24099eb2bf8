"""Step time and memory of each optimizer against the best public implementation, in one run.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python tests/benchmarks/optimizers.py [--millions 10 100] [--only lion …]

All step the same parameters, of a decoder's shapes, with the same gradients. They take turns, each round in another
order, so that a busy neighbour slows all of them; times are medians, ratios those of the medians. `state` is what an
optimizer keeps, `step` what it needs beyond that during a step, both in bytes a parameter. The reference of a ratio is
the fastest other implementation. To compare another optimizer, add it to CONTENDERS.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lion_pytorch
import pytorch_optimizer
import schedulefree
import torch
import torchao.optim
from attrs import define, field
from lion_pytorch.cautious_lion import Lion as CautiousLion
from lion_pytorch.foreach import Lion as ForeachLion
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from forge_core.contracts.components import OptimizerComponent
from forge_core.contracts.optimizer import NamedParameter, NamedParameters
from forge_plugin_adamw import AdamW
from forge_plugin_lion import Lion
from forge_plugin_lowbit import AdamW4bit, AdamW8bit, AdamWBF16, AdamWFloat8
from forge_plugin_muon import Muon
from forge_plugin_schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from forge_plugin_soap import SOAP

Make = Callable[[NamedParameters], torch.optim.Optimizer]


def ours(component: OptimizerComponent, device: str = "cpu") -> Make:
    job = SimpleNamespace(job=SimpleNamespace(seed=1))
    context: Any = SimpleNamespace(device=torch.device(device), mesh=None, job=job)
    return lambda parameters: component.build(context, parameters)


def public(make: Callable[..., torch.optim.Optimizer], **keys: Any) -> Make:
    """Another implementation, with the groups of `NamedParameters.groups`."""
    return lambda parameters: make(parameters.groups(0.1), lr=1e-4, **keys)


class Both:
    """An optimizer of matrices, and torch's fused AdamW of the rest."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], parameters: NamedParameters, **keys: Any) -> None:
        matrices = [item.parameter for item in parameters if item.role == "matrix"]
        others = NamedParameters([item for item in parameters if item.role != "matrix"])
        adam = torch.optim.AdamW(others.groups(0.1), lr=1e-4, fused=True)
        self._optimizers = make(matrices, lr=1e-4, weight_decay=0.1, **keys), adam

    @property
    def state(self) -> Mapping[Tensor, Any]:
        return {parameter: state for each in self._optimizers for parameter, state in each.state.items()}

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


def of_matrices(make: Callable[..., torch.optim.Optimizer], **keys: Any) -> Make:
    """Another implementation, for the matrices alone."""
    return lambda parameters: Both(make, parameters, **keys)  # type: ignore[return-value]


def averaging(make: Callable[..., torch.optim.Optimizer], **keys: Any) -> Make:
    """Another implementation that has to be told that it trains."""

    def made(parameters: NamedParameters) -> torch.optim.Optimizer:
        optimizer = make(parameters.groups(0.1), lr=1e-4, **keys)
        optimizer.train()  # type: ignore[attr-defined]
        return optimizer

    return made


NARROW = "adamw_bf16, bf16 parameters"

CONTENDERS: Mapping[str, Mapping[str, Make]] = {
    "adamw": {
        "forge": ours(AdamW(lr=1e-4)),
        "torch fused": public(torch.optim.AdamW, fused=True),
        "torch foreach": public(torch.optim.AdamW, foreach=True),
    },
    "lion": {
        "forge": ours(Lion(lr=1e-4)),
        "lion-pytorch": public(lion_pytorch.Lion),
        "lion-pytorch foreach": public(ForeachLion),
    },
    "lion, cautious": {
        "forge": ours(Lion(lr=1e-4, cautious=True)),
        "lion-pytorch": public(CautiousLion),
    },
    "muon": {
        "forge": ours(Muon(lr=1e-4)),
        "torch": of_matrices(torch.optim.Muon),
    },
    "soap": {
        "forge": ours(SOAP(lr=1e-4)),
        "pytorch-optimizer": of_matrices(pytorch_optimizer.SOAP),
    },
    "schedule_free_adamw": {
        "forge": ours(ScheduleFreeAdamW(lr=1e-4)),
        "schedulefree": averaging(schedulefree.AdamWScheduleFree),
    },
    "schedule_free_sgd": {
        "forge": ours(ScheduleFreeSGD(lr=1e-4)),
        "schedulefree": averaging(schedulefree.SGDScheduleFree, momentum=0.9),
    },
    "adamw_8bit": {
        "forge": ours(AdamW8bit(lr=1e-4)),
        "torchao": public(torchao.optim.AdamW8bit),
    },
    "adamw_4bit": {
        "forge": ours(AdamW4bit(lr=1e-4)),
        "torchao": public(torchao.optim.AdamW4bit),
    },
    "adamw_float8": {
        "forge": ours(AdamWFloat8(lr=1e-4)),
        "torchao": public(torchao.optim.AdamWFp8),
    },
    "adamw_bf16": {
        "forge": ours(AdamWBF16(lr=1e-4)),
        "torch fused, float32": public(torch.optim.AdamW, fused=True),
    },
    NARROW: {
        "forge": ours(AdamWBF16(lr=1e-4, parameter_dtype="bf16")),
        "torchao": public(torchao.optim._AdamW, bf16_stochastic_round=True),
    },
}
"""For each optimizer its implementations: `forge` and the others."""


def decoder(millions: int, device: str, dtype: torch.dtype = torch.float32) -> NamedParameters:
    """Parameters of a decoder with about so many million of them, each with a gradient."""
    dim, vocabulary = (256, 8192) if millions < 50 else (768, 16384)
    named = {"embedding.weight": ((vocabulary, dim), "embedding"), "head.weight": ((vocabulary, dim), "head")}
    a_layer = 12 * dim * dim
    for layer in range(max(1, round((millions * 1e6 - 2 * vocabulary * dim) / a_layer))):
        named |= {f"layers.{layer}.attention.{name}": ((dim, dim), "matrix") for name in "qkvo"}
        named |= {f"layers.{layer}.ffn.{name}": ((8 * dim // 3, dim), "matrix") for name in ("gate", "up")}
        named[f"layers.{layer}.ffn.down"] = ((dim, 8 * dim // 3), "matrix")
        named |= {f"layers.{layer}.{name}_norm.weight": ((dim,), "norm") for name in ("attention", "ffn")}
    parameters = []
    for name, (shape, role) in named.items():
        parameter = nn.Parameter((torch.randn(shape, device=device) / dim**0.5).to(dtype))
        parameter.grad = torch.randn_like(parameter)
        parameters.append(NamedParameter(name, parameter, role))  # type: ignore[arg-type]
    return NamedParameters(parameters)


@define
class Contender:
    """An implementation, and what was measured of it."""

    name: str
    optimizer: torch.optim.Optimizer
    step_bytes: float = 0.0
    seconds: list[float] = field(factory=list)

    @property
    def state_bytes(self) -> int:
        leaves = tree_leaves(list(self.optimizer.state.values()))
        return sum(bytes_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def time(self, device: str) -> None:
        _wait(device)
        started = time.perf_counter()
        self.optimizer.step()
        _wait(device)
        self.seconds.append(time.perf_counter() - started)


def bytes_of(tensor: Tensor) -> int:
    """Of what holds its values, which for torchao's quantised tensors are other tensors."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def peak_growth(call: Callable[[], Any], device: str) -> float:
    """Bytes by which memory grows at most during `call`: the resident set on a CPU, else what torch has allocated."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # give back what earlier calls freed
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match
    return 1024 * int(match[1])


def measure(implementations: Mapping[str, Make], parameters: NamedParameters, rounds: int, device: str) -> None:
    contenders = [Contender(name, make(parameters)) for name, make in implementations.items()]
    for contender in contenders:
        contender.optimizer.step()  # makes the state
        contender.step_bytes = peak_growth(contender.optimizer.step, device)
    for _ in range(rounds):
        for contender in random.sample(contenders, len(contenders)):
            contender.time(device)
    report(contenders, sum(item.parameter.numel() for item in parameters))


def report(contenders: Iterable[Contender], count: int) -> None:
    by_name = {contender.name: contender for contender in contenders}
    reference = min(other.median for name, other in by_name.items() if name != "forge")
    print("| implementation | ms | of the best other | state | step |\n|---|---|---|---|---|")
    for name, one in by_name.items():
        ratio, state, step = one.median / reference, one.state_bytes / count, one.step_bytes / count
        print(f"| {name} | {one.median * 1e3:.1f} | {ratio:.2f} | {state:.1f} | {step:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, nargs="+", default=[10, 100], help="parameters")
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    for millions in arguments.millions:
        for name in arguments.only:
            parameters = decoder(millions, arguments.device, torch.bfloat16 if name == NARROW else torch.float32)
            count = sum(item.parameter.numel() for item in parameters)
            print(f"\n{name}, {count / 1e6:.1f} million parameters, {torch.get_num_threads()} threads")
            measure(CONTENDERS[name], parameters, arguments.rounds, arguments.device)


if __name__ == "__main__":
    main()
