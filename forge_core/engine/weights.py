"""Starting from the weights of another run: `[checkpoint.load]`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from attrs import frozen
from torch import Size

from forge_core.checkpoint.state import evaluated_names, model_tensors
from forge_core.checkpoint.tensors import load_tensors, shared_index
from forge_core.contracts.errors import CheckpointError, JobError, Problem, did_you_mean
from forge_core.contracts.model import Model
from forge_core.engine.model_facts import Outline
from forge_core.job import LoadSection

TABLE = "checkpoint.load"
SHOWN = 8
"""Names that are listed of each group; the rest are counted."""

Names = Mapping[str, Sequence[str]]
"""Every tensor of a model with all the names it goes by: a tied one has several, and a pattern may fit any."""


@frozen(kw_only=True)
class Selection:
    """Names of parameters and buffers, by what becomes of them."""

    loaded: Sequence[str]
    skipped: Sequence[str]
    """Left out by `include` or `exclude`."""
    missing: Sequence[str]
    """Selected, but not in the checkpoint: they keep their initial values."""
    unused: Sequence[str]
    """In the checkpoint, but not in the model."""

    def __str__(self) -> str:
        groups = (
            ("loaded", self.loaded),
            ("skipped, as include and exclude say", self.skipped),
            ("not in the checkpoint, initial values kept", self.missing),
            ("only in the checkpoint", self.unused),
        )
        return "\n".join(f"  {len(names)} {what}: {_listed(names)}" for what, names in groups if names)


def load_weights(folder: Path, section: LoadSection, model: Model, outline: Outline) -> Selection:
    """Load the selected parameters and buffers of a checkpoint into a freshly built model. Collective.

    Args:
        model: what this rank has of it.
        outline: of the whole model, so that every rank selects the same.

    Raises:
        JobError: a pattern fits no name.
        CheckpointError: a selected tensor has another shape there, or is missing although `strict`.
    """
    index = shared_index(folder)
    entries = index.shapes
    where = evaluated_names(entries)
    stored = {name: entries[full][0] for name, full in where.items()}
    names = _names(outline.tensors, outline.ties)
    _check_patterns(section, names, stored)
    selection = select(section, names, stored)
    _check_shapes(folder, selection.loaded, outline.tensors, stored)
    if selection.missing and section.strict:
        raise CheckpointError(
            f"{folder} lacks some of what [{TABLE}] selects: {_listed(selection.missing)}. Exclude these, or set "
            "strict = false to let them keep their initial values"
        )
    own = model_tensors(model)
    load_tensors(folder, {where[name]: own[name] for name in selection.loaded if name in own}, index)
    return selection


def select(section: LoadSection, names: Names, stored: Collection[str]) -> Selection:
    """Match `include` and `exclude` against the tensors of a model and the names in a checkpoint."""
    wanted = [n for n, names_ in names.items() if _fits(names_, section.include) and not _fits(names_, section.exclude)]
    return Selection(
        loaded=[name for name in wanted if name in stored],
        skipped=[name for name in names if name not in set(wanted)],
        missing=[name for name in wanted if name not in stored],
        unused=[name for name in stored if name not in names],
    )


def _names(own: Iterable[str], tied: Mapping[str, str]) -> Names:
    return {name: (name, *(other for other, first in tied.items() if first == name)) for name in own}


def _check_patterns(section: LoadSection, names: Names, stored: Iterable[str]) -> None:
    """`include` must name parts of the model; `exclude` may also name what only the checkpoint has."""
    own = [name for names_ in names.values() for name in names_]
    fitting = {"include": ("the model", own), "exclude": ("model or checkpoint", [*own, *stored])}
    problems = [
        Problem(f"{TABLE}.{key}", f"{pattern!r} fits no parameter of {whose}{did_you_mean(pattern, known)}")
        for key, (whose, known) in fitting.items()
        for pattern in getattr(section, key)
        if not _fits(known, [pattern])
    ]
    if problems:
        raise JobError(problems)


def _check_shapes(folder: Path, names: Sequence[str], own: Mapping[str, Size], stored: Mapping[str, Size]) -> None:
    wrong = [name for name in names if own[name] != stored[name]]
    if wrong:
        shapes = "; ".join(f"{n} is {list(stored[n])} there, {list(own[n])} in this model" for n in wrong[:SHOWN])
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        fix = ", ".join(f'"{name}"' for name in wrong[:SHOWN]) + (", …" if len(wrong) > SHOWN else "")
        raise CheckpointError(
            f"{folder} does not fit the model: {shapes}{more}. To train these anew, add to [{TABLE}]: exclude = [{fix}]"
        )


def _fits(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
