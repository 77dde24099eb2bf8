"""The plugin `lora`."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field
from attrs.validators import ge, gt, min_len

from forge_core import Job, JobError, ModelComponent, Plugin, Problem, hookimpl, when_resumed
from forge_core.checkpoint.run_folder import JOB, run_folder
from forge_core.contracts.errors import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from forge_core.contracts.components import OptimizerComponent, TrainingHook
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model, Role
    from forge_core.contracts.optimizer import NamedParameters

FLOAT8 = "forge_plugin_lowbit.float8."


@define(kw_only=True, slots=False)
class LoRA(Plugin):
    """Low-rank adapters: freezes the model, and trains two small matrices beside each chosen one.

    W x becomes W x + s B A x, where A is (rank, in) and B is (out, rank) and starts at zero: training begins with the
    model as `[checkpoint.load]` has loaded it. The parameters are `X.lora_a.weight` and `X.lora_b.weight` beside
    `X.weight`, and `X.lora_magnitude.weight` with `dora`. A checkpoint has these, and refers to the checkpoint that was
    loaded for all else.
    """

    resumes_as = "impossible"

    rank: int = field(default=16, validator=ge(1))
    """Rows of A and columns of B."""
    alpha: float = field(default=32.0, validator=gt(0), metadata=when_resumed("flag"))
    """s is alpha / rank, or with `rslora` alpha / sqrt(rank)."""
    method: Literal["lora", "rslora", "dora"] = "lora"
    """`lora` (Hu et al. 2021); `rslora`, whose s keeps updates of one size at all ranks (Kalajdzievski 2023, theorem
    3.2); `dora`, which also trains the norm of each row of W + s B A (Liu et al. 2024)."""
    targets: tuple[str, ...] = field(default=("all",), validator=min_len(1))
    """Which matrices have adapters: a role (`matrix`, `stack`, `fused`), a pattern of module names or of
    their ends (`q`, `attention.*`, `layers.0.ffn.up`), or `all`, the matrices of all layers but routers."""
    train: tuple[str, ...] = ()
    """Patterns of further parameters that train as they are: `head.*`, `*norm*`."""
    base_dtype: Literal["unchanged", "bf16", "nf4"] = "unchanged"
    """`bf16` keeps what is frozen in bfloat16, at half of its memory; adapters stay as they are, in float32. `nf4`
    stores the frozen matrices of all layers but routers in 4 bits, and computes with their values (QLoRA, Dettmers et
    al. 2023)."""
    random_base: bool = field(default=False, metadata=when_resumed("safe"))
    """Whether a new run may train adapters beside random weights, without `[checkpoint.load]`: for tests."""
    check_first_loss: bool = field(default=True, metadata=when_resumed("safe"))
    """Whether a new run whose `[checkpoint.load]` has no adapters compares, before its first step, the loss with fresh
    adapters and without them, and ends if they differ: two forward passes of one micro-batch."""

    @property
    def scale(self) -> float:
        """s, by which B A is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.method == "rslora" else self.rank)

    @property
    def adapters_alone(self) -> bool:
        """Whether nothing but adapters trains: with them off, the model stays the one that was loaded."""
        # Read by losses that compare with that model, such as those of forge-plugin-preference
        return not self.train

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that there is a base, and that its dtype goes with that of the computation."""
        # Only before the run begins: later its checkpoints refer to their base.
        if not (self.random_base or job.checkpoint.loads or (run_folder(job) / JOB).exists()):
            what = "the frozen weights would be random: load a model by [checkpoint.load] (forge-plugin-checkpoints)"
            yield Problem("", f"{what}, or set random_base = true")
        if self.base_dtype == "bf16" and job.train.precision == "fp64":
            hint = 'leave it out, or take train.precision = "bf16"'
            yield Problem("base_dtype", f'bfloat16 weights beside train.precision = "fp64" are neither; {hint}')
        if self.base_dtype == "nf4":
            yield from self._nf4_problems(job)

    def _nf4_problems(self, job: Job) -> Iterable[Problem]:
        if self.random_base:
            reason = "checkpoints have no weights in 4 bits, and random ones could not come back from a base"
            hint = "load a model by [checkpoint.load], or take another base_dtype"
            yield Problem("random_base", f"{reason}: {hint}")
        if job.optimizer.parameter_dtype == "bf16":
            reason = "the optimizer keeps parameters in bfloat16, and adapters beside weights in 4 bits are in float32"
            yield Problem("base_dtype", f"{reason}: take another optimizer, such as adamw")
        # By the name of its distribution, which need not be installed
        if names := [name for name, stage in job.parallel.items() if type(stage).__module__.startswith(FLOAT8)]:
            reason = f"a matrix in 4 bits is no float8 product: leave [parallel.{names[0]}] out"
            yield Problem("base_dtype", f'{reason}, or take base_dtype = "bf16"')

    # Inside of the wrapper of `freeze`, whose patterns may name adapters
    @hookimpl(wrapper=True)
    def forge_build_model(self, component: ModelComponent, context: BuildContext) -> Generator[None, Model, Model]:
        """Freezes the model and puts adapters beside the matrices that `targets` names."""
        model = yield
        if component is context.job.model:  # and not a model inside of it, such as a teacher's
            table = next(name for name, plugin in context.job.plugins.items() if plugin is self)
            self._adapt(model, f"plugins.{table}", context)
        return model

    @hookimpl
    def forge_build_optimizer(
        self, component: OptimizerComponent, context: BuildContext, parameters: NamedParameters
    ) -> torch.optim.Optimizer | None:
        """Keeps bytes from an optimizer's constructor, which may refuse them, though they do not train."""
        if self.base_dtype != "nf4":
            return None
        from forge_plugin_lora.optimizing import build_without_bytes

        return build_without_bytes(component, context, parameters)

    @hookimpl
    def forge_training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Contributes the check of `check_first_loss`, and with `nf4` one that the base was loaded."""
        from forge_plugin_lora.hooks import BaseIsStored, StartsAsBase

        stored: list[TrainingHook] = [BaseIsStored()] if self.base_dtype == "nf4" else []
        return [*stored, *([StartsAsBase()] if self.check_first_loss and job.checkpoint.loads else [])]

    def _adapt(self, model: Model, table: str, context: BuildContext) -> None:
        from forge_core.contracts.optimizer import roles_of
        from forge_kit.nn.adapters import SECOND, adapter_names, train_adapters
        from forge_plugin_lora.low_rank import A, B, adapt
        from forge_plugin_lora.nf4_matrix import store
        from forge_plugin_lora.sharing import with_adapters
        from forge_plugin_lora.targets import select, storable, store_problems, target_problems

        if adapter_names(model):
            raise JobError([Problem(table, SECOND)])
        problems = list(target_problems(model, self.targets, self.rank, decomposed=self.method == "dora"))
        chosen = select(model, self.targets, self.rank)
        names = [name for name, _ in model.named_parameters()]
        for number, pattern in enumerate(self.train):
            if not any(fnmatchcase(name, pattern) for name in names):
                hint = did_you_mean(pattern, names)
                problems.append(Problem(f"train.{number}", f"{pattern!r} fits no parameter of the model{hint}"))
        stored, left = storable(model, chosen, self.train) if self.base_dtype == "nf4" else ([], [])
        if self.base_dtype == "nf4":
            problems += store_problems(model, stored, left, self.train, context.layout.tp)
        if problems:
            raise JobError(problem.below(table) for problem in problems)
        exempt = [*model.float8_exempt(), *(f"{name}.{part}" for name in chosen for part in (A, B))]
        model.float8_exempt = lambda: exempt  # type: ignore[method-assign]
        plan = with_adapters(model.tensor_parallel_plan, chosen, stored)
        model.tensor_parallel_plan = plan  # type: ignore[method-assign]
        narrow = self._narrowed(context.job, roles_of(model))
        further = {name for name in names if any(fnmatchcase(name, pattern) for pattern in self.train)}
        # Before the adapters are there, which stay in float32
        for name, parameter in model.named_parameters():
            if name in narrow and name not in further:
                parameter.data = parameter.data.bfloat16()
        self._freeze_buffers(model)
        for name in chosen:
            decomposed, in_nf4 = self.method == "dora", name in stored
            adapt(model.get_submodule(name), self.rank, self.scale, decomposed=decomposed, in_nf4=in_nf4)
        for name in stored:
            if name not in chosen:
                store(model.get_submodule(name))
        train_adapters(model, further)
        self._chosen = chosen
        self._left = left
        self._stored = {name: model.get_submodule(name) for name in stored}
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        self._sizes = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)

    def _narrowed(self, job: Job, roles: Mapping[str, Role]) -> Collection[str]:
        """Names of the parameters that are in bfloat16 if they are frozen and not in NF4."""
        if self.base_dtype == "nf4" and job.train.precision == "bf16":
            # What multiplies in bfloat16 in any case; norms, biases and routers are small
            return {name for name, role in roles.items() if role not in ("norm", "bias", "router")}
        return roles if self.base_dtype == "bf16" else ()

    def _freeze_buffers(self, model: Model) -> None:
        """Keep the buffers that change with updates, such as the bias that balances a router's experts, as they are."""
        from forge_core.contracts.model import ChangesWithUpdates

        for module in model.modules():
            if isinstance(module, ChangesWithUpdates):
                module.after_update = _stay  # type: ignore[method-assign]

    def published(
        self, model: nn.Module, names: Mapping[str, Sequence[tuple[str, int | None]]]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the adapters in the format of `peft`; see `forge_plugin_weights.adapters.AddsAdapters`."""
        from forge_plugin_lora.peft import published

        return published(self, model, names)

    # --- reports ---------------------------------------------------------------------------------------------------

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Reports the adapters in the summary of the run."""
        yield "adapters", self._describe(), self._settings()
        if self._stored:
            from forge_plugin_lora.nf4_matrix import describe, rounding

            yield "base", describe(self._stored, self._left), rounding(self._stored)

    def plan_lines(self, job: Job) -> Iterable[tuple[str, str]]:
        """Reports the adapters to `forge-run plan`; see `forge_plugin_plan.lines.HasPlanLines`."""
        yield "adapters", f"{self._describe()}; {self._settings()}"
        if self._stored:
            from forge_plugin_lora.nf4_matrix import describe

            yield "base", describe(self._stored, self._left)

    def _describe(self) -> str:
        trained, whole = self._sizes
        return f"beside {len(self._chosen)} matrices; {trained:,} of {whole:,} parameters train ({trained / whole:.2%})"

    def _settings(self) -> str:
        return f"{self.method}, rank {self.rank}, scaled by {self.scale:g}"


def _stay() -> None:
    """Takes the place of `after_update` of a module that is frozen."""
