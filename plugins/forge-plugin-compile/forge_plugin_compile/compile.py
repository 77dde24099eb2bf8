"""The component `compile`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

from attrs import frozen

from forge_core.config.keys import walk_components
from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.errors import JobError, Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import ParallelStage
    from forge_core.job import Job

MODULES = "it changes linear layers, and the changed ones must be compiled"
HOOKS = "its hooks inside the blocks must be there when they are traced"
WHOLE = "a block does not fit into one graph"


@runtime_checkable
class HasGraphBreak(Protocol):
    """A component of a model whose module may need a number on the host, as `forge_plugin_moe.MoE` does."""

    def graph_break(self, precision: str, device: str, backend: str) -> str:
        """Returns what the host waits for with this `train.precision` on a device, as "cpu" or "cuda"; empty: nothing.

        A backend that only traces, such as `eager`, may take what `inductor` cannot.
        """
        ...


@frozen(kw_only=True)
class Compile(ParallelComponent):
    """Compiles each block of the model, in place.

    Equal blocks share one graph: the first step compiles one block forward and backward, the first evaluation once
    more without gradients. Generation with a cache runs as written, since its shapes change with every token.
    """

    after: ClassVar[Mapping[str, str]] = {
        "pp": "only the blocks that this rank keeps are compiled",
        "float8": MODULES,
        "tp": HOOKS,
        "ep": HOOKS,
        "cp": "it replaces how attention sees the sequence, which belongs into the graph",
        "activation_checkpointing": "the graph decides which operations are recomputed",
    }
    before: ClassVar[Mapping[str, str]] = {"fsdp": "parameters are gathered and freed around the compiled blocks"}

    backend: str = "inductor"
    """Backend that torch.compile passes graphs to. `eager` and `aot_eager` only trace, which shows whether a model
    can be traced."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Objective of `inductor`; by default a balance of compile time and speed."""
    dynamic: bool = False
    """Whether one graph serves all shapes. Sequences of a run have one length, and code for one shape is faster."""
    fullgraph: bool = True
    """Whether a block that does not fit into one graph is an error with the reason; false runs the rest eagerly."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.mode is not None and self.backend != "inductor":
            message = f"{self.mode!r} is a mode of the inductor, but backend is {self.backend!r}; leave it out"
            yield Problem("mode", message)
        for name, stage in job.parallel.items():
            if self.fullgraph and stage.waits_in_blocks:
                message = f"{WHOLE} with parallel.{name}: {stage.waits_in_blocks}"
                yield Problem("fullgraph", f"{message}; set fullgraph = false")
        # With "auto", only what would be on both devices is known yet
        on_each = [set(self._graph_breaks(job, device)) for device in devices_of(job)]
        yield from sorted(set.intersection(*on_each), key=str)

    def _graph_breaks(self, job: Job, device: str) -> Iterator[Problem]:
        for path, part in walk_components(job.model, "model"):
            if not (self.fullgraph and isinstance(part, HasGraphBreak)):
                continue
            if reason := part.graph_break(job.train.precision, device, self.backend):
                yield Problem("fullgraph", f"{WHOLE} with {path}: {reason}; set fullgraph = false")

    def build(self, context: BuildContext) -> ParallelStage:
        """Returns the stage.

        Raises:
            JobError: a block does not fit into one graph on the device of the run.
        """
        from forge_plugin_compile.stage import CompileStage

        if problems := list(self._graph_breaks(context.job, context.device.type)):
            raise JobError(problem.below(context.path) for problem in problems)
        return CompileStage(self)


def devices_of(job: Job) -> tuple[str, ...]:
    """The devices that a job may run on."""
    return ("cpu", "cuda") if job.train.device == "auto" else (job.train.device,)
