"""Rules of which architectures are made; see `forge_plugin_weights.kinds.Rule`.

A name may have placeholders: `{layer}` and `{expert}` stand for numbers, `{tensor}` for `weight` or `bias`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen

from forge_plugin_weights.kinds import Part, Shapes

if TYPE_CHECKING:
    from torch import Tensor

PLACEHOLDERS: Mapping[str, str] = {"layer": r"\d+", "expert": r"\d+", "tensor": "weight|bias"}


# Each rule is tried on every tensor of a model.
@cache
def pattern(template: str) -> re.Pattern[str]:
    """Returns the pattern of the names that a template stands for."""
    # Every second piece is the name of a placeholder, since the expression has one group.
    parts = re.split(r"\{(\w+)\}", template)
    named = (
        f"(?P<{part}>{PLACEHOLDERS[part]})" if number % 2 else re.escape(part) for number, part in enumerate(parts)
    )
    return re.compile("".join(named))


def match(template: str, name: str) -> dict[str, str] | None:
    """Returns what the placeholders stand for, or None if the name is not of the template."""
    matched = pattern(template).fullmatch(name)
    return matched.groupdict() if matched else None


def whole(tensor: Tensor) -> Tensor:
    """Returns the tensor."""
    return tensor


@frozen
class Same:
    """A tensor that both sides have."""

    ours: str
    theirs: str

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns one part, the whole of both tensors."""
        groups = match(self.ours, name)
        if groups is None:
            return ()
        shape = shapes[name]
        return [same(name, self.theirs.format(**groups), shape)]


def same(ours: str, theirs: str, shape: tuple[int, ...], *, copy: bool = False, written: bool = True) -> Part:
    """Returns a part that is the whole of both tensors."""
    return Part(
        ours=ours,
        theirs=theirs,
        shape=shape,
        offsets=(0,) * len(shape),
        sizes=shape,
        of_ours=whole,
        of_theirs=whole,
        copy=copy,
        written=written,
    )


@frozen(kw_only=True)
class Convolution:
    """Our projection of patches (W, channels * side * side), where theirs is a convolution, or a matrix by pixels."""

    ours: str = field(kw_only=False)
    theirs: str = field(kw_only=False)
    side: int
    """Of a patch in pixels."""
    flat: bool = False
    """Whether theirs is (W, side * side * channels)."""
    frames: int = 0
    """Frames of a patch, a dimension of theirs between channels and rows; 0: there is none."""

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns one part, or for a matrix by pixels a part for each channel."""
        if name != self.ours:
            return ()
        width, values = shapes[name]
        side, frames = self.side, (self.frames,) if self.frames else ()
        # Ours has pixels channel by channel: theirs by pixels falls apart into as many strided parts.
        channels = values // (side**2 * (self.frames or 1))
        # The same numbers in the same order, so that an import uses the bytes of the file
        if not self.flat:
            return [
                Part(
                    ours=name,
                    theirs=self.theirs,
                    shape=(width, channels, *frames, side, side),
                    offsets=(0, 0),
                    sizes=(width, values),
                    of_ours=whole,
                    of_theirs=flattened,
                )
            ]
        return [self._of_channel(name, channel, channels, shapes[name]) for channel in range(channels)]

    def _of_channel(self, ours: str, channel: int, channels: int, shape: tuple[int, ...]) -> Part:
        area = self.side**2
        first = channel * area
        return Part(
            ours=ours,
            theirs=self.theirs,
            shape=shape,
            offsets=(0, first),
            sizes=(shape[0], area),
            torn=True,  # a row of theirs has the channel's numbers apart
            of_ours=lambda tensor: tensor[:, first : first + area],
            of_theirs=lambda tensor: tensor.view(len(tensor), area, channels)[..., channel],
        )


def flattened(tensor: Tensor) -> Tensor:
    """Returns a tensor as a matrix of its first dimension and all others."""
    return tensor.view(len(tensor), -1)


@frozen
class Repeated:
    """A tensor that their files hold once more, or may hold, such as a tied head."""

    ours: str
    theirs: str
    written: bool = False

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns the whole of our tensor as a copy, which files may lack."""
        if name != self.ours:
            return ()
        return [same(name, self.theirs, shapes[name], copy=True, written=self.written)]


