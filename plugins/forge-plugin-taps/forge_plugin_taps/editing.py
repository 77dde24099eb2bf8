"""What edits do to activations, under any layout.

Shapes: B sequences, s positions of this rank, H heads of this rank, E width of a head, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_plugin_taps.kinds import Edit
from forge_plugin_taps.selection import matching
from forge_plugin_taps.store_reader import points_in, read_file, read_point, read_tokens, steps_of, steps_with

if TYPE_CHECKING:
    from forge_plugin_taps.edits import Add, Mean, Replace, SelectingEdit
    from forge_plugin_taps.where import Where


class Selected(Edit):
    """Puts other activations in the place of those that are selected. By default zeros."""

    def __init__(self, component: SelectingEdit, device: torch.device) -> None:
        self._component, self._device = component, device
        # Tensors are made here and not while the model runs, where each would be a copy to the device.
        self._numbers = {
            name: torch.tensor(numbers, dtype=torch.int64, device=device)
            for name in ("heads", "experts", "features", "positions")
            if (numbers := getattr(component, name))
        }

    def apply(self, x: Tensor, where: Where) -> Tensor:
        """Returns the replacement where `mask` has it, in the dtype of x (B, s, …), and x elsewhere."""
        new = self.replacement(x, where).to(x.dtype)
        mask = self.mask(x, where)
        return new.expand_as(x) if mask is None else torch.where(mask, new, x)

    def replacement(self, x: Tensor, where: Where) -> Tensor:
        """Returns a replacement for x (B, s, …), in a shape that expands to the shape of x."""
        return torch.zeros((), dtype=x.dtype, device=x.device)

    def mask(self, x: Tensor, where: Where) -> Tensor | None:
        """Returns a mask of the elements of x (B, s, …) to edit, in a shape that expands to x's shape; None: all."""
        masks = []
        if "positions" in self._numbers:
            masks.append(_spread(torch.isin(where.places(x), self._numbers["positions"]), x.ndim))
        if "experts" in self._numbers:
            # The second output of a router: the experts that it has chosen for each token, (B, s, K)
            masks.append(torch.isin(where.outputs[1], self._numbers["experts"]))
        for name in ("heads", "features"):
            if name in self._numbers:
                own = self._own_numbers(name, x, where)
                # Aligned to the last dimensions of x: (H, 1) of heads (H, E), or (E,) of features
                masks.append(own.unsqueeze(-1) if name == "heads" else own)
        if not masks:
            return None
        mask = masks[0]
        for other in masks[1:]:
            mask = mask & other
        return mask

    def _own_numbers(self, name: str, x: Tensor, where: Where) -> Tensor:
        """Returns which heads or features of this rank are meant: (H,) bool."""
        split, length = where.split, x.shape[2]
        first, size = (split.offset, split.size) if split is not None else (0, length)
        highest = max(getattr(self._component, name))
        if highest >= size:
            raise ForgeError(f"{where.point} has {size} {name}, from 0; an edit names {highest}")
        return torch.isin(torch.arange(first, first + length, device=x.device), self._numbers[name])


class Vector(Selected):
    """Adds a vector."""

    def __init__(self, component: Add, device: torch.device) -> None:
        super().__init__(component, device)
        if component.file:
            tensors = list(read_file(Path(component.file)).values())
            if len(tensors) != 1:
                raise ForgeError(f"{component.file} has {len(tensors)} tensors; a vector to add is a single one")
            vector = tensors[0]
        else:
            # On the CPU by name: a default device may be set while the model is built
            vector = torch.tensor(component.values, dtype=torch.float64, device="cpu")
        # In float64, so that factor and vector are rounded once, to the dtype of activations
        self._vector = (vector.double() * component.factor).to(device)

    def replacement(self, x: Tensor, where: Where) -> Tensor:
        """Adds this rank's part of the vector, in the dtype of x."""
        return x + _own_part(self._vector, x, where, "the vector of an edit").to(x.dtype)


class StoredMean(Selected):
    """Means of a store."""

    def __init__(self, component: Mean, device: torch.device) -> None:
        super().__init__(component, device)
        steps = steps_with(steps_of(Path(component.store)))
        self._means = {name: _mean(steps[name], name).to(device) for name in matching([component.point], list(steps))}

    def replacement(self, x: Tensor, where: Where) -> Tensor:
        """Returns this rank's part of the stored mean, without batch and positions."""
        return _own_part(_stored(self._means, where), x, where, "the mean of the store")


class StoredSequence(Selected):
    """A sequence of a store."""

    def __init__(self, component: Replace, device: torch.device) -> None:
        super().__init__(component, device)
        step = steps_of(Path(component.store))[-1]
        tokens = read_tokens(step)
        rows = tokens["row"] == component.row
        if not bool(rows.any()):
            raise ForgeError(
                f"{step} has no sequence {component.row}; it has {sorted({*tokens['row'].tolist()})[:8]} …"
            )
        places = tokens["position"][rows]
        slots = torch.full((int(places.max()) + 2,), -1, dtype=torch.int64, device="cpu")
        slots[places] = torch.arange(len(places), device="cpu")
        self._slots = slots.to(device)
        """Which of the stored samples each position has; -1: none, as the last entry, for all positions behind."""
        names = matching([component.point], points_in(step))
        self._values = {name: read_point(step, name)[rows].to(device) for name in names}

    def _index(self, x: Tensor, where: Where) -> Tensor:
        return self._slots[where.places(x).clamp(max=len(self._slots) - 1)]

    def replacement(self, x: Tensor, where: Where) -> Tensor:
        """Returns the stored values at the positions of x; those at positions without any are masked out."""
        # Any value at positions without one, -1, as `mask` leaves these out
        values = _stored(self._values, where)[self._index(x, where).clamp(min=0)]
        if where.split is not None:
            values = values.narrow(2, where.split.offset, where.split.length)
        if values.shape[2:] != x.shape[2:]:
            raise ForgeError(f"{where.point} is {tuple(x.shape[2:])}, and stored as {tuple(values.shape[2:])}")
        return values

    def mask(self, x: Tensor, where: Where) -> Tensor | None:
        """Returns the mask of the component, without positions that are not stored."""
        there, mask = _spread(self._index(x, where) >= 0, x.ndim), super().mask(x, where)
        return there if mask is None else there & mask


def _spread(mask: Tensor, dimensions: int) -> Tensor:
    """(B, s) to (B, s, 1, …)."""
    return mask.view(*mask.shape, *(1,) * (dimensions - 2))


def _own_part(whole: Tensor, x: Tensor, where: Where, what: str) -> Tensor:
    """Returns this rank's part of a vector for activations x (B, s, …), of their shape behind positions or flat."""
    split = where.split
    shape = list(x.shape[2:])
    if split is not None:
        shape[0] = split.size
    if whole.numel() != torch.Size(shape).numel():
        raise ForgeError(f"{what} has {tuple(whole.shape)}, and {where.point} has {tuple(shape)} at each position")
    whole = whole.view(shape)
    return whole if split is None else whole.narrow(0, split.offset, split.length)


def _stored(values: dict[str, Tensor], where: Where) -> Tensor:
    if where.point not in values:
        raise ForgeError(f"the store of an edit has no {where.point}; it has {', '.join(values)}")
    return values[where.point]


def _mean(steps: Sequence[Path], name: str) -> Tensor:
    # Step by step: a store may be larger than the memory
    total, count = torch.zeros((), dtype=torch.float64, device="cpu"), 0
    for step in steps:
        values = read_point(step, name)
        total, count = total + values.double().sum(0), count + len(values)
    return total / count
