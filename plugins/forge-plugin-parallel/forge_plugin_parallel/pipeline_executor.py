"""Runs micro-batches through a pipeline.

Shapes: B sequences of a micro-batch, S positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Prepares
from forge_core.contracts.runtime import LossOutput, StepOutput
from forge_core.engine.executor import combine
from forge_core.parallel.stages import around
from forge_plugin_parallel.cuts import Section
from forge_plugin_parallel.pp import ONE_STAGE

if TYPE_CHECKING:
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
"""Of the tensors of a carry."""


class PipelineExecutor:
    """See `forge_core.contracts.runtime.Executor`.

    Every rank gets every micro-batch: only the carry travels. All schedules run the forward passes of a stage in the
    order of the micro-batches, so that each stage knows by counting which one it sees. torch's schedules are given the
    numbers for input all the same, and these must agree.
    """

    def __init__(
        self,
        model: Model,
        loss: LossFunction,
        stages: Sequence[ParallelStage],
        pipeline: Pipeline,
        schedule: str,
        device: torch.device,
    ) -> None:
        self._model: Any = model
        self._loss, self._stages, self._device = loss, stages, device
        self._pipeline, self._schedule = pipeline, schedule
        self._own = [number for number, owner in enumerate(pipeline.owners) if owner == pipeline.rank]
        self._last = pipeline.owners[-1]
        self._carries: dict[torch.Size, Shapes] = {}
        self._schedules: dict[tuple[int, Shapes], Any] = {}
        self._step: _Step | None = None

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        schedule = self._schedule_for(len(batches), self._carry_of(batches[0]))
        self._step = _Step([self._prepared(batch) for batch in batches], denominator)
        numbers = torch.arange(len(batches))
        first = (numbers,) if 0 in self._own else ()
        with around(self._stages, self._model, backward=True, last=False):
            schedule.step(*first, number=numbers, target=numbers, return_outputs=False)
        outputs, self._step = self._step.outputs, None
        return self._shared(outputs, batches)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
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
            build, stages = SCHEDULES[self._schedule], own[0] if self._schedule in ONE_STAGE else own
            self._schedules[count, shapes] = build(stages, count, loss_fn=self._loss_of, scale_grads=False)
        return self._schedules[count, shapes]

    def _torch_stage(self, number: int, shapes: Shapes) -> _Stage:
        sections = self._pipeline.sections
        carry = tuple(torch.empty(size, dtype=dtype, device="meta", requires_grad=True) for size, dtype in shapes)
        module = _StageModule(self._model, sections[number], partial(self._next_batch, number), shapes)
        return _Stage(
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
        step.outputs.append(output._replace(sum=output.sum.detach()))
        return output.sum / step.denominator

    # --- evaluation ------------------------------------------------------------------------------------------------

    def _pass_through(self, batch: Batch, shapes: Shapes, loss: LossFunction) -> list[LossOutput]:
        """One micro-batch through all stages, forward only; the loss on the rank of the last stage."""
        owners, rank = self._pipeline.owners, self._pipeline.rank
        carry: Any = ()
        for number, section in enumerate(self._pipeline.sections):
            if owners[number] == rank:
                if number and owners[number - 1] != rank:
                    carry = self._receive(shapes, owners[number - 1])
                carry = self._model(batch, carry, section)
                if not section.last and owners[number + 1] != rank:
                    for tensor in carry:
                        dist.send(tensor.contiguous(), group_dst=owners[number + 1], group=self._pipeline.group)
        return [loss(self._model.head, carry, batch)] if rank == self._last else []

    def _receive(self, shapes: Shapes, rank: int) -> Carry:
        carry = tuple(torch.empty(size, dtype=dtype, device=self._device) for size, dtype in shapes)
        for tensor in carry:
            dist.recv(tensor, group_src=rank, group=self._pipeline.group)
        return carry

    # --- both ------------------------------------------------------------------------------------------------------

    def _prepared(self, batch: Batch) -> Batch:
        return self._model.prepare(batch) if isinstance(self._model, Prepares) else batch

    def _carry_of(self, batch: Batch) -> Shapes:
        """Shapes of what travels for micro-batches like this one. The first rank finds out, once for each shape, and
        tells the others."""
        key = batch["input_ids"].shape
        if key not in self._carries:
            found: list[Any] = [None]
            if 0 in self._own:
                with torch.no_grad(), around(self._stages, self._model, backward=False, last=True):
                    carry = self._model(self._prepared(batch), (), Section((), first=True))
                found = [tuple((tensor.shape, tensor.dtype) for tensor in carry)]
            dist.broadcast_object_list(found, group_src=self._pipeline.owners[0], group=self._pipeline.group)
            self._carries[key] = found[0]
        return self._carries[key]

    def _shared(self, outputs: Sequence[LossOutput], batches: Sequence[Batch]) -> StepOutput:
        """What the last rank found, on every rank."""
        rows = sum(len(batch["labels"]) for batch in batches)
        both = torch.zeros(2, rows, dtype=torch.float64, device=self._device)
        if outputs:
            both.copy_(torch.stack([part.double() for part in combine(outputs).per_sequence]))
        dist.broadcast(both, group_src=self._last, group=self._pipeline.group)
        sums, counts = both
        return StepOutput(sums.sum(), counts.sum(), (sums, counts))


class _Step:
    """The micro-batches of a step, and what the loss made of them."""

    def __init__(self, batches: Sequence[Batch], denominator: Tensor) -> None:
        self.batches, self.denominator = batches, denominator
        self.outputs: list[LossOutput] = []
        self._seen: Counter[int | str] = Counter()

    def next_batch(self, who: int | str, number: Tensor) -> Batch:
        """The micro-batch whose turn it is for a stage, or for the loss.

        Args:
            number: which one the schedule says it is. In a plan it is a tensor without content.

        Raises:
            ForgeError: the schedule takes them in another order.
        """
        expected = self._seen[who]
        self._seen[who] += 1
        if type(number) is Tensor and int(number) != expected:
            raise ForgeError(f"parallel.pp: {who} is given micro-batch {int(number)} in the place of {expected}")
        return self.batches[expected]


class _Stage(pipelining.PipelineStage):
    """A stage that has memory for what it receives from when it asks for it until it has computed with it.

    torch's takes room for the activations and the gradients of all micro-batches of a step, in the first step, and
    keeps it: 28 GB for DeepSeek-V3 with 240 micro-batches of 4,096 positions. Here, shapes on the device `meta` keep
    the place.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        _move(self.grad_recv_info[mb_index], self.device)  # a gradient that is None becomes zeros there
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _move(self.args_recv_info[fwd_chunk_id], torch.device("meta"))
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if loss is not None:
            loss.detach_()  # torch's schedules keep all losses of a step, and a loss keeps what its stage received
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), torch.device("meta"))


