"""Reads and changes activations of a whole model, on one process.

Shapes: B sequences, S positions, H heads, K key/value heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from forge_core.contracts.data import Batch
from forge_core.contracts.errors import ForgeError, did_you_mean
from forge_core.contracts.model import Model
from forge_kit.taps import TapPoint, tap_points

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
            hint = did_you_mean(pattern, list(every)) or "; forge-run lens RUN --list shows all"
            raise ForgeError(f"no point of {type(model).__name__} matches {pattern!r}{hint}")
    return {name: point for name, point in every.items() if any(fnmatchcase(name, each) for each in patterns)}


@torch.no_grad()
def read_points(
    model: Model, batch: Batch, patterns: Sequence[str], changes: Mapping[str, Change] | None = None
) -> Reading:
    """Run a model and return what is at some of its points, with other points changed.

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
            values[name] = x.detach().clone()
        return x

    handles = [_hook(model.get_submodule(point.module), name, point, passing) for name, point in points.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(module: nn.Module, name: str, point: TapPoint, passing: Callable[[str, Tensor], Tensor]) -> RemovableHandle:
    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        index = point.index
        if point.side == "carry_in":
            carry, *others = args
            return ((passing(name, carry[0]), *carry[1:]), *others)
        return (*args[:index], passing(name, args[index]), *args[index + 1 :])

    def after(_: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        if isinstance(out, Tensor):
            return passing(name, out)
        return (*out[: point.index], passing(name, out[point.index]), *out[point.index + 1 :])

    if point.side in ("input", "carry_in"):
        return module.register_forward_pre_hook(before)
    return module.register_forward_hook(after)


def attention_weights(core: Any, q: Tensor, k: Tensor, batch: Batch, sinks: Tensor | None = None) -> Tensor:
    """Computes what each head attends to, as `core` would: (B, H, S, S), in the dtype of q or a wider one.

    Args:
        core: a module of `Model.sequence_mixers`, whose `mixing()` says what it does besides plain causal attention.
        q: (B, S, H, E).
        k: (B, S, K, E).
        batch: `document_ids` (B, S), if there are any, bound attention.
        sinks: (H,), scores without a value: rows then sum to less than 1.
    """
    options = dict(core.mixing())
    window, scale, cap = (options.pop(name, 0) for name in ("window", "scale", "soft_cap"))
    options.pop("sinks", None)
    if options:
        raise ForgeError(f"{type(core).__name__} attends by {', '.join(options)}, which no pattern is known of")
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bshe,bthe->bhst", q, k).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * (scale or q.shape[-1] ** -0.5)
    if cap:
        scores = (scores / cap).tanh() * cap
    distance = torch.arange(q.shape[1], device=q.device).unsqueeze(1) - torch.arange(k.shape[1], device=q.device)
    seen = (distance >= 0) & (distance < (window or k.shape[1]))
    if "document_ids" in batch:
        documents = batch["document_ids"]
        seen = seen & (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., : k.shape[1]]
