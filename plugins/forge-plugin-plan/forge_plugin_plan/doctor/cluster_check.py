"""The hook `cluster_check`: what `forge-run doctor --on` has the ranks of a short run look at."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from attrs import define, field
from attrs.validators import gt

from forge_core.contracts.components import TrainingHook, WhenResumed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forge_core.contracts.contexts import CheckpointContext, StepContext, TrainContext
    from forge_plugin_plan.doctor.examination import Examined

FILE = "doctor.json"
"""Report in the run folder, of the form that `forge-run doctor --json` prints."""


@define(kw_only=True, slots=False)
class ClusterCheck(TrainingHook):
    """Checks ranks, clocks and storage together at the start, and saves and restores the state once.

    `doctor.json` in the run folder has all results, which rank 0 prints as well. The run does not end early when a
    check fails: another start would find the same.
    """

    resumes_as: ClassVar[WhenResumed | None] = "safe"
    rolls_back: ClassVar[bool] = False

    step: int = field(default=2, validator=gt(0))
    """Step after which the state is saved; it is restored a step later."""

    def on_train_begin(self, context: TrainContext) -> None:
        from forge_plugin_plan.doctor.cluster_trial import check_clocks, check_collectives, check_storage, join

        assert context.build is not None, "of a run"
        assert context.folder is not None, "of a run"
        self._started = time.time()
        self._examined: list[Examined] = []
        self._saved = self._restored = ""
        self._save_s = 0.0
        self._world = join()
        for checks in (
            check_collectives(self._world, context.build.device),
            check_clocks(self._world),
            check_storage(self._world, context.folder),
        ):
            started = time.monotonic()
            for group, result in checks:
                self._add(group, result, time.monotonic() - started)
                started = time.monotonic()

    def on_step_end(self, context: StepContext) -> None:
        if context.step == self.step:
            context.request_checkpoint()
        # A step later, as the state differs from the saved one by then
        elif context.step == self.step + 1 and self._saved and not self._restored:
            context.request_rollback("the doctor restores what it saved", to=self.step)

    def on_checkpoint_begin(self, context: TrainContext) -> None:
        # The last save of the run is another one
        if context.step == self.step:
            self._saved, self._save_s = _digest(context), time.monotonic()

    def on_checkpoint_save(self, context: CheckpointContext) -> None:
        if context.step == self.step:
            self._save_s = time.monotonic() - self._save_s

    def on_rollback(self, context: TrainContext, step: int, reason: str) -> None:
        self._restored = _digest(context)

    def on_train_end(self, context: TrainContext) -> None:
        from forge_plugin_plan.doctor.cluster_trial import gathered

        self._add("state", _restored(gathered((self._saved, self._restored)), self._world.hosts, self._save_s), 0.0)
        if self._world.rank == 0 and context.folder is not None:
            seconds = time.time() - self._started
            (context.folder / FILE).write_text(json.dumps(self._report(seconds), indent=2) + "\n")
            _print(self._examined)

    def _add(self, group: str, result: Any, seconds: float) -> None:
        from forge_plugin_plan.doctor.examination import Examined

        self._examined.append(Examined(group, result, seconds))

    def _report(self, seconds: float) -> dict[str, Any]:
        from forge_plugin_plan.doctor.packages import versions

        return {
            "hosts": list(self._world.firsts),
            "ranks": self._world.size,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(seconds, 1),
            "versions": versions(),
            "checks": as_json(self._examined),
        }


def as_json(examined: Sequence[Examined]) -> list[dict[str, Any]]:
    """Returns the results as programs read them."""
    return [{"group": one.group, **attrs.asdict(one.result), "seconds": round(one.seconds, 3)} for one in examined]


def _print(examined: Sequence[Examined]) -> None:
    from forge_plugin_plan.doctor.screen import Screen

    screen = Screen()
    for one in examined:
        screen.show(one)


def _digest(context: TrainContext) -> str:
    """SHA-256 of this rank's part of all weights: to the bit, whatever their layout."""
    import torch
    from torch.distributed.tensor import DTensor

    digest = hashlib.sha256()
    for _, parameter in context.model.named_parameters():
        # Of a sharded parameter, this rank's shard
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        # Bytes, since NumPy has no bfloat16
        digest.update(local.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _restored(of_ranks: Sequence[tuple[str, str]], hosts: Sequence[str], save_s: float) -> Any:
    from forge_plugin_plan.doctor.results import failed, not_run, ok

    if not all(saved for saved, _ in of_ranks):
        return not_run("save and restore", "the run was continued after its save")
    wrong = [rank for rank, (saved, restored) in enumerate(of_ranks) if saved != restored]
    if wrong:
        count = f"{len(wrong)} of {len(of_ranks)} ranks"
        seen = f"rank {wrong[0]} on {hosts[wrong[0]]} has other weights than it saved ({count})"
        return failed("save and restore", seen, "do not train here: choose another file system for run folders")
    return ok(
        "save and restore", f"{len(of_ranks)} ranks have to the bit what they saved; the save took {save_s:.2f} s"
    )
