"""One training step of one rank, simulated on shapes alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from attrs import define, field, frozen
from torch import Tensor

from forge_core.contracts.contexts import StepContext
from forge_core.contracts.data import Batch
from forge_core.contracts.errors import JobError
from forge_core.contracts.model import Outline
from forge_core.engine.build import Run
from forge_core.engine.step import Stepper
from forge_core.job import Job
from forge_core.parallel.layout import micro_batches, plan_layout
from forge_core.parallel.mesh import local_part
from forge_core.parallel.stages import around
from forge_core.plugins.catalog import Catalog
from forge_kit.nn.batches import zero_batch
from forge_kit.torch_internals import eagerly, is_compiled
from forge_plugin_plan.fake_run import FakeRun, fake_run
from forge_plugin_plan.fake_world import BroadcastLog, Line, fake_world, line_of
from forge_plugin_plan.kernels import FusedAttention
from forge_plugin_plan.meter import Meter, Transfer
from forge_plugin_plan.repetition import Repetition
from forge_plugin_plan.storages import Memory, Purpose
from forge_plugin_plan.torch_internals import identity_of

NAMES = ("names", "param_names")
"""Keys of a parameter group under which it may list the names of its parameters."""
Sizes = tuple[int, int]
"""Bytes of gradients and of optimizer state."""


@define
class StateLog:
    """Gradients and optimizer state of parameters, by all that they depend on: most layers of a pipeline are alike."""

    sizes: dict[Hashable, set[Sizes]] = field(factory=dict)
    """Sizes of each kind of parameter on the ranks that were updated."""

    def add(self, parameters: Iterable[Hashable], sizes: Iterable[Sizes]) -> None:
        """Add the sizes of each parameter of a rank."""
        for parameter, size in zip(parameters, sizes, strict=True):
            self.sizes.setdefault(parameter, set()).add(size)

    def predict(self, parameters: Iterable[Hashable]) -> Sizes | None:
        """Returns the sizes of a rank; None if some parameter is new, or equal ones had different sizes."""
        known = [self.sizes.get(parameter, set()) for parameter in parameters]
        if any(len(sizes) != 1 for sizes in known):
            return None
        both = [size for sizes in known for size in sizes]
        return sum(gradient for gradient, _ in both), sum(state for _, state in both)


@frozen(kw_only=True)
class Traffic:
    """Communication and computation of a rank's step."""

    transfers: Mapping[Transfer, int]
    """Number of times that the rank takes part in each."""
    lines: Mapping[str, Line]
    """Arrangement of the ranks of each process group, by the group's name."""
    flops: float
    """FLOPs of matrix products and attention, recomputation included."""
    launches: int
    """Operations of forward and backward passes that start a kernel, without the loss."""
    kept: int
    """Bytes that forward passes kept for the backward, gathered and cast weights included."""

    def plus(self, other: Traffic) -> Traffic:
        """Returns both one after the other."""
        return Traffic(
            transfers=Counter(self.transfers) + Counter(other.transfers),
            lines={**self.lines, **other.lines},
            flops=self.flops + other.flops,
            launches=self.launches + other.launches,
            kept=self.kept + other.kept,
        )


@frozen(kw_only=True)
class RankPlan:
    """Figures of a rank. Figures that need a step are None if none could be simulated."""

    rank: int
    pipeline_rank: int
    weights: int
    """Bytes, each storage once; so are gradients and optimizer state."""
    gradients: int
    optimizer: int
    memory: Memory | None
    traffic: Traffic | None
    failure: str
    """Why no step could be simulated, if so."""
    outline: Outline
    """Facts of the whole model."""
    compiled: bool
    """Whether blocks are compiled; they were simulated eagerly."""
    trained: frozenset[str]
    """Names of the parameters of this pipeline rank that are trained."""

    @property
    def training_state(self) -> Mapping[Purpose, int]:
        """Bytes by purpose that are known without simulating a step."""
        return {
            Purpose.WEIGHTS: self.weights,
            Purpose.GRADIENTS: self.gradients,
            Purpose.OPTIMIZER: self.optimizer,
        }


WHOLE = 512
"""Up to this number, all micro-batches of a pipeline are repeated or played; further ones are extrapolated."""


