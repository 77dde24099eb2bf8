"""Finds by number where positions of a sequence depend on each other, in a bare model that is never trained.

A stage that divides sequences replaces the modules of `Model.sequence_mixers`. Anything else that mixes positions, such
as a short convolution, would see only its rank's positions, and train a different model without a message. So
each block runs twice on a short sequence with stand-ins for weights: once as it is, once with the middle positions
changed. What then differs at the other positions was mixed.

Shapes: S positions of the one sequence, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, product
from typing import Any, TypeVar

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from forge_core.contracts.model import Initialises, Model
from forge_kit.nn.head_mixers import MixesHeads
from forge_kit.torch_internals import NormBase, TorchDispatchMode, buffers_of, grouped_mm, parameters_of, to_copy

LENGTHS = (17, 16, 128)
"""S. The first is odd and prime, so that no other dimension is taken for positions; then, for models that refuse it,
what windows and chunks divide."""
ROWS = (128, 2**62)
"""Up to how many rows of an entry of a batch are shown: few, or, to models that refuse it, all. A batch of images may
have thousands of patches, which would take seconds."""
IDS = 16
"""Token ids are below this: every vocabulary has them."""
DIGITS = 64
"""Differences are noise up to this many times the precision of their dtype: experts may get rows in another order."""
LARGE = 2**24
"""Parameters up to which whole products are computed."""
Answer = TypeVar("Answer")
aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, grouped_mm, to_copy, aten.clone)
"""Operators that would need the whole of a matrix."""


class ProbeFailed(Exception):
    """The model does not run on the CPU with a short sequence, so nothing is known of it."""


def mixes_positions(module: nn.Module) -> bool:
    """Returns whether a module declares, by an attribute `mixes_positions`, that its positions depend on each other.

    It then computes the same where a stage divides sequences, by its own collectives, and no stage replaces it. A block
    of which no module mixes positions, as it has none for that, declares this by `mixes_positions = False`.
    """
    return bool(getattr(module, "mixes_positions", False))


def undeclared_mixer(model: Model) -> str | None:
    """Returns the name of a part whose positions depend on each other without a declaration; None: there is none.

    Args:
        model: whole, on the meta device or not, before any stage. It is left as it was, and so are all generators.

    Returns:
        The name of a module, or of the method `embed`, `prepare` or `finish`. Declared are the modules of
        `Model.sequence_mixers`, and those with `mixes_positions`.

    Raises:
        ProbeFailed: the model cannot run on the CPU.
    """
    return _probed(model, _Probe.undeclared)


def leaking_part(model: Model) -> str | None:
    """Returns the name of a part in which documents of one row see each other; None: there is none.

    Modules of `Model.sequence_mixers` are not looked at: that they keep documents apart is their contract.

    Args:
        model: as for `undeclared_mixer`.

    Raises:
        ProbeFailed: the model cannot run on the CPU.
    """
    return _probed(model, _Probe.leaking)


def uncached_mixer(model: Model) -> str | None:
    """Returns the name of an undeclared mixer of which the model's cache keeps too little; None: there is none.

    Args:
        model: one that generates; otherwise as for `undeclared_mixer`.

    Raises:
        ProbeFailed: the model cannot run on the CPU.
    """
    name = undeclared_mixer(model)
    # Only then: rounding may send tokens to other experts, and nothing else would be wrong.
    return name if name is not None and _probed(model, _Probe.decodes_otherwise, mixing=True) else None


def _probed(model: Model, question: Callable[[_Probe], Answer], *, mixing: bool = False) -> Answer:
    """The answer of a probe of a model with stand-ins, in which mixers mix if `mixing`."""
    failures = []
    large = sum(parameter.numel() for parameter in model.parameters()) > LARGE
    products = _StandInProducts() if large else nullcontext()  # importing what it needs takes a second
    for length, rows in product(LENGTHS, ROWS if getattr(model, "batch_fields", None) else ROWS[:1]):
        try:
            with _stand_ins(model, mixing, large), products, torch.no_grad(), torch.random.fork_rng(devices=[]):
                return question(_Probe(model, length, rows))
        except Exception as error:  # the model is code of anybody
            failures.append(f"{type(error).__name__}: {error}")
    raise ProbeFailed(failures[0].partition("\n")[0])


# --- stand-ins -------------------------------------------------------------------------------------------------------


@contextmanager
def _stand_ins(model: Model, mixing: bool, large: bool) -> Iterator[None]:
    """A context in which the model is on the CPU with arbitrary weights that take no memory.

    Its mixers mix nothing, unless `mixing`. Products of `large` models are those of `_StandInProducts`.
    """
    # In place and not in a copy: functions that somebody has put into modules refer to these.
    states = [
        (module, {**vars(module)}, {**parameters_of(module)}, {**buffers_of(module)}) for module in model.modules()
    ]
    generator = torch.Generator().manual_seed(0)
    made: dict[int, nn.Parameter] = {}  # ties stay ties
    try:
        for module, _, parameters, _ in states:
            for name, parameter in parameters.items():
                if parameter is not None:
                    parameters_of(module)[name] = made.setdefault(id(parameter), _stand_in(parameter, generator, large))
            _renew_buffers(module)
        for name in () if mixing else model.sequence_mixers():
            mixer = model.get_submodule(name)
            alone = partial(_position_by_position, mixer.forward) if isinstance(mixer, MixesHeads) else _unmixed
            vars(mixer)["forward"] = alone
        yield
    finally:
        for module, attributes, parameters, buffers in states:
            vars(module).clear()
            vars(module).update(attributes)
            parameters_of(module).clear()
            parameters_of(module).update(parameters)
            buffers_of(module).clear()
            buffers_of(module).update(buffers)


def _stand_in(parameter: nn.Parameter, generator: torch.Generator, large: bool) -> nn.Parameter:
    """Random values of the parameter's shape, equal where indices have equal sums: a layer of 10 GB takes 100 kB."""
    shape = parameter.shape
    line = torch.randn(max(sum(shape), 1), generator=generator) / (shape[-1] if len(shape) > 1 else 1) ** 0.5
    if len(shape) < 2:
        # Near 1, since most vectors are scales of norms
        line = 1 + 0.2 * line
    values = line.to(parameter.dtype).as_strided(shape, [1] * len(shape))
    if len(shape) > 2 and not large and values.is_floating_point():
        # torch's product of stacks refuses such strides. Bytes, which stand for numbers, are recognised by theirs
        values = values.contiguous()
    return nn.Parameter(values, requires_grad=False)


