"""The recording of a window of steps on one rank, and the files that come of it."""

from __future__ import annotations

import gzip
import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerAction, profile, supported_activities

from forge_core.launch.progress_beacon import report_progress
from forge_core.parallel.mesh import gather_objects, global_rank
from forge_plugin_profile.breakdown import breakdown
from forge_plugin_profile.marks import BlockMarks, PhaseMarks
from forge_plugin_profile.memory import peak_gb
from forge_plugin_profile.model_facts import model_facts
from forge_plugin_profile.report import report
from forge_plugin_profile.trace import FORGE, trace_of

if TYPE_CHECKING:
    from forge_core.contracts.contexts import TrainContext
    from forge_plugin_profile.memory import MemoryHistory
    from forge_plugin_profile.profile import Profile

FOLDER = "profile"
"""In the run folder."""
SUMMARY, REPORT = "profile.json", "profile.md"


class Recording:
    """torch.profiler, running since it was made."""

    def __init__(self, settings: Profile, context: TrainContext, first: int) -> None:
        assert context.build is not None
        self._first, self._device, self._step = first, context.build.device, context.step
        self._facts: dict[str, Any] = {"first_step": first, **model_facts(context, first)}
        self._peaks: list[float] = []
        # By name, as `ProfilerActivity.CUDA`, of a device that torch's profiler records
        able = {activity.name.lower(): activity for activity in supported_activities()}
        activities = [able[kind] for kind in dict.fromkeys(("cpu", self._device.type)) if kind in able]
        self._profiler = profile(
            activities=activities,
            schedule=self._action,
            record_shapes=settings.shapes,
            profile_memory=settings.memory,
            with_stack=settings.stacks,
        )
        self._profiler.step_num = context.step + 1  # so that `ProfilerStep#12` is step 12
        self._profiler.start()
        # After the start, as a range is recorded only if it begins while the profiler runs
        self._blocks, self._phases = BlockMarks(context.model), PhaseMarks("other")

    def _action(self, step: int) -> ProfilerAction:
        # The profiler calls this with 0 when it is created, and then with the actual steps.
        return ProfilerAction.RECORD if max(step, self._step + 1) >= self._first else ProfilerAction.WARMUP

    def end_step(self) -> None:
        """Note that a step has ended."""
        self._step += 1
        if self._step >= self._first:
            self._peaks.append(peak_gb(self._device))

    def step(self) -> None:
        """Mark the end of a step, and the beginning of the next."""
        self.end_step()
        with self._phases.interrupted():
            self._profiler.step()

    def stop(self) -> None:
        """End the recording, and take all marks away. It waits for a GPU, so that its last kernels are recorded."""
        self._phases.close()
        self._blocks.close()
        facts = {**self._facts, "peak_memory_gb": max(self._peaks, default=None), "recorded_steps": len(self._peaks)}
        if self._peaks:
            self._profiler.add_metadata_json(FORGE, json.dumps(facts))
        self._profiler.stop()

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the trace of a recording that has stopped. Returns its breakdown."""
        folder.mkdir(parents=True, exist_ok=True)
        # A name that no search for traces matches, in case the process is killed meanwhile
        plain = folder / f".rank-{global_rank()}.unfinished.json"
        try:
            self._profiler.export_chrome_trace(str(plain))
            report_progress("summing up the trace")
            with plain.open(encoding="utf-8") as file:
                facts = breakdown(trace_of(json.load(file)))
            report_progress("compressing the trace")
            with plain.open("rb") as source, gzip.open(trace_path(folder, global_rank()), "wb", 5) as compressed:
                shutil.copyfileobj(source, compressed, 1 << 20)
        finally:
            plain.unlink(missing_ok=True)
        return facts


def trace_path(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's trace in the folder of a window."""
    return folder / f"rank-{rank}.pt.trace.json.gz"


def finish(context: TrainContext, first: int, recording: Recording | None, history: MemoryHistory | None) -> None:
    """End the window that began with step `first`, and write its files. Collective."""
    assert context.folder is not None
    folder, facts = context.folder / FOLDER / f"step-{first}", None
    if recording is not None:
        recording.stop()
        report_progress("writing the trace")
        try:  # a full disk ends no run, and other ranks wait for the facts of this one
            facts = recording.write(folder)
        except OSError as error:
            warnings.warn(f"hooks.profile: no trace of rank {global_rank()}: {error}", stacklevel=2)
    if history is not None:
        history.write(folder / f"rank-{global_rank()}.memory.pickle")
    # All ranks must reach this, whether they record or not
    gathered = gather_objects(facts)
    if global_rank() == 0:
        write_summary(folder, facts_of_ranks := [each for each in gathered if each is not None])
        if facts_of_ranks and (folder / REPORT).is_file():
            context.log_artifact(folder / REPORT, f"profile-step-{first}.md")


def write_summary(folder: Path, facts: list[dict[str, Any]]) -> None:
    """Write `profile.json` and `profile.md` of the breakdowns of ranks. A disk that fails is a warning."""
    if not facts:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)  # rank 0 need not be among those that record
        (folder / SUMMARY).write_text(json.dumps({"ranks": facts}, indent=1) + "\n", encoding="utf-8")
        (folder / REPORT).write_text(report(facts), encoding="utf-8")
    except OSError as error:
        warnings.warn(f"hooks.profile: no summary: {error}", stacklevel=2)
