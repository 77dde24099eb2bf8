"""Activation checkpointing (Chen et al. 2016): intermediate results are recomputed for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from forge_kit.nn.recomputing import Recomputing
from forge_plugin_parallel.torch_internals import SLOW_OPERATORS

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext

SAVED = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        *SLOW_OPERATORS,
    }
)
"""Operations whose results `selective` saves: slow ones, and collectives whose results are small."""


@frozen
class Checkpointed:
    """A forward pass whose intermediate results are recomputed in the backward pass."""

    forward: Callable[..., Any]
    contexts: Contexts
    block: nn.Module
    """The module that `forward` belongs to."""

    @classmethod
    def of(cls, block: nn.Module, contexts: Contexts) -> Checkpointed:
        """Returns the forward pass of a block, as it is now, with recomputation."""
        return cls(block.forward, contexts, block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation has no backward pass to recompute for
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # recomputation is traced into the graph, so metrics need no context
            if not self._has_backward(args):  # torch fails on a graph with recomputation and no backward pass
                return self.forward(*args, **kwargs)
            selective: dict[str, Any] = {"context_fn": SELECTIVE} if self.contexts.selective else {}
            return checkpoint(self.forward, *args, use_reentrant=False, **selective, **kwargs)
        # Not reentrant, since that kind supports neither `context_fn` nor tensors within tuples
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=self.contexts, **kwargs)

    def _has_backward(self, args: tuple[Any, ...]) -> bool:
        """Whether anything in the block trains, or before it."""
        inputs = [part for arg in args for part in (arg if isinstance(arg, tuple) else (arg,))]
        tensors = [part for part in inputs if isinstance(part, Tensor)]
        return any(tensor.requires_grad for tensor in (*tensors, *self.block.parameters()))


@frozen
class Contexts:
    """Returns, when called, contexts of a forward pass and of its recomputation, which does not count metrics again."""

    recomputing: AbstractContextManager[None]
    selective: bool

    @classmethod
    def of(cls, mode: str, context: BuildContext) -> Contexts:
        """Returns the contexts of a mode: `full` or `selective`."""
        return cls(Recomputing(context.auxiliary), mode == "selective")

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if not self.selective:
            return nullcontext(), self.recomputing
        forward, recompute = SELECTIVE()
        # Both around the recomputation only: the forward pass counts metrics once.
        return forward, _Both(recompute, self.recomputing)


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)


class _Both(AbstractContextManager[None]):
    """Several contexts as one, left in the reverse order."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts, self._stack = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)
