"""Runs micro-batches through a pipeline.

Shapes: B sequences of a micro-batch, S positions. A carry is the activations between two pipeline stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.runtime import LossOutput, StepOutput
from forge_core.engine.executor import combine
from forge_core.parallel.stages import around
from forge_kit.nn.recomputing import Recomputing
from forge_plugin_parallel.cuts import Section
from forge_plugin_parallel.pp import ONE_STAGE
from forge_plugin_parallel.torch_internals import Stage, is_view

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry, Model
    from forge_core.contracts.runtime import LossFunction, ParallelStage
    from forge_plugin_parallel.pp_stage import Pipeline

SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipe_v": pipelining.ScheduleDualPipeV,
}
Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shape and dtype of each tensor of a carry."""


class PipelineExecutor:
    """See `forge_core.contracts.runtime.Executor`.

    Every rank receives every micro-batch: only the carry is sent. All schedules run the forward passes of a stage in
    the order of the micro-batches, so each stage identifies its micro-batch by counting. torch's schedules receive the
    micro-batch numbers as their input too, and a disagreement raises.
    """

    def __init__(
        self,
        model: Model,
        loss: LossFunction,
        stages: Sequence[ParallelStage],
        pipeline: Pipeline,
        schedule: str,
        context: BuildContext,
    ) -> None:
        self._model: Any = model
        self._loss, self._stages, self._device = loss, stages, context.device
        self._auxiliary = context.auxiliary
        self._pipeline, self._schedule = pipeline, schedule
        self._own = [number for number, owner in enumerate(pipeline.owners) if owner == pipeline.rank]
        self._last = pipeline.owners[-1]
        self._carries: dict[torch.Size, Shapes] = {}
        self._schedules: dict[tuple[int, Shapes], Any] = {}
        self._step: _Step | None = None

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        """Runs torch's schedule over all micro-batches. Collective; every rank returns the sums of the last one."""
        # Before `around`: the first micro-batch of a shape runs a separate forward pass to learn the carry's shapes.
        schedule = self._schedule_for(len(batches), self._carry_of(batches[0]))
        self._step = _Step([self._prepared(batch) for batch in batches], denominator)
        numbers = torch.arange(len(batches))
        first = (numbers,) if 0 in self._own else ()
        # One context for the step, with last=False: micro-batches overlap, so no backward pass is known to be the last,
        # and stages reduce gradients in `complete_gradients`.
        with around(self._stages, self._model, backward=True, last=False):
            schedule.step(*first, number=numbers, target=numbers, return_outputs=False)
        outputs, self._step = self._step.outputs, None
        return self._shared(outputs, batches)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
        """Runs micro-batches one by one, without a schedule. Collective; all ranks return the sums of the last one."""
        shapes = self._carry_of(batches[0])
        outputs = []
        with around(self._stages, self._model, backward=False, last=True):
            for batch in map(self._prepared, batches):
                outputs += self._pass_through(batch, shapes, measure or self._loss)
        return self._shared(outputs, batches)

    # --- training --------------------------------------------------------------------------------------------------

    def _schedule_for(self, count: int, shapes: Shapes) -> Any:
        if (count, shapes) not in self._schedules:
            own = [self._torch_stage(number, shapes) for number in self._own]
            # scale_grads=False: the loss is divided by the tokens of the global batch, not by micro-batches.
            build, stages = SCHEDULES[self._schedule], own[0] if self._schedule in ONE_STAGE else own
            self._schedules[count, shapes] = build(stages, count, loss_fn=self._loss_of, scale_grads=False)
        return self._schedules[count, shapes]

    def _torch_stage(self, number: int, shapes: Shapes) -> Stage:
        """One pipeline stage for torch's schedules, with shapes given so that torch does not infer them by a run."""
        sections = self._pipeline.sections
        carry = tuple(torch.empty(size, dtype=dtype, device="meta", requires_grad=True) for size, dtype in shapes)
        module = _StageModule(self._model, sections[number], partial(self._next_batch, number), shapes)
        return Stage(
            module,
            number,
            len(sections),
            self._device,
            input_args=(torch.zeros(1, dtype=torch.long, device="meta"),) if number == 0 else carry,
            output_args=carry,
            group=self._pipeline.group,
        )

    def _next_batch(self, stage: int, number: Tensor) -> Batch:
        assert self._step is not None
        return self._step.next_batch(stage, number)

    def _loss_of(self, hidden: Tensor, number: Tensor) -> Tensor:
        step = self._step
        assert step is not None
        output = self._loss(self._model.head, hidden, step.next_batch("loss", number))
        # Detached: kept to the end of the step, a sum would keep the graph of its micro-batch
        step.outputs.append(output._replace(sum=output.sum.detach()))
        return output.sum / step.denominator

    # --- evaluation ------------------------------------------------------------------------------------------------

    def _pass_through(self, batch: Batch, shapes: Shapes, loss: LossFunction) -> list[LossOutput]:
        """Run a micro-batch through all stages, forward only. Returns [its loss] on the last rank, else []."""
        owners, rank = self._pipeline.owners, self._pipeline.rank
        carry: Any = ()
        for number, section in enumerate(self._pipeline.sections):
            if owners[number] == rank:
                # Neighbouring stages on one rank (schedules in a V) pass the carry on without sending it.
                if number and owners[number - 1] != rank:
                    carry = self._receive(shapes, owners[number - 1])
                carry = self._model(batch, carry, section)
                if not section.last and owners[number + 1] != rank:
                    for tensor in carry:
                        # Messages from rank to rank have to be contiguous
                        dist.send(tensor.contiguous(), group_dst=owners[number + 1], group=self._pipeline.group)
        return [loss(self._model.head, carry, batch)] if rank == self._last else []

    def _receive(self, shapes: Shapes, rank: int) -> Carry:
        carry = tuple(torch.empty(size, dtype=dtype, device=self._device) for size, dtype in shapes)
        for tensor in carry:
            dist.recv(tensor, group_src=rank, group=self._pipeline.group)
        return carry

    # --- both ------------------------------------------------------------------------------------------------------

    def _prepared(self, batch: Batch) -> Batch:
        return self._model.prepare(batch)

    def _carry_of(self, batch: Batch) -> Shapes:
        """Returns the carry's shapes for micro-batches of this shape.

        Collective the first time for each shape: only the first rank can run `embed`, and it broadcasts the result.
        """
        key = batch["input_ids"].shape
        if key not in self._carries:
            shapes: list[Any] = [None]
            if 0 in self._own:
                # Marked as a repetition: the micro-batch is fed once more for training, and its metrics count once.
                repeated = Recomputing(self._auxiliary)
                with repeated, torch.no_grad(), around(self._stages, self._model, backward=False, last=True):
                    carry = self._model(self._prepared(batch), (), Section((), first=True))
                shapes = [tuple((tensor.shape, tensor.dtype) for tensor in carry)]
            dist.broadcast_object_list(shapes, group_src=self._pipeline.owners[0], group=self._pipeline.group)
            self._carries[key] = shapes[0]
        return self._carries[key]

    def _shared(self, outputs: Sequence[LossOutput], batches: Sequence[Batch]) -> StepOutput:
        """Broadcast the loss sums and counts of the last rank. Returns the step's output on every rank."""
        rows = sum(len(batch["labels"]) for batch in batches)
        # Sums and counts in one float64 tensor: one broadcast, and counts stay exact.
        both = torch.zeros(2, rows, dtype=torch.float64, device=self._device)
        if outputs:
            both.copy_(torch.stack([part.double() for part in combine(outputs).per_sequence]))
        dist.broadcast(both, group_src=self._last, group=self._pipeline.group)
        sums, counts = both
        return StepOutput(sums.sum(), counts.sum(), (sums, counts))


