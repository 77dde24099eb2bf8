"""The hook `replicas`."""

from __future__ import annotations

import socket
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import define, field
from attrs.validators import ge

from forge_core import Problem, TrainingHook
from forge_core.contracts.components import WhenResumed
from forge_plugin_resilience.sdc.faults import CorruptionError, Fault, named
from forge_plugin_resilience.sdc.sdc import SDC

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core import Job
    from forge_core.contracts.contexts import StepContext
    from forge_core.contracts.layout import Layout


@define(kw_only=True, slots=False)
class Replicas(TrainingHook):
    """Compares the copies of the model over the mesh dimension `replicate`: weights and optimizer state, to the bit.

    Of three or more copies, the ones that differ from the majority are named. Two copies cannot say which of them is
    wrong: both are named, with what the plugin `sdc` has found on their ranks.

    An optimizer that keeps the state of a matrix on one rank only (`PlacesState`) has no copies of it; of such, weights
    alone are compared.
    """

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    every: int = field(default=100, validator=ge(1))
    """Steps between comparisons. There is one before saves by `checkpoint.interval` and after the last step, too."""
    on_fault: Literal["stop", "warn"] = "stop"
    """When copies differ: end the run with exit code 77 before anything is saved, or warn and continue."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if layout.replicate < 2:
            hint = "leave this hook out, or train copies: [parallel.replicate], or replicate = 2 in [parallel.fsdp]"
            yield Problem("", f"there are no copies to compare: the layout is {layout}, so replicate is 1; {hint}")

    def on_step_end(self, context: StepContext) -> None:
        """Compare if due, at the end of the step, since saves come after it. Collective."""
        interval, last = context.job.checkpoint.interval, context.step == context.job.train.steps
        if last or context.step % self.every == 0 or (interval and context.step % interval == 0):
            self._compare(context)

    def _compare(self, context: StepContext) -> None:
        from forge_core.parallel.mesh import gather_objects, global_rank
        from forge_kit.tools.metrics import FAULTY_RANK
        from forge_plugin_resilience.sdc.digests import bit_sums, digest

        sums = bit_sums(_tensors(context))
        every = gather_objects((digest(sums.items()), socket.gethostname()))
        groups = copies(_layout(context.job, len(every)))
        wrong = {rank: one for ranks in groups for rank, one in odd_ones([every[rank][0] for rank in ranks], ranks)}
        if not wrong:
            return
        # Names travel only now that something differs; all ranks know it, and take part.
        by_rank = gather_objects(sums)
        faults = []
        for ranks in groups:
            for rank in (rank for rank in ranks if rank in wrong):
                others = (other for other in ranks if other != rank and by_rank[other] != by_rank[rank])
                name = _first_difference(by_rank[rank], by_rank[next(others)])
                what = f"its copy after step {context.step} is {wrong[rank]} ({name})"
                faults.append(Fault(context.step, rank, every[rank][1], what + _known(context.job, rank)))
        text = f"copies of the model differ after step {context.step}\n{named(faults)}"
        if self.on_fault == "stop":
            hint = "leave the machine out, and run the same command to continue from the last checkpoint"
            raise CorruptionError(f"{text}\n{hint}")
        context.log(FAULTY_RANK, faults[0].rank)
        if global_rank() == 0:
            warnings.warn(text, stacklevel=2)


def copies(layout: Layout) -> list[list[int]]:
    """Ranks that hold copies of the same part of the model, group by group."""
    import numpy as np

    # As the run's mesh arranges them: row by row, in the order of the layout's dimensions.
    names, sizes = zip(*layout.degrees.items(), strict=True)
    ranks = np.moveaxis(np.arange(layout.world_size).reshape(sizes), names.index("replicate"), -1)
    return ranks.reshape(-1, layout.replicate).tolist()


def odd_ones(digests: Sequence[str], ranks: Sequence[int]) -> list[tuple[int, str]]:
    """Ranks whose digest differs from the majority, each with a description; all ranks if there is no majority."""
    common, number = Counter(digests).most_common(1)[0]
    if number == len(digests):
        return []
    if 2 * number > len(digests):
        return [(rank, "different from the others") for rank, one in zip(ranks, digests, strict=True) if one != common]
    return [(rank, "wrong, or another one: there is no majority") for rank in ranks]


def _tensors(context: StepContext) -> dict[str, Tensor]:
    """Weights and optimizer state of this rank, by name."""
    from torch import Tensor

    from forge_core.contracts.optimizer import PlacesState

    tensors: dict[str, Tensor] = dict(context.model.named_parameters())
    # Such an optimizer has the state of a matrix on one rank, so that replicas have other parts
    if isinstance(context.optimizer, PlacesState):
        return tensors
    names = {id(parameter): name for name, parameter in tensors.items()}
    for parameter, slots in context.optimizer.state.items():
        held = {slot: value for slot, value in slots.items() if isinstance(value, Tensor)}
        tensors |= {f"{slot} of {names.get(id(parameter), '?')}": value for slot, value in held.items()}
    return tensors


def _layout(job: Job, ranks: int) -> Layout:
    from forge_core.parallel.layout import plan_layout

    return job.layout_for(ranks) or plan_layout(job, ranks)[0]


def _first_difference(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    return next(name for name in {**one, **other} if one.get(name) != other.get(name))


def _known(job: Job, rank: int) -> str:
    """The result of the check of gradients on a rank, in words."""
    checks = [plugin.checked.faults for plugin in job.plugins.values() if isinstance(plugin, SDC)]
    steps = [str(fault.step) for faults in checks for fault in faults if fault.rank == rank]
    return f"; its gradients were wrong at step {', '.join(steps)}" if steps else ""
