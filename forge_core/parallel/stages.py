"""The order of stages, their application to a model, and the core's own: `replicate`, which sums gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import permutations
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import field, frozen

from forge_core.contracts.components import ParallelComponent, positive_or_auto
from forge_core.contracts.errors import ForgeError, JobError, Problem, did_you_mean
from forge_core.contracts.runtime import ParallelStage

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.job import Job
    from forge_core.plugins.catalog import Catalog


@frozen
class OrderedStage:
    """A stage of a job in its place, and why it stands there."""

    name: str
    type: str
    component: ParallelComponent
    reasons: tuple[str, ...] = ()


def order_stages(stages: Mapping[str, ParallelComponent], catalog: Catalog) -> list[OrderedStage]:
    """Sort stages by their `after` and `before` relations; those without a relation keep the order of the file.

    A `JobError` names the stages whose relations contradict each other, and the reasons.
    """
    # Relations refer to types, not names: a stage can name types of other distributions, and a job names stages freely.
    types = {name: catalog.type_of(type(component)).rpartition("/")[2] for name, component in stages.items()}
    pairs = list(permutations(stages, 2))
    why = {(a, b): stages[b].after[types[a]] for a, b in pairs if types[a] in stages[b].after}
    why |= {(a, b): stages[a].before[types[b]] for a, b in pairs if types[b] in stages[a].before}
    # Always the first in the file of those that may come next: graphlib's `static_order` leaves the rest to chance.
    order: list[str] = []
    while left := [name for name in stages if name not in order]:
        following = [name for name in left if not any((other, name) in why for other in left)]
        if not following:
            cycle = [f"{b} after {a} ({reason})" for (a, b), reason in why.items() if {a, b} <= {*left}]
            raise JobError.at("parallel", f"the stages cannot be ordered: {'; '.join(cycle)}")
        order.append(following[0])
    reasons = {name: tuple(f"after {a}: {reason}" for (a, b), reason in why.items() if b == name) for name in order}
    return [OrderedStage(name, types[name], stages[name], reasons[name]) for name in order]


def with_owner(job: Job, layout: Layout, catalog: Catalog) -> Mapping[str, ParallelComponent]:
    """The job's stages, and `replicate` where there are token dimensions and no stage owns the reduction over them."""
    if layout.token_ranks == 1 or any(stage.owns_reduction for stage in job.parallel.values()):
        return job.parallel
    stage: Any = catalog.load("parallel", "forge-run/replicate")(replicate=layout.replicate)  # type: ignore[call-arg]
    return {**job.parallel, "replicate": stage}


def model_problems(
    model: Model, job: Job, stages: Mapping[str, ParallelComponent], layout: Layout
) -> Iterator[Problem]:
    """Why the job cannot train the whole model: all problems of the stages, the optimizer and the packing."""
    from forge_core.contracts.optimizer import role_problems, roles_of

    parts = {f"parallel.{name}": stage.model_problems(model, layout) for name, stage in stages.items()}
    roles = role_problems(job.optimizer, roles_of(model))
    parts["optimizer"] = [*roles, *job.optimizer.model_problems(model, layout)]
    parts["data.packing"] = job.data.packing.model_problems(model, layout)
    yield from (problem.below(path) for path, problems in parts.items() for problem in problems)


