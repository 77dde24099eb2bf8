"""The component `pp`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, ge

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.errors import Problem
from forge_core.contracts.runtime import ParallelStage
from forge_core.parallel.layout import micro_batches

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.job import Job

ONE_STAGE = ("gpipe", "1f1b")
"""Schedules in which each rank has one stage."""
IN_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules that take micro-batches in rounds of as many as there are ranks."""
FILLED = ("1f1b", "dualpipe_v")
"""Schedules that need at least as many micro-batches as stages."""
V_SHAPED = ("zbv", "dualpipe_v")
"""Schedules in which each rank has two stages; the two of the last rank are neighbours."""
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipe_v")
"""Schedules that compute gradients of activations and of weights separately."""
SPLITS_SINCE = (2, 13)
"""The release of torch from which these are known to work; 2.11 cannot divide the backward pass of a model with an
`autograd.Function`, which embeddings and norms are here."""


def splits_backward(release: str) -> bool:
    """Returns whether a release of torch runs the schedules of `SPLIT_BACKWARD`."""
    return tuple(int(part) for part in release.split(".")[:2]) >= SPLITS_SINCE


@frozen(kw_only=True)
class PipelineParallel(ParallelComponent):
    """Pipeline parallel (torch.distributed.pipelining): ranks hold different layers and pass micro-batches on.

    For models that define `ends()`.

    The idle share of a step falls with the number of micro-batches, `train.global_batch_size` divided by data-parallel
    ranks and `train.micro_batch_size`.
    """

    drops_parameters: ClassVar[bool] = True

    degree: int = field(validator=ge(1))
    """Ranks that share the layers."""
    schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v"
    ] = "1f1b"
    """Order of the micro-batches. gpipe: all forward, then all backward (Huang et al. 2019). 1f1b: one forward, one
    backward, with less memory (PipeDream-Flush; Narayanan et al. 2021). interleaved_1f1b: several stages a rank, with
    less idle time (Megatron-LM, section 2.2). looped_bfs: the same, all forward first (Lamy-Poirier 2023).
    interleaved_zero_bubble, zbv: gradients of weights fill the idle time (Qi et al. 2024). dualpipe_v: forward and
    backward of two micro-batches together (DeepSeek-V3, in a V)."""
    stages_per_rank: int = field(default=0, validator=ge(0))
    """Stages of each rank. 0: one for gpipe and 1f1b, else two."""
    layers: tuple[int, ...] = field(default=(), validator=deep_iterable(ge(1)))
    """Layers of each stage, from the first to the last. Empty: such that the FLOPs of a token are shared as
    equally as possible, including the FLOPs of the head and of `embed` (an encoder)."""

    @property
    def stages(self) -> int:
        """Stages of all ranks."""
        return self.degree * (self.stages_per_rank or (1 if self.schedule in ONE_STAGE else 2))

    @property
    def splits_backward(self) -> bool:
        """True for schedules of `SPLIT_BACKWARD`; a single rank runs none."""
        return self.degree > 1 and self.schedule in SPLIT_BACKWARD

    @property
    def brings_executor(self) -> bool:
        """False for a single rank, whose micro-batches the job's own executor runs."""
        return self.degree > 1

    def micro_batches_alive(self, count: int) -> float:
        """Follows the order of torch's schedules, for the rank that holds the most activations."""
        if self.degree == 1:
            return 1.0
        per_rank = self.stages // self.degree
        # Passes of the first rank before its first backward pass (Megatron-LM), each through one of its stages.
        warmup = (per_rank - 1) * self.degree + 2 * (self.degree - 1)
        # gpipe and looped_bfs are not here: they run all forward passes first, and so hold every micro-batch
        alive = {
            "1f1b": self.degree,
            "interleaved_1f1b": (warmup + 1) / per_rank,
            "interleaved_zero_bubble": self.degree,
            "zbv": self.degree,
            "dualpipe_v": self.degree + 0.5,
        }
        return min(count, alive.get(self.schedule, count))

    def degrees(self) -> Mapping[str, int | str]:
        return {"pp": self.degree}

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the number of stages, the release of torch, the parameters' dtype, and the number of micro-batches."""
        if self.layers and len(self.layers) != self.stages:
            yield Problem("layers", f"has {len(self.layers)} entries, and there are {self.stages} stages")
        wanted = {**dict.fromkeys(ONE_STAGE, 1), **dict.fromkeys(V_SHAPED, 2)}.get(self.schedule)
        if wanted and self.stages_per_rank not in (0, wanted):
            message = f"{self.stages_per_rank}, but {self.schedule} has {wanted} a rank"
            yield Problem("stages_per_rank", f"{message}; leave it out, or take another schedule")
        # From the metadata of the distribution: jobs are checked without importing torch
        release = version("torch")
        if self.splits_backward and not splits_backward(release):
            message = f"{self.schedule} divides the backward pass, which torch {release} cannot do with this model"
            yield Problem("schedule", f"{message}; install torch 2.13 or newer, or take another schedule")
        if self.splits_backward and job.optimizer.parameter_dtype == "bf16":
            message = (
                f"{self.schedule} accumulates gradients itself, and with parameters in bf16 it would do so in bf16"
            )
            yield Problem("schedule", f"{message}; take another schedule")
        # Otherwise there is no such number, and the check of the batch size reports that
        sizes = job.train.batch_sizes.values()
        if not any(size % layout.data_parallel for size in sizes):
            for count in dict.fromkeys(micro_batches(job, layout, size)[0] for size in sizes):
                yield from self._micro_batch_problems(count)

    def _micro_batch_problems(self, count: int) -> Iterable[Problem]:
        hint = "change train.micro_batch_size or train.global_batch_size, or take another schedule"
        if self.schedule in IN_ROUNDS and count % max(1, count // self.degree):
            message = (
                f"{count} micro-batches cannot be run in {count // self.degree} equal rounds, as {self.schedule} does"
            )
            yield Problem("schedule", f"{message}; {hint}")
        if self.degree > 1 and self.schedule in FILLED and count < self.stages:
            message = f"{self.schedule} needs a micro-batch for each of the {self.stages} stages, and there are {count}"
            yield Problem("schedule", f"{message}; {hint}")

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        """Checks that the model can be cut, has enough layers, and that ties do not exclude a split backward pass."""
        if layout.pp == 1:
            return
        if model.ends() is None:
            message = f"{type(model).__name__} has no ends(), so it cannot be cut"
            yield Problem("", f"{message}; leave the stage out, or add ends() to the model")
        if self.splits_backward:
            yield from self._sharing_problems(model)
        layers = len(model.layers)
        if layers < self.stages:
            message = f"{self.stages} stages, but the model has {layers} layers"
            yield Problem("degree", f"{message}; lower it or stages_per_rank")
        elif self.layers and sum(self.layers) != layers:
            yield Problem("layers", f"adds up to {sum(self.layers)} layers, but the model has {layers}")

    def _sharing_problems(self, model: Model) -> Iterable[Problem]:
        """A split backward pass starts at each use of a weight, so the graph between two uses would run twice."""
        from forge_core.parallel.initialise import ties

        for end in model.ends() or ():
            for other, name in ties(model).items():
                if {other.rpartition(".")[0], name.rpartition(".")[0]} <= set(end):
                    message = (
                        f"{self.schedule} computes gradients of weights apart, and cannot where {other} and {name}"
                    )
                    hint = "take another schedule, or do not tie them"
                    yield Problem("schedule", f"{message}, which are one parameter, are in one stage; {hint}")

    def build(self, context: BuildContext) -> ParallelStage:
        """Returns a stage that does nothing for a single rank."""
        if self.degree == 1:
            return ParallelStage()
        from forge_plugin_parallel.pp_stage import PipelineParallelStage

        return PipelineParallelStage(self, context)
