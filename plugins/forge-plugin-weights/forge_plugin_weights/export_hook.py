"""The hook `export`."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import define, field
from attrs.validators import ge, gt

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import JobError, Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

FOLDER = "exports"


@define(kw_only=True, slots=False)
class Export(TrainingHook):
    """Writes the weights as a published model, which `transformers` and vLLM load, during the run and at its end.

    To `exports/step-N` in the run folder; all ranks write, each its own part. Optimizers that evaluate other weights
    than they train export those.
    """

    resumes_as = "safe"

    every: int = field(default=0, validator=ge(0))
    """Steps between exports; 0: only at the end of the run."""
    keep: int = field(default=0, validator=ge(0))
    """The newest exports to keep; 0: all."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Of the weights; empty: as they are trained, float32."""
    shard_size: float = field(default=5.0, validator=gt(0))
    """Of each file at most, in GB."""
    architecture: str = ""
    """`model_type` to export as, such as `llama`; empty: the one that the model is of."""
    verify: bool = True
    """Whether each rank reads back what it wrote and compares it with its weights: `forge/parity.json`. What the export
    computes is not compared; `forge-run weights verify` does that."""

    exported_step = -1  # of this process, and not state

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields why the model has no published form, so that a run is refused before it trains."""
        from forge_core.plugins.catalog import Catalog
        from forge_plugin_weights.adapters import AddsAdapters
        from forge_plugin_weights.exporting import find_form, imported_as

        # A published model has no place for adapters, and merging needs the whole model in one process
        for name, plugin in job.plugins.items():
            if isinstance(plugin, AddsAdapters):
                what = f"cannot export a model with adapters, which plugins.{name} adds; leave the hook out"
                after = "after the run, `forge-run weights export RUN --out FOLDER` takes --merge or --adapters"
                yield Problem("", f"{what}: {after}")
                return
        try:
            find_form(job.model, Catalog.installed(), self.architecture, base=imported_as(job))
        except JobError as error:
            yield from error.problems

    def on_train_begin(self, context: TrainContext) -> None:
        """Resets the last exported step, which is a step of one run."""
        self.exported_step = -1

    def on_step_end(self, context: StepContext) -> None:
        """Exports every `every` steps; on all ranks, since an export is collective."""
        if self.every and context.step % self.every == 0:
            self._export(context)

    def on_train_end(self, context: TrainContext) -> None:
        """Exports the final weights, unless the last step has been exported."""
        if self.exported_step != context.step:
            self._export(context)

    def _export(self, context: TrainContext) -> None:
        # Here and not above: a job with this hook is checked without torch.
        import torch

        from forge_core.parallel.mesh import global_rank
        from forge_plugin_weights.parallel_export import export_training

        if context.folder is None:  # such a run writes nothing
            return
        self.exported_step = context.step
        folder = context.folder / FOLDER / f"step-{context.step}"
        if global_rank() == 0:  # a run that continues from an earlier step exports some steps again
            shutil.rmtree(folder, ignore_errors=True)
        dtype = getattr(torch, self.dtype) if self.dtype else None
        export_training(context, folder, dtype, round(self.shard_size * 1e9), self.architecture, verify=self.verify)
        if global_rank() == 0:
            self._prune(folder.parent)

    def _prune(self, folder: Path) -> None:
        steps = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*") if path.suffix != ".tmp")
        for step in steps[: -self.keep] if self.keep else []:
            shutil.rmtree(folder / f"step-{step}")