def simulate(
    job: Job,
    catalog: Catalog,
    world_size: int,
    rank: int,
    log: BroadcastLog,
    device: torch.device,
    states: StateLog | None = None,
    play: bool = True,
    repeat: bool = True,
    report: Callable[[str], object] = lambda text: None,
) -> RankPlan:
    """Build a job as rank `rank` of `world_size` does, and simulate a step.

    Args:
        job: the job.
        catalog: components that are installed.
        world_size: number of ranks.
        rank: the rank that this process takes the place of.
        log: broadcasts of ranks with lower numbers; this rank's broadcasts are appended.
        device: device that the job will run on; it need not exist.
        states: sizes of parameters of ranks that were simulated, to which this rank's are added.
        play: whether to simulate a step; otherwise there are only the figures that need none, and sizes of parameters
            are taken from `states` where it has all of them.
        repeat: whether most micro-batches of a pipeline may repeat what a few did, where they are alike; the figures
            are the same.
        report: receives the micro-batch that is simulated next.

    Raises:
        JobError: the job cannot be built on this number of ranks.
    """
    states = StateLog() if states is None else states
    pipelined = plan_layout(job, world_size)[0].pp > 1
    # Without a pipeline, micro-batches share their memory, and a few of them suffice (see `_play`)
    if repeat and play and pipelined:
        # A copy, so that a failed attempt leaves nothing in the log
        attempt = BroadcastLog([*log.broadcasts])
        with _rank(job, catalog, world_size, rank, attempt, device, pipelined) as simulated:
            planned = simulated.plan(states, repeats=True, report=report)
        if not planned.failure:
            log.broadcasts[:] = attempt.broadcasts
            return planned
        # Micro-batches are not alike, or the step fails in any case. What was built has stopped half way in a step.
    with _rank(job, catalog, world_size, rank, log, device, pipelined) as simulated:
        return simulated.plan(states, repeats=False, report=report) if play else simulated.outline(states)


@contextmanager
def _rank(
    job: Job,
    catalog: Catalog,
    world_size: int,
    rank: int,
    log: BroadcastLog,
    device: torch.device,
    pipelined: bool,
) -> Iterator[_Rank]:
    with fake_world(world_size, rank, log, pipelined):
        built = fake_run(job, catalog, device)
        with built.mode:
            yield _Rank(built, rank, device)