def apply_stages(
    model: Model, stages: Sequence[OrderedStage], context: BuildContext
) -> tuple[Model, list[ParallelStage]]:
    """Build and apply each stage in order.

    Raises:
        JobError: some cannot be applied to this model.
        ForgeError: a stage breaks its contract (`check_contract`), changed parameter names, or lost an earlier hook.
    """
    from forge_core.contracts.model import with_defaults

    # On the bare model, before the first stage: a problem then has names familiar to the user. Checked again, because
    # the model cannot always be built when the job is checked.
    components = {stage.name: stage.component for stage in stages}
    if problems := list(model_problems(model, context.job, components, context.layout)):
        raise JobError(problems)
    built = []
    for stage in stages:
        names, modules, hooks = _names(model), dict(model.named_modules()), _hooks(model)
        transform = context.build(stage.component)
        check_contract(transform, f"parallel.{stage.name}")
        model = with_defaults(transform.apply(model))
        # Checkpoints, roles and initial values go by names: a wrapper that adds a prefix would break all three.
        changed = names ^ _names(model)
        if stage.component.drops_parameters:
            changed -= names
            left = dict(model.named_modules())
            hooks = {(name, hook) for name, hook in hooks if left.get(name) is modules[name]}  # of dropped layers: none
        if changed:
            raise ForgeError(
                f"stage parallel.{stage.name} changed the names of parameters: {', '.join(sorted(changed)[:4])}"
            )
        # A stage that swaps modules may drop what an earlier one has hung on them, and nothing would fail: torchao's
        # float8 swap silently drops the hooks of tensor parallelism, which then computes with a part of the weights.
        if lost := hooks - _hooks(model):
            places = ", ".join(f"{name} ({hook})" for name, hook in sorted(lost)[:4])
            raise ForgeError(f"stage parallel.{stage.name} lost what earlier stages had put on {places}")
        built.append(transform)
    return model, built


def check_contract(stage: object, name: str) -> None:
    """Refuse the stage of the table `name` if it has a public name that its base class does not know.

    Raises:
        ForgeError: it has such a name, or does not derive from `ParallelStage`.
    """
    # A misspelt method would never be called: with `complete_gradient`, a run trains to the end on partial gradients.
    cls = f"{type(stage).__module__}.{type(stage).__qualname__}"
    base = "forge_core.contracts.runtime.ParallelStage"
    if not isinstance(stage, ParallelStage):
        raise ForgeError(f"{name}: its build() returned a {cls}, which is no stage; derive it from {base}")
    contract = {attribute for attribute in dir(ParallelStage) if not attribute.startswith("_")}
    for attribute in dir(stage):
        if not attribute.startswith("_") and attribute not in contract:
            hint = did_you_mean(attribute, contract) or "; start the stage's other names with an underscore"
            raise ForgeError(f"{name}: {cls} has {attribute!r}, which {base} does not know{hint}")


@contextmanager
def around(stages: Sequence[ParallelStage], model: Model, *, backward: bool, last: bool) -> Iterator[None]:
    """A context of all stages around a micro-batch, for executors; the stage that was applied first is outermost.

    `backward`: whether it spans a backward pass too; `last`: whether this is the last micro-batch of its step.
    """
    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(stage.micro_batch(model, backward=backward, last=last))
        yield


def _names(model: Model) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _hooks(model: Model) -> set[tuple[str, str]]:
    """Hooks and parametrisations, each with the name of the module that carries it."""
    hooks = set()
    for name, module in model.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            hooks |= {(name, f"{kind[1:]} {key}") for key in getattr(module, kind)}
        if hasattr(module, "parametrizations"):
            hooks.add((name, "parametrisation"))
    return hooks


@frozen(kw_only=True)
class Replicate(ParallelComponent):
    """Every rank holds the whole model; gradients are summed over the token dimensions once a step."""

    owns_reduction: ClassVar[bool] = True

    replicate: int | Literal["auto"] = field(default="auto", validator=positive_or_auto)
    """Ranks that hold copies; auto takes what other stages leave over."""

    def degrees(self) -> Mapping[str, int | str]:
        return {"replicate": self.replicate}

    def build(self, context: BuildContext) -> ParallelStage:
        return ReplicateStage(context)


class ReplicateStage(ParallelStage):
    """Leaves the model as it is, and sums its gradients once all micro-batches of a step are done."""

    def __init__(self, context: BuildContext) -> None:
        self._mesh = context.mesh
        self._alone = context.layout.token_ranks == 1

    def complete_gradients(self, model: Model) -> None:
        """Sum every gradient over the token dimensions."""
        # Not in a hook of the backward pass: gradients accumulate over micro-batches first, for one reduction a step.
        from forge_core.parallel.mesh import all_reduce_tokens, sum_gradients

        if not self._alone:
            sum_gradients(model.parameters(), lambda flat: all_reduce_tokens(flat, self._mesh))