@frozen
class Rows:
    """Several of our tensors, one below the other in one of theirs."""

    ours: Sequence[str]
    theirs: str
    joined: ClassVar[int] = 0
    """The dimension of ours along which they follow one another there."""

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns one part, behind the tensors that come before it in `ours`."""
        for number, template in enumerate(self.ours):
            if (groups := match(template, name)) is not None:
                # Of each, as keys and values may have fewer rows than queries
                lengths = [shapes[other.format(**groups)][self.joined] for other in self.ours]
                return [self._part(name, self.theirs.format(**groups), lengths, number, shapes[name])]
        return ()

    def _part(self, ours: str, theirs: str, lengths: Sequence[int], number: int, shape: tuple[int, ...]) -> Part:
        start = sum(lengths[:number])
        return Part(
            ours=ours,
            theirs=theirs,
            shape=(sum(lengths), *shape[1:]),
            offsets=(0,) * len(shape),
            sizes=shape,
            row=start,
            of_ours=whole,
            of_theirs=lambda tensor: tensor[start : start + lengths[number]],
        )


@frozen
class FilterRows(Rows):
    """Filters of ours, (features, W) each, one below the other in the weight (features, 1, W) of a convolution."""

    def _part(self, ours: str, theirs: str, lengths: Sequence[int], number: int, shape: tuple[int, ...]) -> Part:
        start = sum(lengths[:number])
        return Part(
            ours=ours,
            theirs=theirs,
            shape=(sum(lengths), 1, shape[1]),
            offsets=(0, 0),
            sizes=shape,
            row=start,
            of_ours=whole,
            of_theirs=lambda tensor: tensor[start : start + lengths[number], 0],
        )


@frozen
class Alone:
    """A vector of ours, such as numbers of heads, which theirs has with further dimensions of size 1."""

    ours: str
    theirs: str
    before: int = 2
    """Such dimensions before it, as in (1, 1, heads, 1)."""
    behind: int = 1

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns one part without `offsets`: theirs has all numbers in one row."""
        groups = match(self.ours, name)
        if groups is None:
            return ()
        [length] = shapes[name]
        return [
            Part(
                ours=name,
                theirs=self.theirs.format(**groups),
                shape=(*[1] * self.before, length, *[1] * self.behind),
                of_ours=whole,
                of_theirs=lambda tensor: tensor.view(length),
            )
        ]


@frozen
class HeadRows:
    """Several of our tensors, (heads * E, ...) each, whose rows theirs has head by head; widths E may differ.

    Theirs has rows of the first of ours for head 0, of the second for head 0, ..., and so on for every head, as the
    fused queries, keys and values of GPT-NeoX.
    """

    ours: Sequence[str]
    theirs: str
    heads: int

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns a part for each head: its rows in theirs stand between rows of the other tensors."""
        for number, template in enumerate(self.ours):
            if (groups := match(template, name)) is not None:
                theirs = self.theirs.format(**groups)
                widths = [shapes[other.format(**groups)][0] // self.heads for other in self.ours]
                return [self._part(name, theirs, head, number, widths, shapes[name]) for head in range(self.heads)]
        return ()

    def _part(
        self, ours: str, theirs: str, head: int, number: int, widths: Sequence[int], shape: tuple[int, ...]
    ) -> Part:
        inner, width = shape[1:], widths[number]
        start, there = head * width, head * sum(widths) + sum(widths[:number])
        return Part(
            ours=ours,
            theirs=theirs,
            shape=(self.heads * sum(widths), *inner),
            offsets=(start, *(0 for _ in inner)),
            sizes=(width, *inner),
            row=there,
            of_ours=lambda tensor: tensor[start : start + width],
            of_theirs=lambda tensor: tensor[there : there + width],
        )


@frozen
class Stack:
    """A stack of ours, (E, ...), each slice of which is a tensor of theirs; `{expert}` is its number."""

    ours: str
    theirs: str

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns a part for each slice, which is a whole tensor of theirs."""
        groups = match(self.ours, name)
        if groups is None:
            return ()
        count, *inner = shapes[name]
        return [self._part(name, self.theirs.format(expert=n, **groups), n, tuple(inner)) for n in range(count)]

    def _part(self, ours: str, theirs: str, number: int, shape: tuple[int, ...]) -> Part:
        return Part(
            ours=ours,
            theirs=theirs,
            shape=shape,
            offsets=(number, *(0 for _ in shape)),
            sizes=(1, *shape),
            of_ours=lambda tensor: tensor[number],  # without the dimension of experts, as theirs
            of_theirs=whole,
        )


