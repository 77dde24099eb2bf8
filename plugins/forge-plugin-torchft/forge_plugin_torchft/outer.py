"""The hooks `diloco` and `local_sgd`: groups train alone for many steps, and then agree on the weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field
from attrs.validators import ge, gt, lt

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ForgeError, Problem

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_torchft.session import Session

TRIES = 5
"""Attempts to end a round, each with the groups that are left."""


@define(kw_only=True, slots=False)
class Outer(TrainingHook):
    """Base of hooks that let groups train alone, and agree on weights every `sync_every` steps."""

    sync_every: int = field(default=128, validator=gt(0))
    """Steps of a round, in which a group trains alone on its own rows of each batch."""
    commits: int = field(default=0, init=False)
    """Agreements made so far."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if _stage_of(job) is None:
            yield Problem("", "needs the stage [parallel.torchft], by which groups meet")
        if periodic(job) is not self:
            yield Problem("", "a job has one hook diloco or local_sgd at most")

    def on_train_begin(self, context: TrainContext) -> None:
        """Prepare, then join; a group that is behind takes the state of another one."""
        self.prepare(context.model)
        self._join(context)

    def on_step_end(self, context: StepContext) -> None:
        """Meet the other groups once for each set of parameters that is due after this step."""
        parameters = dict(context.model.named_parameters())
        for names in self.due(context.step, parameters):
            self._meet(context, {name: parameters[name] for name in names})

    def prepare(self, model: nn.Module) -> None:
        """Called before the first step, after a checkpoint was loaded."""

    @abstractmethod
    def offer(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns new tensors, one for each parameter's part on this rank, to be averaged over groups."""

    @abstractmethod
    def accept(self, parameters: Mapping[str, Tensor], averages: Sequence[Tensor]) -> None:
        """Change the parameters by the averages, alike on all groups."""

    def due(self, step: int, parameters: Mapping[str, Tensor]) -> Iterable[Sequence[str]]:
        """Returns the parameters on which groups agree after this step, in the groups of one agreement."""
        return [list(parameters)] if step % self.sync_every == 0 else []

    def _session(self, context: TrainContext) -> Session:
        stage = _stage_of(context.job)
        if stage is None:
            raise ForgeError("hooks.diloco and hooks.local_sgd need the stage [parallel.torchft]")
        session: Session = stage.session
        return session

    def _join(self, context: TrainContext) -> None:
        state = self._session(context).quorum(self.commits, context)
        if state is not None:
            context.put_state(state)

    def _meet(self, context: StepContext, parameters: Mapping[str, Tensor]) -> None:
        import torch

        session, done = self._session(context), False
        with torch.no_grad():
            for _ in range(TRIES):
                # A new quorum, without newcomers: a group that was lost in the round must not cost the others the
                # round, and a group that has just joined has no part in it.
                session.quorum(self.commits, context, heal=False, shrink=True)
                if not session.takes_part:
                    break
                # In each try again: sums are made in place, and one that failed may have changed them
                averages = self.offer(parameters)
                for average in averages:
                    session.sum(average)
                if done := session.commit():
                    self.accept(parameters, [average / session.participants for average in averages])
                    self.commits += 1
                    break
        context.log("participants", session.participants if done else 0)
        # No round follows, for which others would wait
        if context.step >= context.job.train.steps:
            return
        if session.anywhere(bool(context.requests.stop)):
            session.close()  # before the save: the others would wait for it
        else:  # now newcomers: a round begins for them and for all others with the same weights
            self._join(context)


@define(kw_only=True, slots=False)
class LocalSGD(Outer):
    """Groups train alone for `sync_every` steps, then take the mean of their weights (Stich 2019, algorithm 1).

    The state of the optimizer stays each group's own.
    """

    def offer(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns copies of the weights, since sums over groups are made in place."""
        from forge_core.parallel.mesh import local_part

        return [local_part(parameter.detach()).clone() for parameter in parameters.values()]

    def accept(self, parameters: Mapping[str, Tensor], averages: Sequence[Tensor]) -> None:
        """Replace the weights by their means."""
        from forge_core.parallel.mesh import local_part

        for parameter, average in zip(parameters.values(), averages, strict=True):
            local_part(parameter.detach()).copy_(average)


@define(kw_only=True, slots=False)
class DiLoCo(Outer):
    """Groups train alone for `sync_every` steps, then an outer optimizer steps by the mean of their changes.

    That optimizer is SGD with Nesterov momentum (Douillard et al. 2023, algorithm 1); the job's own is the inner one,
    whose state stays each group's. With `fragments` the parameters meet in parts, at different steps, so that less is
    sent at once (Streaming DiLoCo, Douillard et al. 2025, without its overlap and quantisation).

    State: two tensors like each parameter.
    """

    outer_lr: float = field(default=0.7, validator=gt(0))
    """Rate of the outer optimizer."""
    outer_momentum: float = field(default=0.9, validator=[ge(0), lt(1)])
    """Momentum of the outer optimizer; 0: plain SGD."""
    fragments: int = field(default=1, validator=gt(0))
    """Parts in which the parameters meet, each once in `sync_every` steps."""

    resumes_as: ClassVar[Any] = "flag"

    def __attrs_post_init__(self) -> None:
        self.start: dict[str, Tensor] = {}  # weights at the last agreement, by parameter
        self.momentum: dict[str, Tensor] = {}

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Requires in addition that `fragments` divides `sync_every`."""
        yield from super().problems(job, layout)
        if self.sync_every % self.fragments:
            message = f"{self.fragments} does not divide sync_every = {self.sync_every}"
            yield Problem("fragments", f"{message}: parts meet in equal distances")

    def state_dict(self) -> dict[str, Any]:
        """Returns `commits`, and `start.NAME` and `momentum.NAME` for each parameter."""
        start = {f"start.{name}": tensor for name, tensor in self.start.items()}
        momentum = {f"momentum.{name}": tensor for name, tensor in self.momentum.items()}
        return {"commits": self.commits, **start, **momentum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the tensors as they come, whole and on the host; `offer` places them like their parameters."""
        self.commits = state["commits"]
        self.start = {n.removeprefix("start."): t for n, t in state.items() if n.startswith("start.")}
        self.momentum = {n.removeprefix("momentum."): t for n, t in state.items() if n.startswith("momentum.")}

    def prepare(self, model: nn.Module) -> None:
        """Add starting points, and momentum of 0, for parameters that no checkpoint had."""
        import torch

        for name, parameter in model.named_parameters():
            self.start.setdefault(name, parameter.detach().clone())
            self.momentum.setdefault(name, torch.zeros_like(parameter.detach()))

    def due(self, step: int, parameters: Mapping[str, Tensor]) -> Iterable[Sequence[str]]:
        """Returns one fragment every `sync_every / fragments` steps, in turn: parameters that follow each other."""
        part, names = self.sync_every // self.fragments, list(parameters)
        if step % part:
            return []
        number = (step // part - 1) % self.fragments
        size = sum(tensor.numel() for tensor in parameters.values())
        ends, total = [], 0
        for name in names:  # contiguous, and of about the same size
            ends.append(min(self.fragments - 1, total * self.fragments // size))
            total += parameters[name].numel()
        return [[name for name, end in zip(names, ends, strict=True) if end == number]]

    def offer(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns the outer gradients: weights at the last agreement less the present ones."""
        from forge_core.parallel.mesh import local_part

        self._place(parameters)
        return [local_part(self.start[name]) - local_part(p.detach()) for name, p in parameters.items()]

    def accept(self, parameters: Mapping[str, Tensor], averages: Sequence[Tensor]) -> None:
        """Step from the last agreement by the mean outer gradient; training continues from there."""
        from forge_core.parallel.mesh import local_part

        for (name, parameter), change in zip(parameters.items(), averages, strict=True):
            start, momentum = local_part(self.start[name]), local_part(self.momentum[name])
            momentum.mul_(self.outer_momentum).add_(change)
            # Nesterov momentum as `torch.optim.SGD` has it, without dampening
            start.sub_(change + self.outer_momentum * momentum, alpha=self.outer_lr)
            local_part(parameter.detach()).copy_(start)

    def _place(self, parameters: Mapping[str, Tensor]) -> None:
        """Split and move what came from a checkpoint, which is whole and on the host, like its parameter."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        for held in (self.start, self.momentum):
            for name, parameter in parameters.items():
                tensor = held[name]
                if isinstance(parameter, DTensor) and not isinstance(tensor, DTensor):
                    tensor = distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
                held[name] = tensor.to(parameter.device)


def periodic(job: Job) -> Outer | None:
    """The hook by which groups of a job agree at the end of rounds; None: they sum gradients in each step."""
    return next((hook for hook in job.hooks.values() if isinstance(hook, Outer)), None)


def _stage_of(job: Job) -> Any:
    from forge_plugin_torchft.stage import TorchFT

    return next((stage for stage in job.parallel.values() if isinstance(stage, TorchFT)), None)