class _Rank:
    def __init__(self, built: FakeRun, rank: int, device: torch.device) -> None:
        self._run, self._loss, self._rank = built.run, built.loss, rank
        self._beside, self._hooks = built.beside, built.hooks
        self._layout = built.run.context.layout
        self._on_gpu = device.type == "cuda"
        self._compiled = is_compiled(built.run.model)
        self._gradients = 0
        self._each_gradient: list[int] = []
        """Bytes of each parameter's gradient, which may be a part of a storage."""
        self._repeats = False
        self._report: Callable[[str], object] = lambda text: None

    def plan(self, states: StateLog, repeats: bool, report: Callable[[str], object]) -> RankPlan:
        """Simulate a step; adds the sizes of its parameters to `states`."""
        self._repeats, self._report = repeats, report
        memory, traffic, failure = None, None, ""
        try:
            memory, traffic = self._with_hooks(*self._play())
        # The job is wrong, and not only its simulation
        except JobError:
            raise
        # Code of models and stages may fail on fake tensors; figures that need no step are still given
        except Exception as error:
            failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if not repeats:  # else a step without repetition is simulated next
                self._update_by_zeros()
        if not (repeats and failure):
            self._log(states)
        return self._planned(self._sizes(), memory, traffic, failure)

    def outline(self, states: StateLog) -> RankPlan:
        """Returns the figures that need no step; equal parameters have equal gradients and optimizer state."""
        sizes = states.predict(self._parameters())
        if sizes is None:
            self._update_by_zeros()
            self._log(states)
            sizes = self._sizes()
        return self._planned(sizes)

    def _sizes(self) -> Sizes:
        return self._gradients, Meter().storages.assign(_state(self._run), Purpose.OPTIMIZER)

    def _measure_gradients(self, meter: Meter) -> None:
        self._gradients = meter.storages.assign(_gradients(self._run), Purpose.GRADIENTS)
        gradients = [item.parameter.grad for item in self._run.parameters]
        self._each_gradient = [0 if gradient is None else local_part(gradient).nbytes for gradient in gradients]

    def _log(self, states: StateLog) -> None:
        optimizer = self._run.optimizer
        state = [_bytes(_tensors_of(optimizer.state.get(item.parameter, {}))) for item in self._run.parameters]
        # Otherwise, parameters share memory, or there is more than they take, and no size belongs to one parameter.
        if (sum(self._each_gradient), sum(state)) == self._sizes():
            states.add(self._parameters(), zip(self._each_gradient, state, strict=True))

    def _planned(
        self, sizes: tuple[int, int], memory: Memory | None = None, traffic: Traffic | None = None, failure: str = ""
    ) -> RankPlan:
        gradients, optimizer = sizes
        return RankPlan(
            rank=self._rank,
            pipeline_rank=self._rank // (self._layout.world_size // self._layout.pp),
            weights=Meter().storages.assign(_weights(self._run), Purpose.WEIGHTS),
            gradients=gradients,
            optimizer=optimizer,
            memory=memory,
            traffic=traffic,
            failure=failure,
            outline=self._run.outline,
            compiled=self._compiled,
            trained=frozenset(item.name for item in self._run.parameters if item.parameter.requires_grad),
        )

    def _parameters(self) -> tuple[Hashable, ...]:
        """Returns all that each parameter's gradient and optimizer state depend on.

        That is its name without numbers, role, shape, dtype and parameter group.
        """
        groups: dict[int, str] = {}
        for number, group in enumerate(self._run.optimizer.param_groups):
            # Names differ between parameters that are alike in all else
            settings = {name: value for name, value in group.items() if name not in ("params", *NAMES)}
            groups |= dict.fromkeys(map(id, group["params"]), f"{number} {settings}")
        return tuple(
            (
                # Numbers are places of layers, which do not matter
                re.sub(r"\d+", "#", item.name),
                item.role,
                item.parameter.shape,
                str(getattr(item.parameter, "placements", "")),
                local_part(item.parameter.detach()).shape,
                item.parameter.dtype,
                item.parameter.requires_grad,
                groups.get(id(item.parameter), ""),
            )
            for item in self._run.parameters
        )

    def _play(self) -> tuple[Memory, Traffic]:
        """Simulate all micro-batches where most can repeat what a few did; else enough to know what each further adds.

        At first as many are simulated as the pipeline has ranks, then a few more: one, where the stages accept that.
        What the few more add is added for all further ones. If that includes memory in a pipeline, it is what the
        second few add: only then are all ranks busy.
        """
        count, _ = micro_batches(self._run.job, self._layout)
        pipeline = self._layout.pp
        if pipeline > 1:
            with eagerly(), self._attention():
                self._run.executor.evaluate([self._batch()])  # the first call also negotiates shapes
        # Some schedules refuse as few micro-batches as there are ranks
        first = pipeline if self._may_run(pipeline) else 2 * pipeline
        more = next(
            (n for n in range(1, pipeline) if self._may_run(first + n) and self._may_run(first + 2 * n)), pipeline
        )
        if count <= first + more or (self._repeats and count <= WHOLE):
            meter = self._measure(count)
            return meter.storages.memory(), self._traffic(meter, meter, 0)
        played = first + more
        fewer, meter = self._measure(first), self._measure(played)
        before, memory = fewer.storages.memory(), meter.storages.memory()
        if pipeline == 1:  # micro-batches share their memory
            return memory, self._traffic(meter, fewer, count - played)
        if memory.peak > before.peak and count >= played + more:
            played += more
            fewer, before, meter = meter, memory, self._measure(played)
            memory = meter.storages.memory()
        further = (count - played) / more
        return memory.continued(before, further), self._traffic(meter, fewer, further)

    def _with_hooks(self, memory: Memory, traffic: Traffic) -> tuple[Memory, Traffic]:
        """Add what hooks do before the step, whose memory is free again when it begins."""
        if not self._hooks:
            return memory, traffic
        count, _ = micro_batches(self._run.job, self._layout)
        one = self._measure_hooks(1)
        # Both, as the difference is what each further micro-batch adds
        two = self._measure_hooks(2) if count > 1 else one
        return memory.beside(two.storages.memory()), traffic.plus(self._traffic(two, one, max(0, count - 2)))

    def _measure_hooks(self, count: int) -> Meter:
        run, meter = self._run, Meter()
        context = _step_context(run, None, [self._batch() for _ in range(count)])
        self._name_all(meter)
        with meter.watching(), eagerly(), self._attention():
            for hook in self._hooks:
                hook.on_step_begin(context)
        self._name_all(meter)
        return meter

    def _name_all(self, meter: Meter) -> None:
        """Name what exists throughout a step; fsdp puts other storages in the place of some."""
        meter.storages.assign_storages(self._beside.alive(), Purpose.BESIDE)
        meter.storages.assign(_state(self._run), Purpose.OPTIMIZER)
        meter.storages.assign(_weights(self._run), Purpose.WEIGHTS)
        meter.storages.assign(self._run.model.buffers(), Purpose.BUFFERS)

    def _may_run(self, count: int) -> bool:
        """Whether the stages accept `count` micro-batches."""
        job, layout = self._run.job, self._layout
        _, rows = micro_batches(job, layout)
        train = attrs.evolve(
            job.train, global_batch_size=count * rows * layout.data_parallel * layout.run[1], batch_schedule=None
        )
        fewer = attrs.evolve(job, train=train)
        return layout.pp == 1 or not any(list(stage.problems(fewer, layout)) for stage in job.parallel.values())

    def _traffic(self, meter: Meter, fewer: Meter, further: float) -> Traffic:
        """Returns what `meter` counted, plus `further` times its difference to `fewer`."""
        mesh = self._run.context.mesh
        assert mesh is not None
        return Traffic(
            transfers=_continued(meter.transfers, fewer.transfers, further),
            lines={name: line_of(group, mesh) for name, group in meter.groups.items()},
            flops=meter.flops + further * (meter.flops - fewer.flops),
            launches=meter.launches + round(further * (meter.launches - fewer.launches)),
            kept=meter.storages.kept + round(further * (meter.storages.kept - fewer.storages.kept)),
        )

    def _measure(self, count: int) -> Meter:
        """Simulate a whole step of `count` micro-batches, with the update."""
        run, meter = self._run, Meter()
        batches = [self._batch() for _ in range(count)]
        self._loss.meter = meter
        self._name_all(meter)
        repeating = self._repetition(meter, count).applied() if self._repeats else nullcontext()
        with meter.watching(), eagerly():
            stepper = Stepper(run)
            with repeating, self._attention():
                _, sums = stepper.gradients(batches, step=0)
            launches = meter.launches
            norm = stepper.norm()
            # Before the update, after which there may be no gradients
            self._measure_gradients(meter)
            stepper.update(_step_context(run, norm), sums["loss_sum"])
        # Norm and update are a few kernels for all parameters on a GPU, and several for each on a CPU
        meter.launches = launches
        self._name_all(meter)
        return meter

    def _repetition(self, meter: Meter, count: int) -> Repetition:
        return Repetition(meter, self._run.model, self._loss, count, self._report)

    def _attention(self) -> AbstractContextManager[object]:
        """Attention as on the planned device."""
        return FusedAttention() if self._on_gpu else nullcontext()

    def _batch(self) -> Batch:
        return zero_batch(self._run.job, micro_batches(self._run.job, self._layout)[1])

    def _update_by_zeros(self) -> None:
        # Without a step, each gradient is as large as its parameter; the update then makes the optimizer's state.
        # Within the context of a micro-batch, in which stages set the dtype of gradients.
        with around(self._run.built_stages, self._run.model, backward=True, last=False):
            for item in self._run.parameters:
                p = item.parameter
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype) if p.requires_grad else None
        self._measure_gradients(Meter())
        self._run.optimizer.step()


