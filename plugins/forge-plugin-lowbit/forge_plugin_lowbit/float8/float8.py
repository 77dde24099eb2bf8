"""The component `float8`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import frozen

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.errors import Problem
from forge_core.parallel.layout import micro_batches

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import ParallelStage
    from forge_core.job import Job

MULTIPLE = 16
"""Divisor of the sizes of a float8 product, except for its rows."""
NO_GLOO = "needs GPUs: gloo, which connects processes on a CPU, cannot send float8; leave it out"


@frozen(kw_only=True)
class Float8(ParallelComponent):
    """Matrix products of linear layers in float8, forward and backward (Micikevicius et al. 2022).

    By torchao's recipes: each operand is scaled, rounded to eight bits, and multiplied; results, weights and optimizer
    state keep their precision. The head is left unchanged, as are the layers in a model's `float8_exempt()`, such as
    routers.

    Devices without float8 products compute with the rounded operands in float32 instead, slowly; the run's summary
    reports this.
    """

    after: ClassVar[Mapping[str, str]] = {"pp": "only the layers that this rank keeps are changed"}
    before: ClassVar[Mapping[str, str]] = {
        "tp": "each rank computes its part of a matrix as a float8 product",
        "ep": "each rank computes its part of a matrix as a float8 product",
        "cp": "it divides the sequence around the products",
        "activation_checkpointing": "rounding is part of the recomputation",
        "compile": "scaling and rounding belong into the graph, where they are fast",
        "fsdp": "the weight that it gathers may be in float8",
    }

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """tensorwise: one scale a matrix, the fastest; gradients in e5m2. rowwise: one scale a row, which suits outliers.
    rowwise_with_gw_hp: like rowwise, with gradients of weights in the compute precision; the most exact, and the only
    one whose scales do not depend on the other tokens of a micro-batch."""
    exclude: tuple[str, ...] = ()
    """Name patterns of linear layers that keep their precision, in addition to the exempt ones (`layers.0.*`)."""
    all_gather: bool = False
    """Whether `fsdp` gathers weights in float8, which halves its communication. Needs GPUs and `tensorwise`."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the precision, the tokens of a micro-batch, over which gradients of weights sum, and `all_gather`."""
        if job.train.precision == "fp64":
            yield Problem("", 'has no use for train.precision = "fp64": take "bf16" or "fp32", or leave the stage out')
        # Rows of the products on one rank: `cp` leaves it a part of each sequence
        tokens = micro_batches(job, layout)[1] * job.train.seq_len // layout.cp
        # That recipe computes gradients of weights in the compute precision, which takes any number of tokens
        if tokens % MULTIPLE and self.recipe != "rowwise_with_gw_hp":
            message = (
                f"a rank has {tokens} tokens a micro-batch, and gradients of weights sum over a multiple of {MULTIPLE}"
            )
            yield Problem("recipe", f'{message}; change train.micro_batch_size, or take "rowwise_with_gw_hp"')
        if self.all_gather:
            yield from self._gather_problems(job, layout)

    def _gather_problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.recipe != "tensorwise":
            yield Problem("all_gather", f'a part of a matrix has no {self.recipe} scales; take recipe = "tensorwise"')
        if not any("shard" in stage.degrees() for stage in job.parallel.values()):
            yield Problem("all_gather", "no stage shards parameters, so nothing is gathered; add [parallel.fsdp]")
        if layout.tp > 1:
            yield Problem("all_gather", "does not go with tensor parallel: what tp splits is gathered as it is")
        if job.train.device == "cpu":
            yield Problem("all_gather", NO_GLOO)

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        """Checks `exclude`, that a layer is left to convert, and sizes of parts under tensor parallelism."""
        from forge_plugin_lowbit.float8.choice import model_problems

        return model_problems(model, self.exclude, layout, self.all_gather)

    def build(self, context: BuildContext) -> ParallelStage:
        """Imports torchao only here: a job is checked without it."""
        from forge_plugin_lowbit.float8.stage import Float8Stage

        return Float8Stage(self, context)
