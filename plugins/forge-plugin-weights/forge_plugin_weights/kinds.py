"""The kind `architecture`: how a published model's configuration and tensors correspond to Forge's.

An architecture is two tables, each of which serves both directions: `fields` has the keys of `config.json` and the keys
of `[model]` that they stand for, `rules` the names of tensors. A model in Forge is known here by the keys of its table,
flat: `{"dim": 64, "attention.type": "forge-plugin-transformer/gqa", "attention.heads": 4, ...}`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
TIED = "tie_word_embeddings"
"""The key by which the head is the embedding; where a model consists of several, several of their tables have it."""
PIXELS = "preprocessor_config"
"""Key under which a configuration has the content of the file of that name, of models that see images."""
OTHER = "other."
"""What names of a larger model's tensors begin with that are not of the part."""
OF_LANGUAGE_MODELS: Mapping[str, str] = {
    r"^(?:model\.)?(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|connector)\.": rf"{OTHER}\1.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(?:language_model\.model|model\.language_model|model\.text_model)\.": "model.",
}
"""`ArchitectureComponent.renames` of a language model that is a part of a larger model."""
SHARED = ("torch_dtype", "dtype", "quantization_config", PIXELS)
"""Keys of a larger model's configuration that hold for its parts."""


def _major_version(config: Config) -> int:
    """The first number of the version of `transformers` that saved a configuration; 0 if it does not say."""
    first = str(config.get("transformers_version", "")).partition(".")[0]
    return int(first) if first.isdecimal() else 0


class Unsupported(Exception):
    """A key that has no counterpart on the other side; the message names it, and the available alternatives."""


@frozen
class InnerTable:
    """A table of a configuration that a separate architecture describes."""

    name: str
    path: str
    """What the keys of `[model]` begin with that it stands for."""
    architecture: ArchitectureComponent
    fields: Sequence[Field]
    config: Config
    """Its content, with the keys of the larger configuration that apply to it."""
    harmless: Collection[str] = ()
    """Further keys that say nothing about what the model computes."""


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

    def inner(self, config: Config) -> InnerTable | None:
        """Returns the table that it reads by another architecture's fields, if it does; raises as `read`."""
        return None

    def resolve(self, model: Flat) -> Flat:
        """Returns the values of keys of `[model]` whose value there means "derive it", such as a width of 0."""
        return {}

    def remark(self, config: Config) -> str:
        """Returns a line for whoever imports the model, about a value that is read and has no effect; or nothing."""
        return ""


