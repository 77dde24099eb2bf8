"""Marks in a trace: the phase of the run, the block of the model, the part of the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.profiler import record_function

from forge_core.launch.progress_beacon import ProgressBeacon
from forge_kit.nn.blocks import blocks_of
from forge_plugin_profile.torch_internals import compiled_call, plain_call, set_compiled_call

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.model import Model

PHASE, BLOCK, PART = "phase: ", "block: ", "part: "
"""Prefixes of the names of ranges."""


class PhaseMarks:
    """A range for each phase that the main thread enters, until it is closed."""

    def __init__(self, phase: str) -> None:
        self._range: Any = None
        self._open(phase)
        ProgressBeacon.listeners.append(self._open)

    def _open(self, phase: str) -> None:
        self._end()
        self._phase, self._range = phase, record_function(PHASE + phase)
        self._range.__enter__()

    def _end(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """No range is open within this context: one that begins or ends in it would not nest."""
        self._end()
        try:
            yield
        finally:
            self._open(self._phase)

    def close(self) -> None:
        """End the range, and mark no further phase."""
        ProgressBeacon.listeners.remove(self._open)
        self._end()


class BlockMarks:
    """Ranges around the forward pass of each block, and of its parts where the block is not compiled."""

    # The ranges replace the function that `Module.__call__` calls, whether it is compiled or not. Hooks of the block
    # would be inside the compiled code: ignored after the first trace, and the cause of a different graph before it.
    # In addition, nothing remains after the window.
    def __init__(self, model: Model) -> None:
        self._calls: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        blocks = {id(block) for block in blocks_of(model)}
        for name, module in [*model.named_modules()]:
            if id(module) in blocks:
                is_compiled = compiled_call(module) is not None
                self._mark(module, BLOCK + name)
                for child, part in module.named_children() if not is_compiled else ():
                    self._mark(part, f"{PART}{name}.{child}")

    def _mark(self, module: nn.Module, name: str) -> None:
        original = compiled_call(module)
        call = original or plain_call(module)

        def marked(*args: Any, **kwargs: Any) -> Any:
            with record_function(name):
                return call(*args, **kwargs)

        self._calls.append((module, original))
        set_compiled_call(module, marked)

    def close(self) -> None:
        """Take the ranges away."""
        for module, original in reversed(self._calls):
            set_compiled_call(module, original)
        self._calls.clear()
