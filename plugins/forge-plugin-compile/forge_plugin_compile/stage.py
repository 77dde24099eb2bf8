"""The stage of the component `compile`: compiles blocks and sets up the compiler for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import nn

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.runtime import ParallelStage
from forge_kit.nn.blocks import blocks_of
from forge_kit.nn.generation import Generates
from forge_plugin_compile.torch_internals import allow_counters_under_recomputation, allow_graphs, keep_random_numbers

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
        torch.compiler.reset()  # the graphs of earlier runs of this process would count towards the limit on them
        blocks = blocks_of(model)
        allow_graphs(GRAPHS_OF_A_BLOCK * len(blocks))
        allow_counters_under_recomputation()
        if self._component.backend == "inductor":
            keep_random_numbers()
        for block in blocks:
            self._compile(block)
        # Every token of a generation has a different sequence length, and each length would need a separate graph.
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
