"""The stage of the component `compile`: compiles blocks and sets up the compiler for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from attrs import frozen
from torch import nn

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.runtime import ParallelStage
from forge_kit.blocks import blocks_of
from forge_kit.generation import Generates

if TYPE_CHECKING:
    from forge_core.contracts.model import Model
    from forge_plugin_compile.compile import Compile

GRAPHS_OF_A_BLOCK = 4
"""Upper bound: a first training pass that creates counters, the passes after it, evaluation, and one to spare."""


class CompileStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`."""

    def __init__(self, component: Compile) -> None:
        self._component = component

    def apply(self, model: Model) -> Model:
        """Compile the blocks; nothing is traced before the first step.

        Raises:
                JobError: the backend does not exist.
        """
        # Backends are looked up at the first step otherwise, after the data have been opened and the model allocated.
        _check_backend(self._component.backend)
        blocks = blocks_of(model)
        _allow_graphs(GRAPHS_OF_A_BLOCK * len(blocks))
        _allow_counters_under_recomputation()
        if self._component.backend == "inductor":
            _keep_random_numbers()
        for block in blocks:
            self._compile(block)
            # Every token of a generation has another sequence length, and each would be a graph of its own.
        if isinstance(model, Generates):
            model.decode = Eager(model.decode)  # type: ignore[method-assign]
        return model

    def _compile(self, block: nn.Module) -> None:
        settings = self._component
        # `Module.compile` and not `torch.compile(block)`, which would wrap the block and prefix its parameters' names.
        block.compile(
            backend=settings.backend, mode=settings.mode, dynamic=settings.dynamic, fullgraph=settings.fullgraph
        )


@frozen
class Eager:
    """Calls a method with compiled regions turned off. A copy of the model receives its own, bound to the copy."""

    method: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return self.method(*args, **kwargs)


def _check_backend(name: str) -> None:
    if name not in torch.compiler.list_backends(exclude_tags=()):
        usual = ", ".join([*torch.compiler.list_backends(), "aot_eager", "eager"])
        raise JobError([Problem("parallel.compile.backend", f"there is no {name!r}; there are {usual}")])


def _allow_graphs(count: int) -> None:
    """Raise torch's limits on recompilation to `count`.

    Blocks that differ in a constant do not share a graph, and torch counts the graphs of all blocks against one limit
    of 8. The limit is there to stop code that recompiles at every step, and still does, if later.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)


def _allow_counters_under_recomputation() -> None:
    """Let torch trace the creation of counters inside a checkpointed block.

    Experts create their counters in their first forward pass. Torch refuses such a side effect under recomputation,
    because recomputing would skip it; skipping it is correct here, as a pass is counted once.
    """
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def _keep_random_numbers() -> None:
    """Draw dropout's numbers from torch's own generator, so that losses are the same as without compilation."""
    import torch._inductor.config

    torch._inductor.config.fallback_random = True
