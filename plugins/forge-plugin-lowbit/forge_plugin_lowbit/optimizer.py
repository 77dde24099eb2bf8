"""AdamW over moments in fewer bits, as a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from forge_core.contracts.errors import CheckpointError
from forge_core.parallel.mesh import local_part
from forge_kit.optim.groups import Groups, as_groups, names_in
from forge_kit.torch_internals import FakeTensor
from forge_plugin_lowbit.rounding import Rounding, random_bits, round_with
from forge_plugin_lowbit.torch_internals import mark_dynamic

STEP = "step"


class Moments(Protocol):
    """Storage of moments, as plain tensors or DTensors of them, so that checkpoints can hold them."""

    def empty(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Allocates their memory, by slot. Zeros mean moments that are zero."""
        ...

    def update(self, parameter: Tensor) -> Callable[..., None]:
        """Returns a function that makes one step of AdamW on this rank's part of a parameter.

        It takes (parameter, gradient, step, *inputs, *settings), with the settings of
        `forge_plugin_lowbit.arithmetic.adamw`. It should be the same function for as many parameters as possible, as it
        is compiled, for any size of the first dimension.
        """
        ...

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Returns the shape that `update` takes a part of the parameter and its gradient in."""
        ...

    def inputs(self, parameter: Tensor, state: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Returns the arguments of `update` from this rank's state, whose tensors it changes in place."""
        ...


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) over moments in fewer bits.

    The update is computed in float32 for every dtype; parameters in bfloat16 are rounded stochastically.

    Args:
        params: parameters, or groups of them, which may set `lr`, `betas`, `eps` and `weight_decay`.
        moments: storage of the moments.
        rounding: rounding of parameters in bfloat16.
        lr: learning rate.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the root of the averaged square.
        weight_decay: decoupled; each step subtracts lr x this x the parameter.
        compile: whether the update of a parameter is compiled to one kernel.
    """

    def __init__(
        self,
        params: Groups,
        moments: Moments,
        rounding: Rounding,
        *,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        compile: bool = True,
    ) -> None:
        groups = as_groups(params)
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._moments = moments
        self._rounding = rounding
        self._names = names_in(groups)
        self._rounded: dict[Callable[..., None], Callable[..., None]] = {}
        self._compile = compile
        self._compiled: dict[Callable[..., None], Callable[..., None]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Each rank updates its own parts, without communication."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # Tensors, since torch.compile specialises on Python numbers: a schedule would recompile at every step.
            rates = torch.tensor([group["lr"], group["weight_decay"]], dtype=torch.float32).unbind()
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, (*rates, *group["betas"], group["eps"]))
        return loss

    def _step(self, parameter: Tensor, settings: Sequence[Any]) -> None:
        state = self.state[parameter]
        if not state:
            # On the CPU, where it is read in each update without waiting for the device
            state[STEP] = torch.tensor(0.0)
            state |= {slot: tensor.zero_() for slot, tensor in self._moments.empty(parameter).items()}
        # Also without elements: the ranks of a parameter agree on its number of updates
        state[STEP] += 1
        own = local_part(parameter.detach())
        if not own.numel():
            return
        parts = {slot: local_part(tensor) for slot, tensor in state.items()}
        shape = self._moments.shape(parameter)
        # `contiguous` copies where it must; the result is then copied back at the end
        weights, gradient = own.contiguous().view(shape), local_part(parameter.grad).reshape(shape)
        function, inputs = self._moments.update(parameter), self._moments.inputs(parameter, parts)
        if own.dtype == torch.bfloat16:
            function = self._rounded.setdefault(function, rounded(function))
            inputs = (*self._rounding.of(parameter, parts[STEP], "parameters"), *inputs)
        # A plan computes with fake tensors, for which a kernel would be compiled in vain
        if self._compile and not isinstance(own, FakeTensor):
            if function not in self._compiled:
                # fullgraph: an error, and not a slow optimizer, if the update cannot be compiled as a whole
                self._compiled[function] = torch.compile(function, fullgraph=True)
            function = self._compiled[function]
            _for_any_length(weights, gradient, *inputs)
        function(weights, gradient, parts[STEP], *inputs, *settings)
        if not own.is_contiguous():
            own.copy_(weights.view(own.shape))

    def empty_slot(self, parameter: Tensor, slot: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """See `forge_core.contracts.optimizer.PlacesState`."""
        # Allocated as a fresh optimizer would, so that shapes are compared with what this job's settings need
        known = {STEP: torch.tensor(0.0), **self._moments.empty(parameter)}
        memory = known.get(slot)
        if memory is None or (memory.shape, memory.dtype) != (size, dtype):
            stored = f"{slot}, {list(size)} of {dtype}"
            wanted = ", ".join(f"{name}: {list(tensor.shape)} of {tensor.dtype}" for name, tensor in known.items())
            raise CheckpointError(
                f"the checkpoint's state of {self._names[parameter]} has {stored}; wanted are {wanted}"
            )
        return memory


def rounded(update: Callable[..., None]) -> Callable[..., None]:
    """Wraps the update of a parameter in bfloat16: computed in float32, then rounded stochastically."""

    def step(parameter: Tensor, gradient: Tensor, step: Tensor, key: Tensor, place: Tensor, *rest: Any) -> None:
        wide = parameter.float()
        update(wide, gradient, step, *rest)
        bits = random_bits(place, key, wide.numel()).view(wide.shape)
        parameter.copy_(round_with(wide, bits & 0xFFFF))

    return step


def contiguous_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocates memory of the parameter's shape, split like it."""
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format)


def _for_any_length(weights: Tensor, *inputs: Any) -> None:
    """Mark the number of rows as dynamic before the first compilation.

    Parameters differ in it and in nothing else. Unmarked, torch.compile makes a static kernel first and a dynamic one
    later, which may round otherwise; a resumed run would begin with the static one again.
    """
    rows = weights.shape[0]
    for tensor in (weights, *inputs):
        if rows > 1 and isinstance(tensor, Tensor) and tensor.shape[:1] == (rows,):
            mark_dynamic(tensor, 0)
