"""Seeded initialisation that does not depend on the layout.

A model is built on the meta device. Here it gets memory, filled with NaN so that whatever stays uninitialised is found,
and then its values: each parameter is drawn in fixed blocks along dimension 0, each block by a generator of its own
seeded from (seed, parameter name, block), so a rank draws only the blocks it holds and all layouts agree.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import HasTies, Initialises

if TYPE_CHECKING:
    from forge_core.contracts.model import Model

BLOCK = 2**20
"""Elements of a block at most, for matrices; one matrix of a stack is one block whatever its size."""


class SeededFill:
    """Fills one parameter; see `forge_core.contracts.model.Fill`."""

    def __init__(self, parameter: Tensor, name: str, seed: int, device: torch.device | None = None) -> None:
        """`device`: where numbers are drawn; by default, where the parameter lives."""
        self._parameter = parameter
        self._name = name
        self._seed = seed
        self._device = device or parameter.device
        self.used = False

    def normal(self, std: float, mean: float = 0.0) -> None:
        self._draw(lambda block, generator: block.normal_(mean, std, generator=generator))

    def trunc_normal(self, std: float, bound: float = 3.0) -> None:
        self._draw(lambda b, g: nn.init.trunc_normal_(b, 0.0, std, -bound * std, bound * std, generator=g))

    def uniform(self, low: float, high: float) -> None:
        self._draw(lambda block, generator: block.uniform_(low, high, generator=generator))

    def constant(self, value: float) -> None:
        self.used = True
        with torch.no_grad():
            self._parameter.fill_(value)

    def copy(self, whole: Tensor) -> None:
        """Take this rank's part of `whole`."""
        self.used = True
        for local, start, stop, rest in _local_rows(self._parameter):
            local.copy_(whole[start:stop][rest])

    @torch.no_grad()
    def _draw(self, fill: Callable[[Tensor, torch.Generator], Any]) -> None:
        self.used = True
        rows = _rows_per_block(self._parameter)
        whole_shape = self._parameter.shape
        for local, start, stop, rest in _local_rows(self._parameter):
            for block in range(start // rows, -(-stop // rows)):
                first, last = block * rows, min((block + 1) * rows, whole_shape[0])
                drawn = torch.empty((last - first, *whole_shape[1:]), dtype=torch.float32, device=self._device)
                fill(drawn, self._generator(block))
                low, high = max(first, start), min(last, stop)
                local[low - start : high - start].copy_(drawn[low - first : high - first][rest])

    def _generator(self, block: int) -> torch.Generator:
        key = f"{self._seed}:{self._name}:{block}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little") >> 1)


def _rows_per_block(parameter: Tensor) -> int:
    if parameter.ndim > 2:
        return 1
    return max(1, BLOCK // max(1, parameter.numel() // max(1, parameter.shape[0])))


def _local_rows(parameter: Tensor) -> list[tuple[Tensor, int, int, Any]]:
    """This rank's parts: (local tensor, first row, end row, slices of the other dimensions)."""
    if not hasattr(parameter, "to_local"):
        return [(parameter.data, 0, parameter.shape[0], ...)]
    local = parameter.to_local()
    parts = []
    chunks: Any = parameter
    for chunk in chunks.__create_chunk_list__():
        rest = tuple(slice(o, o + s) for o, s in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
        parts.append((local, chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0], (slice(None), *rest)))
    return parts


def materialise(model: Model, device: torch.device, seed: int, home: torch.device | None = None) -> None:
    """Give a model on the meta device memory on `device`, and its initial values.

    Args:
        home: where parameters live, if not on `device`. Their values are those that they would have there.

    Raises:
        ForgeError: a parameter or buffer was left uninitialised; names it and the module's class.
    """
    assert isinstance(model, nn.Module)
    allocate(model, device, home)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    drawn: set[int] = set()
    for module_name, module in model.named_modules():
        _initialise_module(module, module_name, device, seed, drawn)


def allocate(model: Model, device: torch.device, home: torch.device | None = None) -> None:
    """Give a model on the meta device memory on `device`, to its parameters on `home`; its values are arbitrary.

    From now on, gradients add up in float32 or wider, whatever parameters are kept in.
    """
    assert isinstance(model, nn.Module)
    model.to_empty(device=home or device)
    if home is not None:
        _move_buffers(model, device)
    _tie(model)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = buffer.to(device)


def ties(model: Model) -> Mapping[str, str]:
    """Other names of tied parameters, with the name under which each is listed; of those that this rank has."""
    assert isinstance(model, nn.Module)
    if not isinstance(model, HasTies):
        return {}
    own = {name for name, _ in model.named_parameters()}
    return {other: name for other, name in model.tied_parameters().items() if name in own}


def _tie(model: Model) -> None:
    """`to_empty` makes a new parameter for each module that holds one; put tied ones together again."""
    assert isinstance(model, nn.Module)
    for other, name in ties(model).items():
        module, _, key = other.rpartition(".")
        setattr(model.get_submodule(module), key, model.get_parameter(name))


def _initialise_module(module: nn.Module, name: str, device: torch.device, seed: int, drawn: set[int]) -> None:
    own = [(key, p) for key, p in module.named_parameters(recurse=False) if id(p) not in drawn]
    drawn.update(id(parameter) for _, parameter in own)
    if isinstance(module, Initialises):
        for key, parameter in own:
            fill = SeededFill(parameter, f"{name}.{key}" if name else key, seed, device)
            module.init_parameter(key, fill)
            if not fill.used:
                raise ForgeError(f"{type(module).__name__}.init_parameter did not fill {name}.{key}")
        module.init_buffers(device)
    elif own or any(True for _ in module.buffers(recurse=False)):
        _reset(module, name, own, device, seed)


def _reset(module: nn.Module, name: str, own: list[tuple[str, nn.Parameter]], device: torch.device, seed: int) -> None:
    """Modules of torch's kind: run their `reset_parameters` on a whole copy, and take this rank's part of it."""
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        missing = ", ".join([key for key, _ in own] + [key for key, _ in module.named_buffers(recurse=False)])
        raise ForgeError(
            f"{type(module).__name__} ({name or 'the model'}) cannot initialise {missing}: implement "
            "init_parameter(name, fill) and init_buffers(device), see forge_core.contracts.model.Initialises"
        )
    whole = _whole_copy(module, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(
            int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little") >> 1
        )
        whole.reset_parameters()
        for key, parameter in own:
            SeededFill(parameter, key, seed, device).copy(getattr(whole, key))
        for key, buffer in module.named_buffers(recurse=False):
            buffer.copy_(getattr(whole, key))


def _whole_copy(module: nn.Module, device: torch.device) -> Any:
    whole = copy.copy(module)
    whole._parameters = {
        key: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=_drawn_in(p.dtype), device=device))
        for key, p in module._parameters.items()
    }
    whole._buffers = {key: None if b is None else torch.zeros_like(b) for key, b in module._buffers.items()}
    return whole


def _drawn_in(dtype: torch.dtype) -> torch.dtype:
    """Values do not depend on whether parameters are kept in fewer bits, but for rounding."""
    return torch.promote_types(dtype, torch.float32)


def check_finite(model: Model) -> None:
    """Find what initialisation forgot.

    Raises:
        ForgeError: names the first parameter or buffer that is not finite.
    """
    assert isinstance(model, nn.Module)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.numel() and not bool(torch.isfinite(local.sum())):
            raise ForgeError(f"parameter {name} is not finite after initialisation")
