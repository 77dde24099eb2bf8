"""The plugin `mup`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import define, field
from attrs.validators import ge

from forge_core import Job, JobError, Plugin, Problem, hookimpl
from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import did_you_mean
from forge_kit.optim.update_size import HasUpdateSize
from forge_plugin_mup.horizon import Horizon

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_plugin_mup.shapes import Comparison
    from forge_plugin_mup.tables import Factors

LAYERS = "layers"
"""Key of the number of layers, as models have it."""


@define(kw_only=True, slots=False)
class MuP(Plugin):
    """Rates, decay, epsilon and initial values of a model, from a smaller one on which they were tuned.

    mup: of the width, by Yang et al. 2022, "Tensor Programs V" (arXiv 2203.03466), table 8. complete_p: of width and
    depth, with AdamW's epsilon, by Dey et al. 2025, "Don't be lazy" (arXiv 2505.01618), table 1 with alpha = 1. u_mup:
    without a base, by Blake et al. 2024 (arXiv 2407.17465), table 2: all sizes are 1 at the start, so that rates are
    about 1, and small and large models have the same.

    With `base_batch_tokens` or `base_tokens`, AdamW follows batch and length too (Malladi et al. 2022, arXiv
    2205.10287; Mlodozeniec et al. 2025, arXiv 2512.22382).

    The job is written as for the base model, but for its `[model]`. Factors on logits, on attention scores and on what
    a block adds to the residual stream are absorbed by initial values, rates and epsilon, with which training is the
    same; so the model has no further operation, and exports and generation are as without the plugin.
    `[[optimizer.groups]]` is the base's too: rate, decay and epsilon in a table have the factors of their parameters.
    """

    parametrization: Literal["mup", "complete_p", "u_mup"] = "complete_p"
    """The rules: `mup` for the width, `complete_p` and `u_mup` for width and depth."""
    base: Mapping[str, Any] = field(factory=dict)
    """`[plugins.mup.base]`: keys of `[model]` with their values in the base model: `dim = 256`, `layers = 4`,
    `attention.heads = 4`. All other keys are the model's own. Required, but for `u_mup`, which has no base: there, they
    are the smallest size of the coordinate check."""

    base_batch_tokens: int = field(default=0, validator=ge(0))
    """Tokens a step of the base's run; rate, decay, betas and epsilon of AdamW follow the job's. 0: they do not."""
    base_tokens: int = field(default=0, validator=ge(0))
    """Tokens of the base's whole run, likewise."""

    def __attrs_post_init__(self) -> None:
        self._comparison: Comparison | None = None  # no field: fields without `init` are state of checkpoints

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the keys of the base, the base itself, and that the optimizer declares the size of its updates."""
        # The shapes follow when the model is built, which a check does too since this plugin wraps it
        if not self.base and self.parametrization != "u_mup":
            yield Problem("base", "names no key of the model; give the sizes of the model that was tuned")
        base, problems = with_keys(job.model, self.base)
        yield from (problem.below("base") for problem in problems)
        if not problems:
            # Such as heads that do not divide the base's width
            yield from (problem.below("base") for problem in base.problems(attrs.evolve(job, model=base), layout))
        yield from self.horizon(job).problems(job)
        if not isinstance(job.optimizer, HasUpdateSize):
            message = f"{type(job.optimizer).__name__} does not declare `update_size(role, outputs, inputs)`"
            yield Problem("", f"{message}, from which its rates follow; see forge_kit.optim.update_size")

    @hookimpl(wrapper=True)
    def forge_build_model(self, component: ModelComponent, context: BuildContext) -> Generator[None, Model, Model]:
        """Compares the model with its base, and sets initial values."""
        from forge_plugin_mup.absorbed import absorb, logit_problems
        from forge_plugin_mup.initial_values import scale_initial_values
        from forge_plugin_mup.shapes import compare
        from forge_plugin_mup.tables import initial

        model = yield
        if self.parametrization == "u_mup":
            from forge_plugin_mup.unit import unit_initial_values, unit_scaled

            self._comparison = unit_scaled(model, context.job.train.seq_len)
            unit_initial_values(model, self._comparison.places)
            return model
        # The base is built beside the model and dropped: on the meta device it takes no memory
        base, problems = with_keys(component, self.base)
        if problems:
            raise JobError(problem.below("plugins.mup.base") for problem in problems)
        try:
            twin = base.build(context)
            compared = compare(model, twin)
            problems = [*logit_problems(component, base, model, compared)]
            if self.parametrization == "mup" and compared.depth != 1:
                message = f"has {len(twin.layers)} layers, and the model {len(model.layers)}; mup is for the width"
                problems.append(Problem("layers", f'{message}; take parametrization = "complete_p"'))
            if problems:
                raise JobError(problems)
            self._comparison = absorb(compared, model, twin)
            own = {name: initial(self._comparison.places[name]) for name in compared.twins}
            scale_initial_values(model, compared.twins, own)
        except JobError as error:
            raise JobError(problem.below("plugins.mup.base") for problem in error.problems) from error
        return model

    @hookimpl(wrapper=True)
    def forge_build_optimizer(self, context: BuildContext) -> Generator[None, torch.optim.Optimizer, Any]:
        """Divides the groups of whatever optimizer is built by the factors of their parameters."""
        optimizer = yield
        # Before the core divides groups by `[[optimizer.groups]]` and reads the base rates
        factors, horizon = self.factors(context.job), self.horizon(context.job)
        groups = [horizon.applied(group) | {"factors": horizon.factors} for group in optimizer.param_groups]
        optimizer.param_groups[:] = [part for group in groups for part in divided(group, factors)]
        return optimizer

    def horizon(self, job: Job) -> Horizon:
        """Returns batch and length of the job, relative to the base's run."""
        return Horizon.of(job, self.base_batch_tokens, self.base_tokens)

    def factors(self, job: Job) -> dict[str, Factors]:
        """Returns the factors of each parameter of the whole model, by name."""
        from forge_plugin_mup.tables import factors

        assert self._comparison is not None, "the model is built first"
        optimizer: Any = job.optimizer
        found: dict[Any, Factors] = {}
        for place in self._comparison.places.values():
            if place not in found:
                found[place] = factors(place, optimizer.update_size, self._comparison.depth, self.parametrization)
        return {name: found[place] for name, place in self._comparison.places.items()}

    def grows(self, axis: str) -> bool:
        """Returns whether the base names a key that grows with the width, or the depth."""
        # Of tables only the width: layers are the model's own
        names = [key for key, value in self.base.items() if type(value) is int or isinstance(value, Mapping)]
        return (LAYERS in names) if axis == "depth" else any(name != LAYERS for name in names)

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Yields the factors, with the parameters that have them."""
        horizon = self.horizon(context.job)
        if text := str(horizon):
            reason = f"batch x {horizon.batch:.4g}, tokens x {horizon.tokens:.4g}"
            yield "mup", f"of all parameters {text}", reason
        names: dict[Factors, list[str]] = {}
        for name, each in self.factors(context.job).items() if self._comparison is not None else ():
            names.setdefault(each, []).append(name)
        for each, own in names.items():
            yield "mup", str(each), own[0] if len(own) == 1 else f"{own[0]} and {len(own) - 1} more"


def with_keys(component: Any, keys: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """Returns a component with other values of keys, of tables inside it too, and the problems with these."""
    problems: list[Problem] = []
    changes: dict[str, Any] = {}
    known = attrs.fields_dict(type(component))
    for key, value in keys.items():
        present = getattr(component, key, None)
        if key not in known:
            names = ", ".join(known)
            message = f"unknown key of the model, which has {names}{did_you_mean(key, known)}"
            problems.append(Problem(key, message))
        elif isinstance(value, Mapping) and attrs.has(type(present)):
            changes[key], inner = with_keys(present, value)
            problems += [problem.below(key) for problem in inner]
        elif type(value) is not type(present) and not (isinstance(present, float) and type(value) is int):
            problems.append(Problem(key, f"{value!r} is no value of this key, which is {present!r} in the model"))
        else:
            changes[key] = value
    if problems:
        return component, problems
    try:
        return attrs.evolve(component, **changes), []
    except (TypeError, ValueError) as error:
        return component, [Problem("", str(error))]


def divided(group: dict[str, Any], factors: Mapping[str, Factors]) -> Iterator[dict[str, Any]]:
    """Yields a group for each rate, decay and epsilon that the model has."""
    # Empty ones too, and by the whole model: all ranks of a pipeline have the same groups, and a name that the
    # model has not is in none of ours. The first group, whose rate is logged, has the rate as written.
    own = {name: (each.rate, each.decay, each.epsilon) for name, each in factors.items()}
    plain = (1.0, 1.0, 1.0)
    for wanted in [plain, *sorted({*own.values()} - {plain})]:
        places = [index for index, name in enumerate(group["names"]) if own.get(name, plain) == wanted]
        part = {key: [group[key][index] for index in places] for key in ("params", "names")}
        relative = dict(zip(("lr", "weight_decay", "eps"), wanted, strict=True))
        scaled = {key: group[key] * factor for key, factor in relative.items() if key in group}
        # `[[optimizer.groups]]` is written for the base as well: the engine multiplies its values by these factors
        both = {key: group["factors"].get(key, 1.0) * factor for key, factor in relative.items()}
        yield group | part | scaled | {"factors": both}
