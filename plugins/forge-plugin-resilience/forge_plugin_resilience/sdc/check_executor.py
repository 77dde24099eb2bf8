"""The executor around another one that computes a step again and compares."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from forge_core.contracts.runtime import StepOutput
from forge_core.parallel.mesh import gather_objects, global_rank
from forge_kit.nn.recomputing import Recomputing
from forge_kit.nn.step_state import StepState
from forge_kit.torch_internals import reduce_gradients
from forge_plugin_resilience.sdc.digests import bit_sums, digest, norms
from forge_plugin_resilience.sdc.faults import CorruptionError, Fault, named

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import Executor, LossFunction
    from forge_plugin_resilience.sdc.sdc import SDC

Figures = Mapping[str, float]
"""Sum of bits of every gradient and of the loss, by name; its norm where there is a tolerance."""


class CheckedExecutor:
    """See `forge_core.contracts.runtime.Executor`. All ranks check the same steps and decide together."""

    def __init__(self, plugin: SDC, inner: Executor, model: Model, context: BuildContext) -> None:
        self._plugin, self._inner, self._model, self._context = plugin, inner, model, context

    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
        """Evaluates by the inner executor, without a check, as no weights depend on it."""
        return self._inner.evaluate(batches, measure)

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        """Compute a step; if it is due, twice on all ranks, and a third time if they differ on any. Collective then."""
        if not self._plugin.checked.due:
            return self._inner.train_step(batches, denominator)
        before = StepState(self._model, self._context.device)
        output, first = self._compute(batches, denominator)
        before.restore()
        # What modules count in it is counted already.
        with Recomputing(self._context.auxiliary):
            _, second = self._compute(batches, denominator)
        every = gather_objects((self._differing(first, second), self._digest(second), socket.gethostname()))
        apart, self._plugin.checked.digests, hosts = map(list, zip(*every, strict=True))
        # All ranks compute a third time if one must: they need each other for it.
        if any(apart):
            before.restore()
            output = self._decide(batches, denominator, (first, second), apart, hosts)
        return output

    def _compute(self, batches: Sequence[Batch], denominator: Tensor) -> tuple[StepOutput, Computation]:
        """Gradients and loss from nothing; with what identifies them."""
        local = _LocalGradients(self._model, self._figures_of) if isinstance(self._model, FSDPModule) else None
        with local.kept() if local else nullcontext():
            output = self._inner.train_step(batches, denominator)
        if isinstance(self._model, FSDPModule) and self._context.layout.pp > 1:
            # Otherwise done by `complete_gradients`, which is too late for a comparison; gradients that are already
            # reduced are not reduced again.
            reduce_gradients(self._model)
        gradients = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None}
        loss = {"the loss": output.per_sequence[0]}
        return output, Computation(self._figures_of({**gradients, **loss}), local.figures if local else {})

    def _figures_of(self, tensors: Mapping[str, Tensor]) -> Figures:
        return norms(tensors) if self._plugin.tolerance else bit_sums(tensors)

    def _digest(self, computation: Computation) -> str:
        """Digest of all gradients and the loss; empty where they are not the same to the bit each time."""
        return "" if self._plugin.tolerance else digest(computation.all.values())

    def _differing(self, one: Computation, other: Computation) -> list[str]:
        """Names of the figures that differ on this rank: first the ones before ranks sum gradients, then the others."""
        shared, local = (
            [name for name in sorted({*a, *b}) if not self._equal(a.get(name), b.get(name))]
            for a, b in ((one.shared, other.shared), (one.local, other.local))
        )
        return [*(f"own {name}" for name in local), *shared][:SHOWN]

    def _equal(self, one: float | None, other: float | None) -> bool:
        if one is None or other is None or not self._plugin.tolerance:
            return one == other
        return abs(one - other) <= self._plugin.tolerance * max(abs(one), abs(other))

    def _decide(
        self,
        batches: Sequence[Batch],
        denominator: Tensor,
        earlier: tuple[Computation, Computation],
        apart: Sequence[Sequence[str]],
        hosts: Sequence[str],
    ) -> StepOutput:
        """Compute a third time, and determine which ranks were wrong. The gradients keep the third computation."""
        checked, auxiliary = self._plugin.checked, self._context.auxiliary
        # Counted again: if the first computation was wrong, the counts of modules in it may be wrong, too.
        layout, rows = self._context.layout, sum(len(batch["labels"]) for batch in batches)
        sequences = rows * layout.data_parallel * layout.run[1]
        auxiliary.begin_step(denominator, sequences, len(batches) * layout.token_ranks)
        output, third = self._compute(batches, denominator)
        not_first, not_second = (self._differing(third, one) for one in earlier)
        every = gather_objects((not_first, not_second, self._digest(third)))
        checked.digests = [value for _, _, value in every]
        suspects, faults, mended = _culprits(apart), [], True
        for rank, (not_first, not_second, _) in enumerate(every):
            # The third computation agrees with neither: nothing shows which one is right
            if not_first and not_second:
                mended = False
                what = f"three computations of step {checked.step} gave three results ({not_first[0]})"
            elif rank not in suspects:
                continue
            else:
                which = "first" if not_first else "second"
                what = f"the {which} of three computations of step {checked.step} was wrong ({apart[rank][0]})"
            faults.append(Fault(checked.step, rank, hosts[rank], what))
        self._tell(checked.found(faults), mended)
        return output

    def _tell(self, faults: Sequence[Fault], mended: bool) -> None:
        """Warn of repaired faults; for others, end the run on all ranks if `on_fault` is "stop"."""
        step = self._plugin.checked.step
        if mended:
            text = f"step {step} was computed wrongly and repaired: it continues with gradients that came out twice"
        else:
            text = f"step {step} has other gradients each time: a processor or its memory is broken, or a kernel is "
            text += "not deterministic"
        if len(faults) > 1 and self._context.layout.world_size > self._context.layout.replicate:
            text += "\nthese ranks compute together, and what one has wrong reaches the others"
        if not mended and self._plugin.on_fault == "stop":
            hint = "leave its machine out, and run the same command to continue from the last checkpoint"
            raise CorruptionError(f"{text}\n{named(faults)}\n{hint}")
        if global_rank() == 0:
            warnings.warn(f"{text}\n{named(faults)}", stacklevel=2)


SHOWN = 3
"""Names of gradients that ranks exchange."""


@frozen
class Computation:
    """Figures that identify the gradients of one computation on this rank."""

    shared: Figures
    """Figures of gradients as the executor leaves them, and of the loss."""
    local: Figures
    """Figures of gradients before ranks have summed them, where the executor does that."""

    @property
    def all(self) -> Figures:
        """Both, for one digest; a name of `local` gets the prefix `own `, as a gradient may be in both."""
        return {**self.shared, **{f"own {name}": value for name, value in self.local.items()}}


def _culprits(differing: Sequence[Sequence[str]]) -> set[int]:
    """Ranks that were wrong by themselves, if any; else all that differ, which summed what one of them had wrong."""
    own = {rank for rank, names in enumerate(differing) if names and names[0].startswith("own ")}
    return own or {rank for rank, names in enumerate(differing) if names}


class _LocalGradients:
    """Figures of this rank's own gradients under FSDP, which sums them over ranks as they are made.

    Summed, an error of one rank shows on the rank that keeps this part of the gradient.
    """

    def __init__(self, model: nn.Module, figures_of: Callable[[Mapping[str, Tensor]], Figures]) -> None:
        self.figures: dict[str, float] = {}
        self._model, self._figures_of = model, figures_of
        self._sharded = {id(parameter) for parameter in model.parameters()}
        self._watched: set[int] = set()
        self._handles: list[Any] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Watch the gathered parameters, which exist within forward and backward only."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                self._handles.append(module.register_forward_pre_hook(self._watch))  # after FSDP's, which gathers
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def _watch(self, *_: object) -> None:
        for name, parameter in self._model.named_parameters():
            # FSDP replaces sharded parameters by gathered ones: what was no parameter at the start is gathered
            if id(parameter) not in self._sharded | self._watched and parameter.requires_grad:
                self._watched.add(id(parameter))
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._adder(name)))

    def _adder(self, name: str) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                value = self._figures_of({name: parameter.grad})[name]
                self.figures[name] = self.figures.get(name, 0) + value

        return add
