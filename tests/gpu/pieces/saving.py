"""Asynchronous saves: how long training stands still, how much slower the steps are meanwhile, and that a run which
continues from one makes the same losses to the bit."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from attrs import define

from forge_core import TrainingHook
from gpu.bench import Bench, piece
from gpu.runs import decoder, load, merged, train


@piece("saving", "asynchronous saves beside steps, and exact resume from one")
def saving(bench: Bench) -> None:
    for name, asynchronous in (("written at once", False), ("written in the background", True)):
        with bench.case(name):
            _measure(bench, name, asynchronous)
    with bench.case("resume"):
        _resume(bench)


@define(kw_only=True, slots=False)
class Clock(TrainingHook):
    """When each step ended, and which steps were saved when."""

    def __attrs_post_init__(self) -> None:
        self.began: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.saved: dict[int, float] = {}

    def on_step_begin(self, context: Any) -> None:
        self.began[context.step] = time.perf_counter()

    def on_step_end(self, context: Any) -> None:
        self.ended[context.step] = time.perf_counter()

    def on_checkpoint_save(self, context: Any) -> None:
        self.saved[context.step] = time.perf_counter()


def _measure(bench: Bench, name: str, asynchronous: bool) -> None:
    """A save after the eighth step of 24; steps before and after it."""
    steps, at = bench.size(24, 8), bench.size(8, 4)
    changes: dict[str, Any] = {"train": {"steps": steps, "non_finite": "stop"}, "job": {"name": name.replace(" ", "-")}}
    changes["checkpoint"] = {"interval": at, "async_save": asynchronous, "keep": 1}
    clock = Clock()
    summary = train(load(bench, merged(decoder(bench), changes)), clock)
    gaps = {step: clock.began[step + 1] - clock.ended[step] for step in range(1, steps)}
    durations = {step: clock.ended[step] - clock.began[step] for step in clock.began}
    written = clock.saved[at] - clock.ended[at]
    during = [durations[s] for s in durations if clock.ended[at] < clock.began[s] < clock.saved[at]]
    quiet = [durations[s] for s in range(3, at + 1)]
    usual = statistics.median(gap for step, gap in gaps.items() if step % at)
    size = sum(path.stat().st_size for path in _newest(summary.folder).iterdir() if path.is_file())
    bench.row(
        "a save",
        save=name,
        gb=size / 1e9,
        blocked_s=gaps[at] - usual,
        until_written_s=written,
        gb_per_s=size / 1e9 / written,
        step_ms=statistics.median(quiet) * 1e3,
        step_ms_meanwhile=statistics.median(during) * 1e3 if during else None,
    )


def _newest(folder: Path) -> Path:
    return max(path.parent for path in folder.rglob("manifest.json"))


def _resume(bench: Bench) -> None:
    """Six steps at once, against a run that ends after its asynchronous save of the third and continues."""
    small = {"dim": 128, "layers": 2, "attention": {"heads": 4, "kv_heads": 2}, "ffn": {"hidden": 256}}
    exact = {"deterministic": True, "seq_len": 64, "steps": 6}
    whole = merged(decoder(bench, model=small, train=exact), {"job": {"name": "whole"}, "checkpoint": {"interval": 0}})
    expected = _losses(train(load(bench, whole)).folder)
    parts = merged(whole, {"job": {"name": "parts"}, "checkpoint": {"interval": 3, "async_save": True}})
    train(load(bench, parts), Stop())
    found = _losses(train(load(bench, parts), Stop(at=0)).folder)
    bench.check(found == expected, f"losses of a run that continues differ: {found} and {expected}")
    bench.row("resume from an asynchronous save", steps=len(found), equal_to_the_bit=found == expected)


@define(kw_only=True, slots=False)
class Stop(TrainingHook):
    """Asks to stop after a step; 0: never."""

    at: int = 3

    def on_step_end(self, context: Any) -> None:
        if context.step == self.at:
            context.request_stop("half of the steps are done")


def _losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "lr" in line]
