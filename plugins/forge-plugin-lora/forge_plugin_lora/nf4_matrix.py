"""Matrices whose weight is stored in NF4 and computed with in the dtype of the activations.

Shapes: (…, in) activations, (out, in) weights; stacks of experts have a dimension E before these. Bytes as in `nf4`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.errors import ForgeError, listed
from forge_core.parallel.mesh import local_part
from forge_kit.nn.adapters import put_before
from forge_kit.nn.modules import Linear, cast
from forge_kit.torch_internals import parameters_of, part_offsets
from forge_plugin_lora.nf4 import BLOCK, BYTES, ROW_BYTES, dequantise, pair_table, quantise, rows_at_once, stored_bytes

if TYPE_CHECKING:
    from forge_core.contracts.model import Fill

ROWS = "nf4_rows"
"""Name of the module that a matrix in NF4 gets, with the bytes of its rows."""
Place = tuple[tuple[int, int], ...]
"""First index and end along each dimension of a weight."""


class Stored(nn.Parameter):
    """Bytes of a weight before they have memory, counted in weights: code that counts parameters counts those."""

    elements: int
    bytes_each: float

    @classmethod
    def of(cls, shape: Sequence[int], elements: int, bytes_each: float) -> Stored:
        """Returns one on the meta device, which does not train."""
        stored = cls(torch.empty(*shape, dtype=torch.uint8, device="meta"), requires_grad=False)
        stored.elements, stored.bytes_each = elements, bytes_each
        return stored

    def numel(self) -> int:
        """Returns the number of weights."""
        return self.elements

    def element_size(self) -> Any:
        """Returns the bytes of a weight, a fraction."""
        return self.bytes_each

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.empty_like:
            # By numbers alone: the fake tensors of torch 2.11, with which a step is planned, know no class but theirs
            return torch.empty(args[0].shape, dtype=args[0].dtype, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


class Rows(nn.Module):
    """The bytes of rows, which are computed with the bytes of blocks; no checkpoint has them."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()
        self.weight = Stored.of((*rows, ROW_BYTES), 0, 0.0)

    def init_parameter(self, name: str, fill: Fill) -> None:
        fill.constant(0.0)

    def init_buffers(self, device: torch.device) -> None:
        """There are none."""

    def forward(self) -> Tensor:
        """Returns the bytes: by a call, in which a stage replaces them by this rank's part."""
        return self.weight


class InNF4(nn.Module):
    """A matrix in NF4. A base put before the module's own class, which computes W x + b.

    `weight` is bytes, and no gradient is computed for it. W is computed from them in each forward pass, and again in
    the backward pass, so that nothing of its size is kept. In the state of the model `weight` is W: written to it, by
    a checkpoint that is loaded, values are quantised one matrix after the other.
    """

    weight: Any
    bias: Any
    nf4_rows: Any
    nf4_pairs: Tensor
    nf4_plain: bool
    """Whether the module's own class computes x Wᵀ + b, which needs no call of it."""
    nf4_shape: torch.Size
    nf4_written: int
    """Weights that have been written."""
    nf4_squares: tuple[float, float]
    """Sums of squares of what quantising changed and of the weights, of those that this rank has."""
    nf4_pieces: tuple[Tensor, int] | None
    """What has been written of a matrix that comes in parts of rows."""

    def init_parameter(self, name: str, fill: Fill) -> None:
        # Frozen, so it comes from the base
        if name == "weight" or not hasattr(super(), "init_parameter"):
            fill.constant(0.0)
        else:
            super().init_parameter(name, fill)  # type: ignore[misc]

    def init_buffers(self, device: torch.device) -> None:
        if hasattr(super(), "init_buffers"):
            super().init_buffers(device)  # type: ignore[misc]
        self.nf4_pairs.copy_(pair_table())

    def forward(self, x: Tensor, *further: Any) -> Tensor:
        """(…, in) to (…, out); `further` as in `LowRank`."""
        rows = self.nf4_rows()
        if not self.nf4_plain:
            return _of_stack(x, self.weight, rows, self.nf4_pairs, self, further)
        y = _Product.apply(x, self.weight, rows, self.nf4_pairs)
        return y if self.bias is None else y + cast(self.bias, y.dtype)

    def multiply(self, weight: Tensor, x: Tensor, further: tuple[Any, ...], *, biased: bool) -> Tensor:
        """Call the module's own class with another weight."""
        own = dict(parameters_of(self))
        # In the table of parameters, as an attribute of this name takes parameters only
        parameters_of(self)["weight"] = weight
        if not biased:
            parameters_of(self)["bias"] = None
        try:
            return super().forward(x, *further)  # type: ignore[misc,no-any-return]
        finally:
            parameters_of(self).update(own)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns this rank's part of W."""
        weight, rows = (local_part(part.detach()) for part in (self.weight, self.nf4_rows.weight))
        return _computed(weight, rows, self.nf4_pairs.to(weight.device), dtype)

    # --- the state of the model ------------------------------------------------------------------------------------

    def write(self, values: Tensor, place: Place) -> None:
        """Quantise values of W, wherever they are, into this rank's part."""
        whole = self.nf4_shape.numel()
        if self.nf4_written >= whole:  # of a run that goes back
            self.nf4_written, self.nf4_squares = 0, (0.0, 0.0)
        self.nf4_written += values.numel()
        if place[-1] != (0, self.nf4_shape[-1]):
            # A row is quantised as a whole
            pieces, filled = self.nf4_pieces or (torch.empty(self.nf4_shape, dtype=values.dtype), 0)
            pieces[tuple(slice(*span) for span in place)] = values
            self.nf4_pieces = pieces, filled + values.numel()
            if filled + values.numel() < whole:
                return
            values, place, self.nf4_pieces = pieces, tuple((0, size) for size in self.nf4_shape), None
        weight, rows = (local_part(part.detach()) for part in (self.weight, self.nf4_rows.weight))
        first = part_offsets(self.weight)
        ends = [start + size for start, size in zip(first, weight.shape, strict=True)]
        # Of the rows that were given, those that this rank has
        spans = [(max(a, c), min(b, d)) for (a, b), c, d in zip(place[:-1], first, ends, strict=False)]
        if any(start >= end for start, end in spans):
            return
        # Spans are without the last dimension, of which rows are whole
        given = values[tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(spans, place, strict=False))]
        own = tuple(slice(a - start, b - start) for (a, b), start in zip(spans, first, strict=False))
        parts = given, weight[own], rows[own]
        # One matrix of a stack at a time
        for matrix, blocks_of, rows_of in zip(*parts, strict=True) if given.ndim > 2 else [parts]:
            self._quantise(matrix, blocks_of, rows_of, first[-1])

    def _quantise(self, matrix: Tensor, blocks: Tensor, rows: Tensor, first: int) -> None:
        """Quantise whole rows (out, in) into this rank's bytes of them, which begin at the byte `first` of each."""
        # A stage may keep parameters elsewhere than buffers
        pairs = self.nf4_pairs.to(blocks.device)
        parts = (tensor.split(rows_at_once(matrix.shape[-1])) for tensor in (matrix, blocks, rows))
        for given, into, into_rows in zip(*parts, strict=True):
            exact = given.to(blocks.device, torch.float32)
            packed, of_rows = quantise(exact, pairs)
            into.copy_(packed[:, first : first + blocks.shape[-1]])
            into_rows.copy_(of_rows)
            changed = dequantise(packed, of_rows, pairs, torch.float32) - exact
            error, size = (float(torch.linalg.vector_norm(each)) ** 2 for each in (changed, exact))
            self.nf4_squares = self.nf4_squares[0] + error, self.nf4_squares[1] + size