def _renew_buffers(module: nn.Module) -> None:
    for name, buffer in buffers_of(module).items():
        if buffer is not None:
            buffers_of(module)[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    if isinstance(module, Initialises):
        module.init_buffers(torch.device("cpu"))
    elif isinstance(module, NormBase):
        module.reset_running_stats()


def _unmixed(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Replaces a mixer: a position's output depends on its own query, key and value alone, (1, S, H, V)."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    return v + q.mean(-1, keepdim=True) + k.mean(-1, keepdim=True)


def _position_by_position(mixer: Any, tensors: Sequence[Tensor], per_head: Sequence[Tensor], *_: Any) -> Tensor:
    """Replaces a mixer of heads: each position is a sequence by itself."""
    mixed: Tensor = mixer([tensor.transpose(0, 1) for tensor in tensors], per_head, {})
    return mixed.transpose(0, 1)


class _StandInProducts(TorchDispatchMode):
    """Multiplies with a few rows and columns of a stand-in: the whole would take seconds, and memory for a copy."""

    RANK = 4  # more than one, so that a norm does not remove what the product has of its input

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation, given = func.overloadpacket, {name: value for name, value in kwargs.items() if name != "out"}
        if operation not in PRODUCTS or not any(map(_is_stand_in, args)):
            return func(*args, **kwargs)
        result = self._result(operation, func, args, given)
        return kwargs["out"].copy_(result) if "out" in kwargs else result

    def _result(self, operation: Any, func: Any, args: Any, given: Any) -> Tensor:
        if operation in (to_copy, aten.clone):
            return self._copied(
                func, args[0], {name: value for name, value in given.items() if name != "memory_format"}
            )
        if operation is grouped_mm:
            return self._product(args[0], args[1][0])
        if operation in (aten.mm, aten.bmm):
            return self._product(*args)
        added, first, second = args
        return given.get("beta", 1) * added + given.get("alpha", 1) * self._product(first, second)

    def _copied(self, func: Any, matrix: Tensor, kwargs: Any) -> Tensor:
        """A stand-in in another dtype, still without memory for each element."""
        line = matrix.as_strided((matrix.untyped_storage().nbytes() // matrix.itemsize,), (1,), 0)
        return func(line, **kwargs).as_strided(matrix.shape, matrix.stride(), matrix.storage_offset())  # type: ignore[no-any-return]

    def _product(self, first: Tensor, second: Tensor) -> Tensor:
        gain = (first.shape[-1] / self.RANK) ** 0.5
        if _is_stand_in(second):
            return gain * (first @ second[..., : self.RANK].contiguous()) @ second[..., : self.RANK, :].contiguous()
        if _is_stand_in(first):
            return gain * first[..., : self.RANK].contiguous() @ (first[..., : self.RANK, :].contiguous() @ second)
        return first @ second


def _is_stand_in(matrix: Any) -> bool:
    """Whether elements share memory, other than by `expand`, which makes strides of 0."""
    if not isinstance(matrix, Tensor):
        return False
    return 0 not in matrix.stride() and matrix.untyped_storage().nbytes() < matrix.numel() * matrix.itemsize


# --- two passes ------------------------------------------------------------------------------------------------------


@frozen
class _Call:
    """What a module, or a method of the model, was called with and what it returned."""

    name: str
    received: list[Tensor]
    returned: list[Tensor]


@frozen
class _Probe:
    """Passes of one sequence, of which some positions are changed."""

    model: Model
    length: int
    rows: int
    names: Mapping[nn.Module, str] = field(init=False)

    @names.default
    def _names(self) -> Mapping[nn.Module, str]:
        return {module: name for name, module in self.model.named_modules()}

    def undeclared(self) -> str | None:
        """The part that lets middle positions change others, declared ones excepted."""
        quarter = self.length // 4
        # The middle, so that mixing in either direction shows at one of the ends
        changed = slice(quarter, self.length - quarter)
        quiet = [*range(quarter), *range(self.length - quarter, self.length)]
        # As where ranks share sequences: this may be one of them, whose declared mixers communicate in the same order.
        places = torch.arange(self.length)[None]
        return self._guilty({**self._batch(), "places": places}, changed, quiet, replay=True)

    def leaking(self) -> str | None:
        """The part in which positions of the first document change positions of the second (the last half)."""
        half = self.length // 2
        places = torch.arange(self.length)[None]
        second = (places >= half).long()
        apart = {"document_ids": second, "positions": places - half * second}
        return self._guilty({**self._batch(), **apart}, slice(0, half), [*range(half, self.length)], replay=False)

    def decodes_otherwise(self) -> bool:
        """Whether a cache changes what the model computes, by more than rounding."""
        model: Any = self.model.eval()
        batch = {name: entry for name, entry in self._batch().items() if name != "labels"}
        expected, half = model(batch), self.length // 2
        cache, parts = model.new_cache(1, self.length), []
        # A prompt, one token, and several after others: caches often treat these three cases differently
        for start, end in ((0, half), (half, half + 1), (half + 1, self.length)):
            places = torch.arange(start, end)[None]
            parts.append(
                model.decode({**batch, "input_ids": batch["input_ids"][:, places[0]], "positions": places}, cache)
            )
        return bool((torch.cat(parts, 1) - expected).abs().max() > 0.05 * expected.abs().max())

    def _batch(self) -> dict[str, Tensor]:
        fields = self.model.batch_fields
        # Ids may stand for images, of which a batch of zeros has none.
        ids = torch.zeros(self.length, dtype=torch.int64) if fields else torch.arange(self.length) * 7 % IDS
        batch = {
            name: torch.zeros(
                (1, *(min(size, self.rows) for size in entry.shape[:1]), *entry.shape[1:]),
                dtype=getattr(torch, entry.dtype),
            )
            for name, entry in fields.items()
        }
        labels = torch.arange(self.length)[None] % IDS
        return {**batch, "input_ids": ids[None], "labels": labels, "draw": torch.zeros(1, dtype=torch.int64)}

    def _guilty(self, batch: dict[str, Tensor], changed: slice, quiet: list[int], *, replay: bool) -> str | None:
        model = self.model
        compare = _Comparison(self.names, self.length, quiet, replay)
        batch = model.prepare_sequences(batch)
        prepared = model.prepare(batch)
        carry = model.embed(prepared)
        if not model.batch_fields:
            # A copy: results are compared with the batch as it was
            other = {**batch, "input_ids": batch["input_ids"].clone()}
            other["input_ids"][:, changed] = IDS - 1 - other["input_ids"][:, changed]
            for name, method in (
                ("prepare", model.prepare),
                ("embed", lambda batch: model.embed({**prepared, **batch})),
            ):
                if guilty := compare(name, method, (batch,), (other,)):
                    return guilty
        # Equal layers are looked at once, also where there are many of hundreds of experts.
        for block in {_structure(block): block for block in reversed([*model.layers.values()])}.values():
            if guilty := compare("", block, (carry, prepared), (self._disturbed(carry, changed), prepared)):
                return guilty
        return compare("finish", model.finish, (carry, prepared), (self._disturbed(carry, changed), prepared))

    def _disturbed(self, carry: tuple[Tensor, ...], changed: slice) -> tuple[Tensor, ...]:
        return tuple(self._noisy(tensor, changed) for tensor in carry)

    def _noisy(self, tensor: Tensor, changed: slice) -> Tensor:
        if tensor.shape[:2] != (1, self.length) or not tensor.is_floating_point():
            return tensor
        tensor = tensor.clone()
        part = tensor[:, changed]
        noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(1))
        tensor[:, changed] = part + noise.to(part.dtype) * (1 + part.abs().mean())
        return tensor


class _Comparison:
    """Calls a function twice and looks for the innermost module whose quiet positions changed by themselves."""

    def __init__(self, names: Mapping[nn.Module, str], length: int, quiet: list[int], replay: bool) -> None:
        """Set up the comparison.

        Args:
            names: of modules.
            length: S.
            quiet: positions whose input is the same in both calls.
            replay: whether modules with `mixes_positions` may mix.
        """
        self._names, self._length, self._quiet = names, length, torch.tensor(quiet)
        self._declared = [module for module in names if replay and mixes_positions(module)]

    def __call__(self, name: str, function: Callable[..., Any], first: Any, second: Any) -> str | None:
        before = self._calls(name, function, first, [])
        after = self._calls(name, function, second, before)
        # The first is the innermost, as inner calls end before the calls around them
        return next((one.name for one, two in zip(before, after, strict=False) if self._mixed(one, two)), None)

    def _calls(self, name: str, function: Callable[..., Any], args: Any, before: list[_Call]) -> list[_Call]:
        """The calls of modules in the order in which they end, inner ones first, then the function's."""
        calls: list[_Call] = []

        def note(module: nn.Module, received: Any, returned: Any) -> Any:
            call = _Call(self._names.get(module, name), self._copies(received), self._copies(returned))
            earlier = before[len(calls)] if len(calls) < len(before) else None
            calls.append(call)
            if module in self._declared and earlier is not None and not self._differ(earlier.received, call.received):
                calls[-1] = earlier
                return self._replaced(returned, iter(earlier.returned))
            return None

        torch.default_generator.manual_seed(0)  # dropout is the same in both calls; CUDA's generators are left alone
        handle = register_module_forward_hook(note)
        try:
            returned = function(*args)
        finally:
            handle.remove()
        if not isinstance(function, nn.Module):
            calls.append(_Call(name, self._copies(args), self._copies(returned)))
        return calls

    def _copies(self, value: Any) -> list[Tensor]:
        # Later code may change them in place.
        return [tensor.clone() for tensor in _tensors(value) if self._length in tensor.shape]

    def _replaced(self, value: Any, tensors: Iterator[Tensor]) -> Any:
        """The value, a tensor or nested tuples of them, with those that have positions replaced in order."""
        if isinstance(value, Tensor):
            return next(tensors) if self._length in value.shape else value
        if isinstance(value, tuple):
            parts = [self._replaced(part, tensors) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    def _mixed(self, before: _Call, after: _Call) -> bool:
        return not self._differ(before.received, after.received) and self._differ(before.returned, after.returned)

    def _differ(self, before: list[Tensor], after: list[Tensor]) -> bool:
        """Whether some tensor with a dimension of positions differs at those that are quiet."""
        return any(self._differs(one, two) for one, two in zip(before, after, strict=False))

    def _differs(self, before: Tensor, after: Tensor) -> bool:
        if before.shape != after.shape:
            return False
        dimension = before.shape.index(self._length)
        one, two = (tensor.index_select(dimension, self._quiet).double() for tensor in (before, after))
        precision = torch.finfo(before.dtype).eps if before.is_floating_point() else 0.0
        scale = one[one.isfinite()].abs().max().item() if bool(one.isfinite().any()) else 0.0
        return not torch.allclose(one, two, rtol=0, atol=DIGITS * precision * scale, equal_nan=True)


def _structure(block: nn.Module) -> str:
    """A text that is equal for blocks that compute the same with other weights."""
    parts = []
    for name, module in block.named_modules():
        shapes = [(key, tuple(parameter.shape)) for key, parameter in module.named_parameters(recurse=False)]
        settings = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        # Blocks of one class differ where `forward` was replaced in one of them
        replaced = getattr(vars(module).get("forward"), "__code__", None)
        parts.append((name, type(module), shapes, settings, replaced))
    return repr(parts)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_tensors, value))
