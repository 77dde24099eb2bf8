"""What the component `compile` builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from attrs import frozen
from torch import nn

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.model import Generates
from forge_core.contracts.runtime import ParallelStage
from forge_kit.blocks import blocks_of

if TYPE_CHECKING:
    from forge_core.contracts.model import Model
    from forge_plugin_compile.compile import Compile

GRAPHS_OF_A_BLOCK = 4
"""At most: a first training pass that makes counters, those after it, evaluation, and one to spare."""


class CompileStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`."""

    def __init__(self, component: Compile) -> None:
        self._component = component

    def apply(self, model: Model) -> Model:
        """Compile the blocks; nothing is traced before the first step.

        Raises:
            JobError: there is no such backend.
        """
        _check_backend(self._component.backend)
        blocks = blocks_of(model)
        _allow_graphs(GRAPHS_OF_A_BLOCK * len(blocks))
        _allow_counters_under_recomputation()
        if self._component.backend == "inductor":
            _keep_random_numbers()
        for block in blocks:
            self._compile(block)
        if isinstance(model, Generates):
            model.decode = Eager(model.decode)  # type: ignore[method-assign]
        return model

    def _compile(self, block: nn.Module) -> None:
        settings = self._component
        block.compile(
            backend=settings.backend, mode=settings.mode, dynamic=settings.dynamic, fullgraph=settings.fullgraph
        )


@frozen
class Eager:
    """Calls a method with compiled regions turned off. A copy of the model gets its own, bound to the copy."""

    method: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return self.method(*args, **kwargs)


def _check_backend(name: str) -> None:
    if name not in torch.compiler.list_backends(exclude_tags=()):
        usual = ", ".join([*torch.compiler.list_backends(), "aot_eager", "eager"])
        raise JobError([Problem("parallel.compile.backend", f"there is no {name!r}; there are {usual}")])


def _allow_graphs(count: int) -> None:
    """Let each block have graphs of its own.

    Blocks that differ in a constant do not share a graph, and torch's limit of 8 for all of them together is meant to
    catch code that is traced anew step after step. That still ends in an error, if later.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)


def _allow_counters_under_recomputation() -> None:
    """Experts make their counters in their first forward pass. Inside a checkpointed block torch refuses to trace this,
    since recomputation would not do it again. It must not: a pass counts once.
    """
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def _keep_random_numbers() -> None:
    """Dropout draws what it draws without compilation, so that the curve is the same."""
    import torch._inductor.config

    torch._inductor.config.fallback_random = True