@contextmanager
def reading(field: Field, config: Config) -> Iterator[None]:
    """Turn the errors of values that are not of a key's type, such as a text for a number, into `Unsupported`."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        given = ", ".join(f"{key} = {config[key]!r}" for key in field.keys if key in config)
        subject = given or " and ".join(field.keys)
        message = f"{subject} cannot be read, by itself or with the keys that it depends on"
        raise Unsupported(f"{message} ({type(error).__name__}: {error})") from error


@frozen(kw_only=True)
class Part:
    """A part of one of Forge's tensors, and the same numbers in a tensor of the published model."""

    ours: str
    theirs: str
    shape: Shape
    """The shape of the published model's tensor."""
    offsets: Shape | None = None
    """The part's beginning in our tensor, if in the published one it is a range of whole rows: those from `row` on.

    None for a part that is all of our tensor, in another order.
    """
    sizes: Shape = ()
    """The part's shape in our tensor; needed with `offsets`."""
    torn: bool = False
    """Whether it is not such a range despite its `offsets`: its numbers in a row of the published tensor lie apart."""
    row: int = 0
    of_ours: Callable[[Tensor], Tensor]
    """Returns a view of our tensor: the part."""
    of_theirs: Callable[[Tensor], Tensor]
    """Returns a view of the same shape of their tensor."""
    copy: bool = False
    """Whether it repeats numbers that another part has: it may be missing, and must be equal where it is there."""
    written: bool = True
    """Whether an export has it; false for a tied head, which published files leave out."""

    @property
    def in_rows(self) -> bool:
        """Whether the published tensor has it as a range of whole rows."""
        return self.offsets is not None and not self.torn

    def overlap(self, sizes: Shape, offsets: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Returns the part's share of a box of our tensor: where it is in the box, and where in the part.

        Args:
            sizes: of the box.
            offsets: where it begins in our tensor.

        Returns:
            Slices of both; None if they have nothing in common.
        """
        # A part in another order is all of our tensor, so that its share of a box is the box.
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


@frozen
class Filler:
    """A tensor that nothing is computed with, and that an export has only since `transformers` looks for it."""

    theirs: str
    shape: Shape
    value: float
    """Of all its numbers."""


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
    model_type: ClassVar[str] = ""
    """The `model_type` of exports, of a class that no entry point names; empty: the imported model's."""
    harmless: ClassVar[Collection[str]] = ()
    """Further keys of the configuration that say nothing about what the model computes."""
    training_only: ClassVar[Collection[str]] = ()
    """Patterns of keys of `[model]` that matter to training alone, and have no counterpart."""
    ignored: ClassVar[Collection[str]] = ("*rotary_emb.inv_freq",)
    """Patterns of tensors that files may hold, and that are no weights."""
    left_out: ClassVar[Collection[str]] = (f"{OTHER}*",)
    """Patterns of weights that files may hold, and that Forge has no use for; an import reports which it left out."""
    renames: ClassVar[Mapping[str, str]] = {}
    """Regular expressions of the names that tensors have in files of some versions, and what replaces a match. They
    are applied in turn, and the results are the names of `rules`."""
    table: ClassVar[str] = "text_config"
    """The table of a larger model's configuration that describes this one, if it is a part of it."""
    defaults: ClassVar[Config] = {}
    """Keys that such a table leaves out."""
    kept: ClassVar[Collection[str]] = ()
    """Keys that an imported model has again, though they mean nothing to Forge."""
    removable: ClassVar[Collection[str]] = ()
    """Keys of parts that `--ignore` leaves out of a model, as it does keys without a meaning."""
    unbounded: ClassVar[Collection[str]] = ()
    """Patterns of tensors of files that may hold infinite numbers, such as bounds that clip nothing."""
    seldom: ClassVar[bool] = False
    """Whether a model that is also of another architecture is exported as that one, unless it was imported as this."""
    purpose: ClassVar[Config] = {}
    """Keys of what the model is for, if it is no language model, which mean nothing to Forge."""
    plugins: ClassVar[Mapping[str, Any]] = {}
    """The table `[plugins]` of a job with an imported model, if it needs one."""

    def fields(self) -> Sequence[Field]:
        """Returns the table of keys."""
        raise NotImplementedError

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the table of names, for a model."""
        raise NotImplementedError

    def of_files(self, shapes: Shapes) -> ArchitectureComponent:
        """Returns the architecture whose rules fit files with these tensors; exports have the tensors of this one."""
        return self

    def fillers(self, model: Flat) -> Sequence[Filler]:
        """Returns the tensors that `transformers` expects, and computes nothing with."""
        return ()

    def part_of(self, config: Config) -> Config:
        """Returns this model's configuration from its own, or from the configuration of a larger one it is part of."""
        inner = config.get(self.table)
        if not isinstance(inner, Mapping):
            return config  # not a part of a larger model
        shared = {key: config[key] for key in SHARED if key in config}
        # Version 4 of `transformers` goes by the inner table. Version 5 goes by the outer one, which it always writes,
        # and leaves a default of the inner one there that may contradict it.
        tables = (config,) if TIED in config and _major_version(config) >= 5 else (config, inner)
        tied = [each[TIED] for each in tables if TIED in each]
        return {**self.defaults, **shared, **inner, **({TIED: any(tied)} if tied else {})}

    def repeated(self, config: Config) -> Config:
        """Returns keys that an export has for llama.cpp or vLLM, and that repeat what others have.

        Args:
            config: the keys that describe the model.
        """
        return {}

    def start_tables(self, model: Mapping[str, Any], load: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the tables by which a job starts from an imported model.

        Args:
            model: its table `[model]`.
            load: the table `[checkpoint.load]` for all of it.
        """
        return {"model": model, "checkpoint": {"load": load}}
