"""Reads and changes activations of a whole model, on one process.

Shapes: B sequences, S positions, H heads, K key/value heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from forge_core.contracts.data import Batch
from forge_core.contracts.errors import ForgeError, did_you_mean
from forge_core.contracts.model import Model
from forge_kit.nn.attention_pattern import attention_pattern
from forge_kit.nn.taps import MIXING, TapPoint, tap_points

Change = Callable[[Tensor], Tensor]
"""Maps the tensor at a point to what takes its place, of the same shape."""


@frozen
class Reading:
    """What a forward pass computed."""

    values: Mapping[str, Tensor]
    """The tensors at the points that were asked for, by name, detached."""
    hidden: Tensor
    """(B, S, D): the final hidden states."""


def points_of(model: Model, patterns: Sequence[str]) -> dict[str, TapPoint]:
    """Returns the points whose names match any of the globs, in the model's order.

    Raises:
        ForgeError: the model has no points, or a glob matches none.
    """
    every = {name: point for name, point in tap_points(model).items() if point.side != "pattern"}
    if not every:
        raise ForgeError(f"{type(model).__name__} has no tap_points(), so nothing inside it can be read")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every):
            hint = did_you_mean(pattern, list(every)) or "; forge-run inside lens RUN --list shows all"
            raise ForgeError(f"no point of {type(model).__name__} matches {pattern!r}{hint}")
    return {name: point for name, point in every.items() if any(fnmatchcase(name, each) for each in patterns)}


@torch.no_grad()
def read_points(
    model: Model, batch: Batch, patterns: Sequence[str], changes: Mapping[str, Change] | None = None
) -> Reading:
    """Run a model and return the values at some of its points, with other points changed.

    Args:
        model: whole, as `forge_core.load_model` returns it without `parallel`.
        batch: as for the model's forward pass; `input_ids` (B, S) suffice for text.
        patterns: globs over names of points. `pattern`, which no module has, is left out: see `attention_maps`.
        changes: functions by the name of a point, applied there while the model runs; values are read behind them.

    Raises:
        ForgeError: there is no such point, or a change returns another shape.
    """
    values: dict[str, Tensor] = {}
    changes = dict(changes or {})
    wanted, changed = points_of(model, patterns), points_of(model, list(changes))
    # One hook for a point that is both changed and read: it changes first
    with _hooks(model, {**changed, **wanted}, wanted, values, changes):
        hidden = model(batch)
    return Reading({name: values[name] for name in wanted if name in values}, hidden)


@contextmanager
def _hooks(
    model: nn.Module,
    points: Mapping[str, TapPoint],
    wanted: Mapping[str, TapPoint],
    values: dict[str, Tensor],
    changes: Mapping[str, Change],
) -> Iterator[None]:
    def passing(name: str, x: Tensor) -> Tensor:
        if name in changes:
            new = changes[name](x)
            if new.shape != x.shape:
                raise ForgeError(f"the change at {name} returns {tuple(new.shape)}, not {tuple(x.shape)}")
            x = new
        if name in wanted:
            # A later module may change the tensor in place.
            values[name] = x.detach().clone()
        return x

    handles = [point.hook(model.get_submodule(point.module), partial(passing, name)) for name, point in points.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def attention_weights(core: Any, q: Tensor, k: Tensor, batch: Batch, sinks: Tensor | None = None) -> Tensor:
    """Computes what each head attends to, as `core` would: (B, H, S, S), in the dtype of q or a wider one.

    Args:
        core: a module of `Model.sequence_mixers`, whose `mixing()` lists what differs from plain causal attention.
        q: (B, S, H, E).
        k: (B, S, K, E).
        batch: `document_ids` (B, S), if there are any, bound attention; positions of one of the `attention_spans` see
            each other.
        sinks: (H,), scores without a value: rows then sum to less than 1.
    """
    mixing = core.mixing()
    if unknown := sorted(mixing.keys() - MIXING):
        raise ForgeError(f"{type(core).__name__} attends by {', '.join(unknown)}, which no pattern is known of")
    places = torch.arange(q.shape[1], device=q.device).expand(len(q), -1)
    return attention_pattern(q, k, places, batch, mixing, sinks).transpose(1, 2)