def _move(received: Iterable[Any], device: torch.device) -> None:
    """New tensors like those that are received, or will be, in their place."""
    for info in received:
        if (old := getattr(info, "buffer", None)) is not None:
            info.buffer = torch.empty_like(old, device=device, requires_grad=old.requires_grad)


class _StageModule(nn.Module):
    """A section as torch's pipeline calls it. Its parameters are those of the section alone: schedules that split the
    backward pass look at them."""

    def __init__(self, model: Any, section: Section, next_batch: Callable[[Tensor], Batch], shapes: Shapes) -> None:
        super().__init__()
        first, last = model.ends()
        names = [*(first if section.first else ()), *(f"layers.{name}" for name in section.layers)]
        names += last if section.last else ()
        self.parts = nn.ModuleList([model.get_submodule(name) for name in names])
        self._section, self._next_batch, self._shapes = section, next_batch, shapes
        self._call = (model,)  # in a tuple, which torch does not look into

    def forward(self, *carry: Tensor, number: Tensor) -> Any:
        """
        Raises:
            ForgeError: what comes out is not what the next stage is told to expect.
        """
        (model,) = self._call
        out = model(self._next_batch(number), () if self._section.first else carry, self._section)
        if self._section.last:
            return out
        found = tuple((tensor.shape, tensor.dtype) for tensor in out)
        if found != self._shapes:
            seen = f"after layer {self._section.layers[-1]} it is {found}, after embed() {self._shapes}"
            raise ForgeError(f"parallel.pp: the carry must have the same shapes and dtypes between all layers: {seen}")
        return tuple(tensor.clone() if tensor._is_view() else tensor for tensor in out)  # torch detaches them in place