class _Step:
    """The micro-batches of a step, and their losses."""

    def __init__(self, batches: Sequence[Batch], denominator: Tensor) -> None:
        self.batches, self.denominator = batches, denominator
        self.outputs: list[LossOutput] = []
        self._taken: Counter[int | str] = Counter()

    def next_batch(self, who: int | str, number: Tensor) -> Batch:
        """Returns the next micro-batch in order for a stage, or for the loss.

        Args:
            who: number of the stage, or "loss"; each counts by itself.
            number: the schedule's number of the micro-batch, a fake tensor while a step is planned.

        Raises:
            ForgeError: the schedule runs micro-batches in another order.
        """
        expected = self._taken[who]
        self._taken[who] += 1
        # Only for a plain tensor: a fake one, while a step is planned, has no value to compare.
        if type(number) is Tensor and int(number) != expected:
            raise ForgeError(f"parallel.pp: {who} is given micro-batch {int(number)} in the place of {expected}")
        return self.batches[expected]


class _StageModule(nn.Module):
    """A section as torch's pipeline calls it.

    It lists the section's parameters only: schedules that split the backward pass compute the gradients of all
    parameters listed.
    """

    def __init__(self, model: Any, section: Section, next_batch: Callable[[Tensor], Batch], shapes: Shapes) -> None:
        super().__init__()
        first, last = model.ends()
        names = [*(first if section.first else ()), *(f"layers.{name}" for name in section.layers)]
        names += last if section.last else ()
        self.parts = nn.ModuleList([model.get_submodule(name) for name in names])
        self._section, self._next_batch, self._shapes = section, next_batch, shapes
        self._call = (model,)  # in a tuple, so that nn.Module does not register the whole model as a child

    def forward(self, *carry: Tensor, number: Tensor) -> Any:
        """Run the section on the next micro-batch.

        Raises:
            ForgeError: the carry has other shapes or dtypes than the next stage expects.
        """
        (model,) = self._call
        out = model(self._next_batch(number), () if self._section.first else carry, self._section)
        if self._section.last:
            return out
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in out)
        if shapes != self._shapes:
            places = f"after layer {self._section.layers[-1]} it is {shapes}, after embed() {self._shapes}"
            raise ForgeError(
                f"parallel.pp: the carry must have the same shapes and dtypes between all layers: {places}"
            )
        # torch detaches outputs in place, which autograd refuses for views.
        return tuple(tensor.clone() if is_view(tensor) else tensor for tensor in out)
