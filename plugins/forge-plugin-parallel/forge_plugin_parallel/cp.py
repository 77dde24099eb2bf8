"""The component `cp`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import ParallelStage
    from forge_core.job import Job


def _unmixed(model: Model) -> Iterator[str]:
    """Names of blocks of positions for which `sequence_mixers()` names no module, unless they declare to mix none."""
    mixers, modules = list(model.sequence_mixers()), dict(model.named_modules())
    first, _ = model.ends() or ((), ())
    # Blocks that `embed` runs make positions of something else (patches of images), of which every rank has all.
    further = [name for name in model.further_blocks() if not any(_within(name, module) for module in first)]
    for name in [*(f"layers.{key}" for key in model.layers), *further]:
        mixed = any(_within(mixer, name) for mixer in mixers)
        # Declared, not missing: the probe finds a block that mixes positions all the same
        if not mixed and getattr(modules.get(name), "mixes_positions", None) is not False:
            yield name


MIXING = frozenset({"window", "scale", "soft_cap", "sinks", "mask"})
"""What `ring` and `all_gather` compute in addition to plain causal attention, by the names of `mixing_of`."""


def mixing_of(mixer: Any) -> Mapping[str, Any]:
    """Returns what differs from plain causal attention in a module of `sequence_mixers()`, by name.

    The module declares it in a method `mixing()`: `window` (positions that one sees at most, itself included), `scale`
    (factor on products of queries and keys), `soft_cap` (of scores), `sinks` (a further argument of each call, (H,),
    scores without a value), `mask` (an object whose `sees(query, key)` returns where positions, counted from the start
    of their document, see each other, in addition to causality), or anything else, which only `ulysses` leaves to the
    module. Without the method, nothing differs.
    """
    declared = getattr(mixer, "mixing", None)
    return {} if declared is None else dict(declared())


def mixes_heads(mixer: Any) -> bool:
    """Whether positions are exchanged for heads around a mixer by every method; see `forge_kit.nn.head_mixers`."""
    return bool(getattr(mixer, "mixes_heads", False))


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _undeclared_problems(model: Model) -> Iterator[Problem]:
    """A problem for what mixes positions, of all that the stage leaves as it is."""
    from forge_kit.nn.position_probe import ProbeFailed, undeclared_mixer

    cls = type(model).__name__
    try:
        name = undeclared_mixer(model)
    except ProbeFailed as error:
        message = (
            f"parallel.cp: not checked whether {cls} mixes positions outside of sequence_mixers(): it does not run"
        )
        warnings.warn(f"{message} on the CPU, with a short sequence ({error})", stacklevel=2)
        return
    if name is not None:
        message = f"positions change each other in {name} of {cls}, which it does not declare, so each rank would mix"
        hint = "name it in sequence_mixers(), let it set `mixes_positions` and communicate itself (docs/parallel.md)"
        yield Problem("", f"{message} its own positions only; {hint}, or leave the stage out")


@frozen(kw_only=True)
class ContextParallel(ParallelComponent):
    """Context parallel: each sequence is split over `degree` ranks, for sequences too long for one.

    For models that define `sequence_mixers()`.
    """

    after: ClassVar[Mapping[str, str]] = {
        "pp": "only the layers that this rank keeps see split sequences",
        "float8": "it changes linear layers, whose outputs attention receives",
        "tp": "attention receives only the heads that tp leaves on this rank",
    }

    degree: int = field(validator=ge(1))
    """Ranks that share each sequence."""
    method: Literal["ring", "all_gather", "ulysses"] = "ring"
    """How attention sees the positions of other ranks. ring: keys and values are sent around while a block is computed
    (Liu et al. 2023); memory does not grow with the whole sequence. all_gather: they are gathered whole (Llama 3,
    section 3.3.2). ulysses: heads are exchanged for positions (Jacobs et al. 2023), with any kernel; `degree` divides
    the key/value heads."""

    @property
    def waits_in_blocks(self) -> str:
        """With `ring` only, which sends and receives in turns."""
        in_turns = self.method == "ring" and self.degree > 1
        return "it sends keys and values from rank to rank, which torch.compile does not trace" if in_turns else ""

    def degrees(self) -> Mapping[str, int | str]:
        """`degree` ranks with the same sequences, and different positions of them."""
        return {"cp": self.degree}

    def divided_axes(self) -> Mapping[str, Collection[str]]:
        """Positions, in the order of the entry `places`: a rank may have two chunks of a sequence."""
        return {"cp": ("positions",)}

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that a sequence divides into equal pieces: one for each rank, or two where chunks are mirrored."""
        # `ring` and `all_gather` give each rank two chunks, which balance under a causal mask
        pieces = self.degree * (1 if self.method == "ulysses" else 2)
        # Sequence parallel divides the positions of a rank once more
        split = pieces * layout.tp
        if job.train.seq_len % split:
            why = f"{pieces} pieces" if layout.tp == 1 else f"{pieces} pieces x tp {layout.tp} = {split}"
            yield Problem("degree", f"{why} do not divide train.seq_len = {job.train.seq_len}; change one of them")

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        """Refuses models that mix positions where the stage replaces nothing, and attention beyond the method."""
        if layout.cp == 1:
            return
        if not model.sequence_mixers():
            message = f"{type(model).__name__} has no sequence_mixers(), so its sequences cannot be split"
            yield Problem("", f"{message}; leave the stage out")
            return
        for name in _unmixed(model):
            message = f"{type(model).__name__}.sequence_mixers() names none in {name}"
            why = "each position would see only the positions on its own rank"
            yield Problem("", f"{message}, so {why}; name what mixes positions there, or leave the stage out")
            return  # one message for all blocks: the others differ in their number only
        yield from _undeclared_problems(model)
        if self.method != "ulysses":
            yield from self._mixing_problems(model)
        exchanged = (
            heads
            for name, heads in model.sequence_mixers().items()
            if self.method == "ulysses" or mixes_heads(model.get_submodule(name))
        )
        for heads in dict.fromkeys(exchanged):
            yield from self._heads_problems(heads, layout)

    def _mixing_problems(self, model: Model) -> Iterator[Problem]:
        attention = {
            name: mixer for name in model.sequence_mixers() if not mixes_heads(mixer := model.get_submodule(name))
        }
        unknown = {(key, name) for name, mixer in attention.items() for key in mixing_of(mixer)}
        for key, name in sorted((key, name) for key, name in unknown if key not in MIXING):
            message = f"{self.method} does not compute {key}, which {name} declares"
            yield Problem("method", f'{message}; take "ulysses", or leave the stage out')
            return  # one message for all layers

    def _heads_problems(self, heads: int, layout: Layout) -> Iterable[Problem]:
        left = heads // layout.tp
        # A remainder of the first division is a problem of tp, which reports it
        if heads % layout.tp == 0 and left % layout.cp:
            who = f"each of {layout.tp} tensor-parallel ranks has" if layout.tp > 1 else "the model has"
            message = f"{who} {left} key/value heads, which {layout.cp} ranks cannot share equally"
            if self.method == "ulysses":
                yield Problem("method", f'{message}; take "ring" or "all_gather", or another degree')
            else:  # of a mixer other than attention
                yield Problem("degree", f"{message}; take another degree")

    def build(self, context: BuildContext) -> ParallelStage:
        from forge_plugin_parallel.cp_stage import ContextParallelStage

        return ContextParallelStage(self, context)