def _continued(now: Mapping[Transfer, int], before: Mapping[Transfer, int], further: float) -> Mapping[Transfer, int]:
    """Returns `now` plus `further` times its difference to `before`: in number, or for some transfers in size."""
    # A transfer that only the larger step has is a grown one if the smaller step has one like it of another size
    grown = {(old.kind, old.group, times): old for old, times in before.items() if old not in now}
    continued: Counter[Transfer] = Counter()
    for transfer, times in now.items():
        smaller = grown.get((transfer.kind, transfer.group, times))
        if transfer not in before and smaller is not None:
            whole = transfer.whole + round(further * (transfer.whole - smaller.whole))
            continued[attrs.evolve(transfer, whole=whole)] += times
        else:
            continued[transfer] += times + round(further * (times - before.get(transfer, 0)))
    return continued


def _weights(run: Run) -> list[Tensor]:
    return [item.parameter.detach() for item in run.parameters]


def _gradients(run: Run) -> list[Tensor]:
    return [item.parameter.grad for item in run.parameters if item.parameter.grad is not None]


def _state(run: Run) -> list[Tensor]:
    return [tensor for state in run.optimizer.state.values() for tensor in _tensors_of(state)]


def _tensors_of(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = [local_part(tensor).untyped_storage() for tensor in tensors]
    # By storage, since tensors may share one
    return sum({identity_of(storage): storage.nbytes() for storage in storages}.values())


def _step_context(run: Run, norm: Tensor | None, batches: Sequence[Batch] = ()) -> StepContext:
    return StepContext(
        job=run.job,
        model=run.model,
        optimizer=run.optimizer,
        tokenizer=run.context.tokenizer,
        folder=None,
        step=1,
        batches=batches,
        build=run.context,
        executor=run.executor,
        grad_norm=norm,
    )
