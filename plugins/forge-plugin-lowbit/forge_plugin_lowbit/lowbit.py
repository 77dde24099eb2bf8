"""The components `adamw_8bit`, `adamw_4bit`, `adamw_float8` and `adamw_bf16`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import OptimizerComponent, when_resumed
from forge_core.contracts.errors import Problem
from forge_kit.optim import fields
from forge_kit.optim.update_size import elementwise

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model, Role
    from forge_core.contracts.optimizer import NamedParameters
    from forge_core.job import Job
    from forge_plugin_lowbit.formats import Format


@frozen(kw_only=True)
class _LowBitAdamW(OptimizerComponent):
    """Base: the keys of all four optimizers."""

    adam_rule: ClassVar[bool] = True
    """See `forge_kit.optim.update_size`."""

    lr: float = field(default=3e-4, validator=gt(0))
    """Base learning rate; the schedule multiplies it."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), validator=fields.betas)
    """Decay of the averages of the gradient and of its square."""
    eps: float = field(default=1e-8, validator=gt(0))
    """Added to the root of the averaged square."""
    weight_decay: float = field(default=0.1, validator=ge(0))
    """Decoupled weight decay: each step subtracts lr x this x the weight."""
    parameter_dtype: Literal["fp32", "bf16"] = "fp32"
    """Storage dtype of parameters. bf16: half the memory; each update is computed in float32, and its result rounded
    stochastically, so that updates too small for bfloat16 take effect in expectation."""
    compile: bool = field(default=True, metadata=when_resumed("safe"))
    """Whether the update of a parameter is compiled to one kernel. false: many small operations, which are slow and
    temporarily take several times the memory of the largest parameter."""

    def update_size(self, role: Role, outputs: int, inputs: int) -> float:
        """See `forge_kit.optim.update_size.HasUpdateSize`."""
        return elementwise(inputs)

    def settings(self, context: BuildContext) -> dict[str, Any]:
        """Arguments that all of the optimizers take."""
        own = {key: getattr(self, key) for key in ("lr", "betas", "eps", "compile")}
        return own | {"seed": context.job.job.seed, "mesh": context.mesh}

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.parameter_dtype == "bf16" and job.train.precision == "fp64":
            reason = 'train.precision = "fp64" keeps everything in float64'
            yield Problem("parameter_dtype", f"{reason}; leave one of the two out")


@frozen(kw_only=True)
class _QuantisedAdamW(_LowBitAdamW):
    """Base: the keys of the optimizers whose moments are codes."""

    min_size: int = field(default=4096, validator=ge(1), metadata=when_resumed("impossible"))
    """Parameters with fewer elements keep float32 moments."""
    exclude: tuple[str, ...] = field(default=(), metadata=when_resumed("impossible"))
    """Globs over the names of parameters that keep float32 moments (`embedding.*`)."""

    block_size: int = field(default=256, validator=fields.power_of_two(8), metadata=when_resumed("impossible"))
    """Elements that share a scale; a power of two."""

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        from forge_core.contracts.optimizer import NamedParameters
        from forge_plugin_lowbit.blocks import cut_problem, quantised_blocks, sharded_parts

        # Under tensor parallelism the parts are known once its stage is built; the build then refuses cut blocks.
        if layout.shard == 1 or layout.tp > 1:
            return
        names: dict[Tensor, str] = {item.parameter: item.name for item in NamedParameters.of(model)}
        blocks = quantised_blocks(names, self.block_size, self.min_size, self.exclude)
        # `cp` ranks hold the same parameters, over which `fsdp` shards too
        problem = cut_problem(blocks, names, sharded_parts(layout.shard * layout.cp))
        if problem is not None:
            yield problem

    def over(self, format: Format, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Build the optimizer with moments of a format."""
        from forge_plugin_lowbit.moments import QuantisedAdamW

        keys = ("block_size", "min_size", "exclude")
        own = {key: getattr(self, key) for key in keys} | self.settings(context)
        return QuantisedAdamW(parameters.groups(self.weight_decay), format, **own)


@frozen(kw_only=True)
class AdamW8bit(_QuantisedAdamW):
    """AdamW with moments of 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").

    As torchao computes it: each block of elements has a float32 scale, and each element a code into a table of values
    whose spacing grows with their size. The update itself is computed in float32.

    State: for parameters of two or more dimensions, two bytes an element and two scales a block. Vectors, small
    parameters, and those whose elements are not a whole number of blocks keep float32 moments. Blocks are of the whole
    parameter, so the result does not depend on the layout.
    """

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Codes of one byte, for the average of squares into a table without negative values."""
        from forge_plugin_lowbit.formats import EIGHT_BIT

        return self.over(EIGHT_BIT, context, parameters)


@frozen(kw_only=True)
class AdamW4bit(_QuantisedAdamW):
    """AdamW with moments of 4 bits (Li et al. 2023, "Memory Efficient Optimizers with 4-bit States").

    As torchao computes it: like `adamw_8bit`, with two codes a byte and a table of 16 values.

    State: for parameters of two or more dimensions, one byte an element and two scales a block; else as `adamw_8bit`.
    """

    block_size: int = field(default=128, validator=fields.power_of_two(8), metadata=when_resumed("impossible"))
    """Elements that share a scale; a power of two."""

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Codes of half a byte, for the average of squares into a linear table without zero."""
        from forge_plugin_lowbit.formats import FOUR_BIT

        return self.over(FOUR_BIT, context, parameters)


@frozen(kw_only=True)
class AdamWFloat8(_QuantisedAdamW):
    """AdamW with moments in float8 (e4m3), as torchao computes it: like `adamw_8bit`, with numbers in place of codes.

    State: for parameters of two or more dimensions, two bytes an element and two scales a block; else as `adamw_8bit`.
    """

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Elements in float8 and a scale for each block; there is no table."""
        from forge_plugin_lowbit.formats import FLOAT8

        return self.over(FLOAT8, context, parameters)


@frozen(kw_only=True)
class AdamWBF16(_LowBitAdamW):
    """AdamW with moments in bfloat16, rounded stochastically (Gupta et al. 2015).

    Moments are rounded up or down with probabilities that make the mean exact, so that small changes are not lost. The
    update itself is computed in float32.

    Rounding is a function of the job's seed, the parameter's name, its number of updates, and the element, so it is the
    same after a restart and under every layout. State: two bfloat16 tensors like each parameter, and a count.
    """

    stochastic_rounding: bool = True
    """Whether moments are rounded stochastically; false: to the nearest. To the nearest, the averaged square does not
    change where the change is below 1/512 of it, as it is with `betas[1]` above 0.998."""

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Moments of every parameter are in bfloat16, whatever its shape: there are no blocks that ranks could cut."""
        from forge_plugin_lowbit.bf16 import BF16AdamW

        groups = parameters.groups(self.weight_decay)
        return BF16AdamW(groups, stochastic_rounding=self.stochastic_rounding, **self.settings(context))
