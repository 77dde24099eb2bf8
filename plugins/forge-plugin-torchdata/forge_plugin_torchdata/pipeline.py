"""A graph or loader of torchdata as a stream in lanes. S: positions of a sequence."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torchdata.nodes import BaseNode, Loader
from torchdata.nodes.types import Stateful

from forge_core.contracts.data import Dataset
from forge_core.contracts.errors import DataError
from forge_plugin_torchdata.torchdata import PipelineLane

Sample = Mapping[str, np.ndarray]
TAG = "forge"
"""Key of the tables that stand for types that JSON lacks."""


class PipelineStream:
    """See `forge_core.contracts.data.Stream`."""

    is_packed = False
    bytes_per_token: float | None = None

    def __init__(
        self,
        factory: Callable[[PipelineLane], Any],
        lane: PipelineLane,
        lanes: int,
        snapshot_every: int,
        held_out: Any = None,
    ) -> None:
        """Nothing is built yet.

        Args:
            factory: makes the graph of a lane.
            lane: the argument of the factory, but for number and count.
            lanes: their number.
            snapshot_every: samples from one copy of the state to the next.
            held_out: sequences by number, or None.
        """
        self.lanes = lanes
        self.held_out: Dataset | None = None if held_out is None else HeldOutItems(held_out, lane.seq_len)
        self._factory, self._lane, self._snapshot_every = factory, lane, snapshot_every

    def read(self, lane: int, position: Mapping[str, Any] | None) -> Iterator[tuple[Sample, Mapping[str, Any]]]:
        """Yields samples of a lane without end, with the position after each: a state of the graph, and samples since.

        Raises:
            DataError: the factory returns no graph or loader, or an item is no sample.
        """
        loader = self._loader(lane)
        state, since = (None, 0) if position is None else (position["state"], position["since"])
        if state is not None:
            loader.load_state_dict(from_json(state))
        items = _endless(loader)
        # Read again: the state is copied only every few samples
        for _ in range(since):
            next(items)
        for item in items:
            since += 1
            if since >= self._snapshot_every:
                state, since = to_json(loader.state_dict()), 0
            yield sample_of(item, self._lane.seq_len), {"state": state, "since": since}

    def _loader(self, lane: int) -> Any:
        made = self._factory(attrs.evolve(self._lane, number=lane, count=self.lanes))
        if isinstance(made, BaseNode):
            return Loader(made)
        if not (isinstance(made, Stateful) and hasattr(type(made), "__iter__")):
            need = "a torchdata.nodes.BaseNode, or a loader with state_dict() such as StatefulDataLoader"
            raise DataError(f"the factory of the pipeline must return {need}, not {type(made).__qualname__}")
        return made


def _endless(loader: Any) -> Iterator[Any]:
    """Yields items, epoch after epoch."""
    # Two empty epochs in a row are an error: one may be the rest of a restored epoch, but then a whole one follows.
    empty = 0
    while empty < 2:
        empty += 1
        for item in loader:
            empty = 0
            yield item
    raise DataError("the pipeline has no items")


class HeldOutItems:
    """Held-out sequences by number."""

    held_out: Dataset | None = None
    bytes_per_token: float | None = None

    def __init__(self, items: Any, seq_len: int) -> None:
        self._items, self._seq_len = items, seq_len

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Sample:
        return sample_of(self._items[index], self._seq_len)


def sample_of(item: Any, seq_len: int) -> Sample:
    """Returns an item of a pipeline as a sample of NumPy arrays.

    Raises:
        DataError: it is not a mapping, or lacks inputs or labels of (S,).
    """
    if not isinstance(item, Mapping):
        raise DataError(f"an item of a pipeline must be a mapping of entries to arrays, not {type(item).__qualname__}")
    sample = {name: np.asarray(value) for name, value in item.items()}
    for name in ("input_ids", "labels"):
        shape = sample[name].shape if name in sample else None
        if shape != (seq_len,):
            problem = "is missing" if shape is None else f"has the shape {shape}"
            hint = "; items are single sequences, so set batch_size=None" if shape and len(shape) > 1 else ""
            raise DataError(f"{name!r} of an item {problem}, expected ({seq_len},){hint}")
    return sample


def to_json(value: Any) -> Any:
    """Returns a state as plain JSON. Tensors, arrays, bytes, tuples and tables with keys other than strings are tagged.

    Raises:
        DataError: it holds another type, which is named.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, tuple):
        return {TAG: "tuple", "items": [to_json(item) for item in value]}
    if isinstance(value, Mapping):
        # A table that has the key of tags would be taken for a tagged value
        if all(isinstance(key, str) for key in value) and TAG not in value:
            return {key: to_json(item) for key, item in value.items()}
        return {TAG: "table", "items": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {TAG: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {**to_json(value.detach().cpu().numpy()), TAG: "tensor"}
    if isinstance(value, np.generic | np.ndarray):
        # It turns a number into an array of one element, so the shape is the value's
        array = np.ascontiguousarray(value)
        data = base64.b64encode(array.tobytes()).decode()
        return {TAG: "array", "dtype": array.dtype.str, "shape": list(np.shape(value)), "data": data}
    raise DataError(f"the state of a pipeline holds a {type(value).__qualname__}, which a checkpoint cannot keep")


def from_json(value: Any) -> Any:
    """Returns the state from what `to_json` returned."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    tag = value.get(TAG)
    if tag is None:
        return {key: from_json(item) for key, item in value.items()}
    if tag == "tuple":
        return tuple(from_json(item) for item in value["items"])
    if tag == "table":
        return {from_json(key): from_json(item) for key, item in value["items"]}
    if tag == "bytes":
        return base64.b64decode(value["data"])
    # Copied, as an array over bytes cannot be written
    array = np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"]).copy()
    return torch.from_numpy(array) if tag == "tensor" else array
