"""Optimizers on the device: updates against the CPU's, their duration and memory, and updates that are left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gpu.bench import Bench, missing, piece, relative_error
from gpu.runs import Steps, copy_weights, decoder, load, merged, steps_of

OPTIMIZERS: dict[str, tuple[dict[str, Any], float, str]] = {
    "adamw, fused": ({"type": "adamw"}, 1e-5, ""),
    "adamw, unfused": ({"type": "adamw", "fused": False}, 1e-5, ""),
    "lion": ({"type": "lion"}, 1e-5, ""),
    "lion, cautious": ({"type": "lion", "cautious": True}, 1e-5, ""),
    "muon": ({"type": "muon", "ns_dtype": "fp32"}, 1e-3, ""),
    "muon, bf16": ({"type": "muon", "ns_dtype": "bf16"}, 3e-2, ""),
    # A gradient has fewer rows than columns, so eigenvectors are any for most of the longer side.
    "soap": ({"type": "soap"}, 0.5, ""),
    "schedule-free": ({"type": "schedule_free_adamw"}, 1e-4, "schedulefree"),
    "adamw, 8 bits": ({"type": "adamw_8bit", "compile": False}, 5e-2, "torchao"),
    "adamw, float8": ({"type": "adamw_float8", "compile": False}, 5e-2, "torchao"),
    "adamw, 8 bits, compiled": ({"type": "adamw_8bit"}, 5e-2, "torchao"),
}
"""Table of the job, largest error of three updates, and the distribution that it needs."""
TABLE = "three updates against the CPU's"


@piece("optimizers", "updates against the CPU, fused or not; milliseconds and bytes; skipped updates without a wait")
def optimizers(bench: Bench) -> None:
    for name, (table, limit, needs) in OPTIMIZERS.items():
        if needs and missing([needs]):
            bench.row("not tried", optimizer=name, why=f"{needs} is not installed")
            continue
        if bench.tiny and name.endswith("compiled") and not bench.on_gpu:
            continue  # half a minute of C++
        with bench.case(name):
            _compare(bench, name, table, limit)
            _measure(bench, name, table)
    with bench.case("masked"):
        _masked(bench)


def _job(bench: Bench, table: dict[str, Any], small: bool, device: str = "") -> Any:
    changes: dict[str, Any] = {"optimizer": {"lr": 1e-3, **table}, "train": {"precision": "fp32"}}
    if table["type"].startswith("schedule_free"):
        changes["optimizer"].pop("lr")
    if device:
        changes["train"]["device"] = device
    sections = merged(decoder(bench), changes)
    if small:
        sections["model"] |= {"dim": 64, "layers": 2, "attention": {"heads": 4, "kv_heads": 2}, "ffn": {"hidden": 128}}
        sections["train"] |= {"seq_len": 64}
    return load(bench, sections)


def _draw(steps: Steps, number: int) -> None:
    """Gradients that are the same on every device."""
    generator = torch.Generator().manual_seed(number)
    for item in steps.run.parameters:
        item.parameter.grad = torch.randn(item.parameter.shape, generator=generator).to(item.parameter.device) * 1e-2


def _compare(bench: Bench, name: str, table: dict[str, Any], limit: float) -> None:
    with steps_of(_job(bench, table, True, "cpu")) as reference, steps_of(_job(bench, table, True)) as own:
        copy_weights(reference.run, own.run)
        start = _weights(reference)
        for number in range(3):
            for steps in (reference, own):
                _draw(steps, number)
                steps.run.optimizer.step()
        error = relative_error(_weights(own) - start, _weights(reference) - start)
    bench.within(TABLE, error, limit, optimizer=name)


def _weights(steps: Steps) -> torch.Tensor:
    """All parameters as one vector, on the CPU."""
    return torch.cat([item.parameter.detach().cpu().flatten() for item in steps.run.parameters])


def _measure(bench: Bench, name: str, table: dict[str, Any]) -> None:
    with steps_of(_job(bench, table, bench.tiny)) as steps:
        optimizer, parameters = steps.run.optimizer, list(steps.run.parameters)
        _draw(steps, 0)
        optimizer.step()  # makes its state
        bench.reset_peak()
        before = torch.cuda.memory_allocated() if bench.on_gpu else 0
        ms, peak = bench.milliseconds(optimizer.step), bench.peak_bytes()
        count = sum(item.parameter.numel() for item in parameters)
        tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        bench.row(
            "a step, and bytes a parameter",
            optimizer=name,
            parameters=count,
            ms=ms,
            state=sum(t.numel() * t.element_size() for t in tensors) / count,
            during=None if peak is None else (peak - before) / count,
        )


def _masked(bench: Bench) -> None:
    """An update that is left out on the device alone (torch's `found_inf`) changes nothing. On a CPU, where the host
    decides, the device's way is asked for."""
    with steps_of(_job(bench, {"type": "adamw"}, True)) as steps:
        stepper: Any = steps.stepper
        bench.check(not bench.on_gpu or stepper._masked, "fused AdamW on a GPU waits to decide on its update")
        stepper._masked, stepper.decides = True, False
        steps()
        before = [item.parameter.detach().clone() for item in steps.run.parameters]
        counts = [state["step"].clone() for state in steps.run.optimizer.state.values()]
        _draw(steps, 0)
        next(iter(steps.run.parameters)).parameter.grad.fill_(torch.nan)
        decided: Any = SimpleNamespace(grad_norm=stepper.norm(), requests=SimpleNamespace(skip=""))
        skipped = stepper.update(decided, torch.ones((), device=bench.device))
        same = all(torch.equal(item.parameter, old) for item, old in zip(steps.run.parameters, before, strict=True))
        counted = [state["step"] for state in steps.run.optimizer.state.values()]
        bench.check(bool(skipped), "a step with NaN was not marked as skipped")
        bench.check(same, "a masked update changed parameters")
        bench.check(all(map(torch.equal, counted, counts)), "a masked update was counted")
        bench.row("masked updates", parameters_unchanged=same)