class _Product(torch.autograd.Function):
    """x Wᵀ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Tensor, pairs: Tensor) -> Tensor:
        ctx.save_for_backward(weight, rows, pairs)
        return F.linear(x, _computed(weight, rows, pairs, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, rows, pairs = ctx.saved_tensors
        return grad @ _computed(weight, rows, pairs, grad.dtype), None, None, None


class _CalledProduct(torch.autograd.Function):
    """What a module of another kind computes, which is x Wᵀ + b too, of rows that it chooses.

    By the same contract, `forge_kit.nn.adapters.Adaptable`, the gradient of x is what it computes of gradients with the
    transposed weight.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rows: Tensor, pairs: Tensor, module: InNF4, further: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(weight, rows, pairs)
        ctx.module, ctx.further = module, further
        return module.multiply(_computed(weight, rows, pairs, x.dtype), x, further, biased=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, rows, pairs = ctx.saved_tensors
        transposed = _computed(weight, rows, pairs, grad.dtype).mT.contiguous()
        of_x = ctx.module.multiply(transposed, grad.contiguous(), ctx.further, biased=False)
        return of_x, None, None, None, None, None


def _called_product(*arguments: Any) -> Any:
    return _CalledProduct.apply(*arguments)


# It changes the module's parameters, which the compiler does not trace
_of_stack: Any = torch.compiler.disable(_called_product)


def _computed(weight: Tensor, rows: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """W in a dtype, of its bytes."""
    if weight.shape[-1] > 1 and weight.stride(-2) == 1:
        return _stand_in(weight, dtype)
    # fsdp of old versions of torch gathers bytes in the compute dtype, which has all of them
    return dequantise(cast(weight, torch.uint8), cast(rows, torch.uint8), pairs, dtype)


def _stand_in(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """W for bytes whose rows share memory, which `forge_kit.nn.position_probe` gives to a model before it has any.

    Bytes at random are no numbers, so its stand-in for W itself takes their place.
    """
    shape = (*weight.shape[:-1], weight.shape[-1] // BYTES * BLOCK)
    # With strides of 1, indices reach no further than the sum of the sizes
    line = torch.randn(sum(shape), generator=torch.Generator().manual_seed(0)) / shape[-1] ** 0.5
    values = line.to(weight.device, dtype).as_strided(shape, [1] * len(shape))
    # Products of stacks refuse such strides; of large models, the probe multiplies itself
    return values.contiguous() if len(shape) > 2 and values.numel() <= 2**24 else values


def _show_whole(module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Put W in the place of its bytes."""
    state[f"{prefix}weight"] = Whole.of(module, tuple((0, size) for size in module.nf4_shape))
    del state[f"{prefix}{ROWS}.weight"]


class Whole(Tensor):
    """W in the state of a model, or a part of it: values that are copied into it are quantised, and none are kept.

    Whatever reads it gets the values that NF4 stands for.
    """

    _module: InNF4
    _place: Place

    @classmethod
    def of(cls, module: InNF4, place: Place) -> Whole:
        """Returns the part of a module's W at a place."""
        sizes = [end - start for start, end in place]
        tensor = torch.empty(sizes, device="meta").as_subclass(cls)
        tensor._module, tensor._place = module, place
        return tensor

    def values(self) -> Tensor:
        """Returns the values that NF4 stands for.

        Raises:
            ForgeError: this rank has a part of them only.
        """
        whole = self._module.dequantised()
        if whole.shape != self._module.nf4_shape:
            raise ForgeError("a matrix in NF4 can be read where a rank has all of it, not where ranks share it")
        return whole[tuple(slice(*span) for span in self._place)]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own, *others = args
        if func is Tensor.copy_ and isinstance(own, cls):
            own._module.write(others[0].detach(), own._place)
            return own
        if func in (Tensor.detach, Tensor.data.__get__):  # type: ignore[attr-defined]
            return own
        if func is Tensor.__getitem__ and (place := own._inner(others[0])):
            return cls.of(own._module, place)
        if func in _DESCRIBING:
            return super().__torch_function__(func, types, args, kwargs or {})
        return func(*_read(args), **{name: _read(value) for name, value in (kwargs or {}).items()})

    def _inner(self, index: Any) -> Place | None:
        """The place of a part that slices select; None: it is selected in another way."""
        if not isinstance(index, tuple) or not all(isinstance(each, slice) for each in index):
            return None
        if len(index) != len(self._place):
            return None
        spans = [each.indices(end - start) for each, (start, end) in zip(index, self._place, strict=True)]
        if any(step != 1 for *_, step in spans):
            return None
        return tuple((start + a, start + b) for (a, b, _), (start, _) in zip(spans, self._place, strict=True))


def _read(arguments: Any) -> Any:
    """Replace the parts of W among arguments, in lists and tuples too, by their values."""
    if isinstance(arguments, list | tuple):
        return type(arguments)(_read(each) for each in arguments)
    return arguments.values() if isinstance(arguments, Whole) else arguments


_DESCRIBING = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "nbytes", "is_cpu", "is_cuda", "is_meta", "layout")
    ),
    *(getattr(Tensor, name).__get__ for name in ("device", "requires_grad", "is_sparse", "is_quantized", "grad_fn")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "element_size", "is_floating_point", "stride")),
    *(getattr(Tensor, name) for name in ("is_contiguous", "storage_offset", "is_complex", "__len__")),
}
"""What describes a tensor, and reads no value of it."""


def fits(shape: Sequence[int]) -> bool:
    """Whether a weight of this shape can be stored in NF4."""
    return shape[-1] % BLOCK == 0


def store(module: Any) -> None:
    """Let a module without an adapter, on the meta device, store its frozen matrix in NF4; see `InNF4`."""
    *rows, inputs = shape = module.weight.shape
    elements = shape.numel()
    module.weight = Stored.of((*rows, inputs // BLOCK * BYTES), elements, stored_bytes(shape) / elements)
    module.nf4_rows = Rows(rows)
    # Not in checkpoints: a constant of the format
    module.register_buffer("nf4_pairs", torch.empty(256, 2, device="meta"), persistent=False)
    # Read here, as `put_before` derives a class with another `forward`
    module.nf4_plain = type(module).forward in (Linear.forward, nn.Linear.forward)
    module.nf4_shape = shape
    module.nf4_written = 0
    module.nf4_squares = 0.0, 0.0
    module.nf4_pieces = None
    module.register_state_dict_post_hook(_show_whole)
    put_before(InNF4, module)


def in_nf4(model: nn.Module) -> Iterator[tuple[str, InNF4]]:
    """Yields the matrices of a model that are stored in NF4, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, InNF4))


def describe(stored: Mapping[str, Any], left: Sequence[str]) -> str:
    """Returns how much of a model is in NF4, and which frozen matrices are `left` as they do not fit, for people."""
    elements = sum(module.nf4_shape.numel() for module in stored.values())
    size = sum(stored_bytes(module.nf4_shape) for module in stored.values())
    others = f"; not {listed(left)}, whose columns are no multiple of {BLOCK}" if left else ""
    each = f"{8 * size / elements:.3f} bits each"
    return f"NF4: {len(stored)} matrices with {elements:,} weights in {size / 1e6:,.1f} MB, {each}{others}"


def rounding(stored: Mapping[str, Any]) -> str:
    """Returns by how much NF4 has changed the weights that this rank has, for people; empty before they are loaded."""
    changed, squares = (sum(module.nf4_squares[which] for module in stored.values()) for which in (0, 1))
    if not squares:
        return "not loaded yet"
    return f"rounded by {math.sqrt(changed / squares):.2%}, the norm of the change over the norm of the weights"