@frozen
class Transposed:
    """A matrix, or a stack of them, that theirs hold by columns."""

    ours: str
    theirs: str

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns one part without `offsets`: its numbers are in another order, so an import computes them."""
        groups = match(self.ours, name)
        if groups is None:
            return ()
        *outer, rows, columns = shapes[name]
        return [
            Part(
                ours=name,
                theirs=self.theirs.format(**groups),
                shape=(*outer, columns, rows),
                of_ours=whole,
                of_theirs=lambda tensor: tensor.mT,  # matrix by matrix in a stack
            )
        ]


@frozen
class Columns(Rows):
    """Several of our matrices, or stacks of them, transposed, side by side in one of theirs.

    The fused projections of GPT-2 are so, and the experts of Qwen3-VL.
    """

    joined = -2  # our rows are their columns

    def _part(self, ours: str, theirs: str, lengths: Sequence[int], number: int, shape: tuple[int, ...]) -> Part:
        start = sum(lengths[:number])
        return Part(
            ours=ours,
            theirs=theirs,
            shape=(*shape[:-2], shape[-1], sum(lengths)),
            of_ours=whole,
            of_theirs=lambda tensor: tensor[..., start : start + lengths[number]].mT,
        )


@frozen
class Interleaved:
    """Several of our tensors, of one shape, whose last dimension theirs has in turns: gate 0, up 0, gate 1, up 1, ...

    `gate_up_proj` of gpt-oss has them so.
    """

    ours: Sequence[str]
    theirs: str
    transposed: bool = False
    """Whether ours are matrices, or stacks of them, whose transposes theirs has in turns."""

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns one part: with n tensors, every n-th number of theirs, from the tensor's index in `ours` on."""
        for number, template in enumerate(self.ours):
            if (groups := match(template, name)) is not None:
                return [self._part(name, self.theirs.format(**groups), number, shapes[name])]
        return ()

    def _part(self, ours: str, theirs: str, number: int, shape: tuple[int, ...]) -> Part:
        count, turned = len(self.ours), self.transposed
        *outer, width = (*shape[:-2], shape[-1], shape[-2]) if turned else shape

        def of_theirs(tensor: Tensor) -> Tensor:
            # A view and not a copy: an export takes the places of numbers from its strides.
            own = tensor[..., number::count]
            return own.mT if turned else own

        return Part(ours=ours, theirs=theirs, shape=(*outer, count * width), of_ours=whole, of_theirs=of_theirs)


@frozen(kw_only=True)
class RotaryRows:
    """Rows of queries or keys of heads whose rotated pairs are neighbours there, and half the rotated width apart here.

    In a head of E rows, of which R are rotated, ours has pair i in rows i and R/2 + i, theirs in rows 2i and 2i + 1;
    the rows behind them are the same.
    """

    ours: str = field(kw_only=False)
    theirs: str = field(kw_only=False)
    width: int
    """E."""
    rotated: int
    """R."""

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns three parts of each head: first and second rows of pairs, and rows that are not rotated."""
        groups = match(self.ours, name)
        if groups is None:
            return ()
        theirs, shape, half = self.theirs.format(**groups), shapes[name], self.rotated // 2
        pieces = ((0, half, 0, 2), (half, half, 1, 2), (self.rotated, self.width - self.rotated, self.rotated, 1))
        return [
            some_rows(name, theirs, shape, (head + first, count, head + there, step))
            for head in range(0, shape[0], self.width)
            for first, count, there, step in pieces
            if count
        ]


def some_rows(ours: str, theirs: str, shape: tuple[int, ...], rows: tuple[int, int, int, int]) -> Part:
    """Returns a part that is adjacent rows of ours, and every n-th row of theirs, which has the same shape.

    Args:
        ours: name of our tensor.
        theirs: name of theirs.
        shape: of both.
        rows: the first row of ours, the number of rows, the first row of theirs, and n.
    """
    first, count, there, step = rows
    return Part(
        ours=ours,
        theirs=theirs,
        shape=shape,
        offsets=(first, *(0 for _ in shape[1:])),
        sizes=(count, *shape[1:]),
        torn=step > 1,
        row=there,
        of_ours=lambda tensor: tensor[first : first + count],
        of_theirs=lambda tensor: tensor[there : there + step * count : step],
    )


@frozen(kw_only=True)
class RotaryColumns:
    """Weights (heads, E) of queries or keys whose features are in the order of `RotaryRows`, all E of them rotated."""

    ours: str = field(kw_only=False)
    theirs: str = field(kw_only=False)

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns two parts: the first and the second features of pairs."""
        groups = match(self.ours, name)
        if groups is None:
            return ()
        return [self._part(name, self.theirs.format(**groups), shapes[name], number) for number in range(2)]

    def _part(self, ours: str, theirs: str, shape: tuple[int, ...], number: int) -> Part:
        half = shape[1] // 2
        first = number * half
        return Part(
            ours=ours,
            theirs=theirs,
            shape=shape,
            offsets=(0, first),
            sizes=(shape[0], half),
            torn=True,
            of_ours=lambda tensor: tensor[:, first : first + half],
            of_theirs=lambda tensor: tensor[:, number::2],
        )


@frozen
class StackedRows(Rows):
    """Stacks of ours, (E, ..., D) each, that are one below the other in each slice of one stack of theirs."""

    joined = 1

    def _part(self, ours: str, theirs: str, lengths: Sequence[int], number: int, shape: tuple[int, ...]) -> Part:
        start = sum(lengths[:number])
        return Part(
            ours=ours,
            theirs=theirs,
            shape=(shape[0], sum(lengths), *shape[2:]),
            of_ours=whole,
            of_theirs=lambda tensor: tensor[:, start : start + lengths[number]],
        )


@frozen
class SplitRows:
    """A tensor of ours whose rows are those of several of theirs, one below the other, and equally many of each."""

    ours: str
    theirs: Sequence[str]

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns a part for each tensor of theirs, which is the whole of it."""
        groups = match(self.ours, name)
        if groups is None:
            return ()
        rows, *inner = shapes[name]
        shape = (rows // len(self.theirs), *inner)
        return [self._part(name, theirs.format(**groups), number, shape) for number, theirs in enumerate(self.theirs)]

    def _part(self, ours: str, theirs: str, number: int, shape: tuple[int, ...]) -> Part:
        start = number * shape[0]
        return Part(
            ours=ours,
            theirs=theirs,
            shape=shape,
            offsets=(start, *(0 for _ in shape[1:])),
            sizes=shape,
            of_ours=lambda tensor: tensor[start : start + shape[0]],
            of_theirs=whole,
        )
