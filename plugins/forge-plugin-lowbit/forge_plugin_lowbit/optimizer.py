"""What the components of this plugin build: AdamW over moments that are kept in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from forge_core.errors import CheckpointError
from forge_core.parallel.mesh import local_part

if TYPE_CHECKING:
    from forge_core.engine.parameters import NamedParameters
    from forge_plugin_lowbit.adamw import AdamW8bit, AdamWBF16

STEP = "step"


class Moments(Protocol):
    """How moments are kept. State is plain tensors or DTensors of them, so that checkpoints can hold it."""

    update: Callable[..., None]
    """One step of AdamW on this rank's part of a parameter: (parameter, gradient, *inputs, lr, beta1, beta2,
    weight_decay, eps); all of a parameter's tensors are changed in place."""

    def new(self, parameter: Tensor) -> dict[str, Tensor]:
        """Moments that are zero, by slot."""
        ...

    def empty(self, parameter: Tensor) -> dict[str, Tensor]:
        """Memory for `new`, with any content."""
        ...

    def inputs(self, parameter: Tensor, state: dict[str, Any]) -> tuple[Any, ...]:
        """What `update` takes of this rank's state."""
        ...


class LowBitAdamW(torch.optim.Optimizer):
    """See `AdamW8bit` and `AdamWBF16`. The update is computed in float32 whatever the parameters' dtype."""

    def __init__(self, component: AdamW8bit | AdamWBF16, parameters: NamedParameters, moments: Moments) -> None:
        defaults = {"lr": component.lr, "betas": component.betas, "eps": component.eps}
        super().__init__(parameters.groups(component.weight_decay), defaults)
        self._moments = moments
        self._names = {item.parameter: item.name for item in parameters}
        self._compile = component.compile
        self._compiled: Callable[..., None] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Each rank updates its own parts; nothing is sent."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _any_number_of_shapes() if self._compiled else _nothing():
            for group in self.param_groups:
                # A tensor, since a compiled function is made anew for every other number.
                lr = torch.tensor(group["lr"], dtype=torch.float32)
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group, lr)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], lr: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state |= {STEP: torch.tensor(0.0), **self._moments.new(parameter)}
        state[STEP] += 1
        own = local_part(parameter.detach())
        if own.numel():
            self._function(own)(
                own,
                local_part(parameter.grad),
                *self._moments.inputs(parameter, state),
                lr,
                *group["betas"],
                group["weight_decay"],
                group["eps"],
            )

    def _function(self, tensor: Tensor) -> Callable[..., None]:
        """The update, compiled where that is wanted and there is anything to compute."""
        if not self._compile or isinstance(tensor, FakeTensor):
            return self._moments.update
        if self._compiled is None:
            self._compiled = torch.compile(self._moments.update, fullgraph=True, dynamic=False)
        return self._compiled

    def empty_slot(self, parameter: Tensor, slot: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """See `forge_core.protocols.PlacesState`."""
        known = {STEP: torch.tensor(0.0), **self._moments.empty(parameter)}
        memory = known.get(slot)
        if memory is None or (memory.shape, memory.dtype) != (size, dtype):
            seen = f"{slot}, {list(size)} of {dtype}"
            wanted = ", ".join(f"{name}: {list(tensor.shape)} of {tensor.dtype}" for name, tensor in known.items())
            raise CheckpointError(f"the checkpoint's state of {self._names[parameter]} has {seen}; wanted are {wanted}")
        return memory


@contextmanager
def _any_number_of_shapes() -> Iterator[None]:
    """A function is compiled once for each shape; there are as many as a model has, and torch would give up at 8."""
    with torch._dynamo.utils.disable_cache_limit():
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield
