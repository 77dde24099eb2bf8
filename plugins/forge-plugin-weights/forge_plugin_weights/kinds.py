"""The kind `architecture`: how a published model's configuration and tensors correspond to Forge's.

An architecture is two tables, each of which serves both directions: `fields` has the keys of `config.json` and the keys
of `[model]` that they stand for, `rules` the names of tensors. A model in Forge is known here by the keys of its table,
flat: `{"dim": 64, "attention.type": "forge-plugin-transformer/gqa", "attention.heads": 4, ...}`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attrs import frozen

from forge_core.contracts.components import Component

if TYPE_CHECKING:
    from torch import Tensor

Config = Mapping[str, Any]
"""The content of a `config.json`."""
Flat = Mapping[str, Any]
"""The table `[model]` with its tables' keys joined by dots."""
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Shapes of Forge's tensors by name."""


class Unsupported(Exception):
    """A key that has no counterpart on the other side; the message says which, and what there is."""


class Field:
    """Keys of a configuration, and the keys of `[model]` that they stand for. A base with defaults."""

    @property
    def keys(self) -> Collection[str]:
        """Keys of the configuration that it reads."""
        return ()

    @property
    def written(self) -> Collection[str]:
        """Keys that every configuration has which it writes."""
        return self.keys

    def read(self, config: Config) -> Flat:
        """Returns keys of `[model]`; raises `Unsupported` for a value that Forge's components cannot express."""
        return {}

    def write(self, model: Flat) -> Config:
        """Returns keys of the configuration; raises `Unsupported` for what it cannot express."""
        return {}

    def resolve(self, model: Flat) -> Flat:
        """Returns the values of keys of `[model]` whose value there means "derive it", such as a width of 0."""
        return {}

    def remark(self, config: Config) -> str:
        """Returns a line for whoever imports the model, about a value that is read and has no effect; or nothing."""
        return ""


@frozen(kw_only=True)
class Part:
    """A part of one of Forge's tensors, and the same numbers in a tensor of the published model."""

    ours: str
    theirs: str
    shape: Shape
    """Of the published model's tensor."""
    offsets: Shape | None = None
    """Where the part begins in our tensor, if in the published one it is a range of whole rows: those from `row` on.

    None for a part that is all of our tensor, in another order.
    """
    sizes: Shape = ()
    """The part's shape in our tensor; needed with `offsets`."""
    row: int = 0
    of_ours: Callable[[Tensor], Tensor]
    """Returns a view of our tensor: the part."""
    of_theirs: Callable[[Tensor], Tensor]
    """Returns a view of the same shape of their tensor."""
    copy: bool = False
    """Whether it repeats numbers that another part has: it may be missing, and must be equal where it is there."""
    written: bool = True
    """Whether an export has it; false for a tied head, which published files leave out."""

    def overlap(self, sizes: Shape, offsets: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Returns the part's share of a box of our tensor: where it is in the box, and where in the part.

        Args:
            sizes: of the box.
            offsets: where it begins in our tensor.

        Returns:
            Slices of both; None if they have nothing in common.
        """
        firsts = self.offsets if self.offsets is not None else (0,) * len(sizes)
        lengths = self.sizes if self.offsets is not None else [a + size for a, size in zip(offsets, sizes, strict=True)]
        starts = [max(a, b) for a, b in zip(offsets, firsts, strict=True)]
        ends = [min(a + m, b + n) for a, m, b, n in zip(offsets, sizes, firsts, lengths, strict=True)]
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return None
        inside, there = (
            tuple(slice(start - first, end - first) for start, end, first in zip(starts, ends, origin, strict=True))
            for origin in (offsets, firsts)
        )
        return inside, there


class Rule(Protocol):
    """Names of tensors on both sides."""

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns the parts of the tensor `name` of Forge; none if the rule is not about it."""


@frozen(kw_only=True)
class ArchitectureComponent(Component[None]):
    """A published architecture. Its name in a catalog is the `model_type` of its `config.json`."""

    kind = "architecture"

    name: ClassVar[str]
    """Name of the class in `transformers`, for the key `architectures`."""
    harmless: ClassVar[Collection[str]] = ()
    """Further keys of the configuration that say nothing about what the model computes."""
    training_only: ClassVar[Collection[str]] = ()
    """Patterns of keys of `[model]` that matter to training alone, and have no counterpart."""
    ignored: ClassVar[Collection[str]] = ("*rotary_emb.inv_freq",)
    """Patterns of tensors that files may hold, and that are no weights."""
    prefix: ClassVar[str] = ""
    """What all names but that of `lm_head` begin with in `transformers`, if there are files whose names lack it."""

    def fields(self) -> Sequence[Field]:
        """Returns the table of keys."""
        raise NotImplementedError

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the table of names, for a model."""
        raise NotImplementedError
