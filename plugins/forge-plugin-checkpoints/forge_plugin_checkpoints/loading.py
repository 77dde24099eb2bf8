"""Chooses the tensors of a checkpoint that a table of `[checkpoint.load]` names, and loads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import Size

from forge_core.checkpoint.state import MODEL, model_tensors
from forge_core.checkpoint.storage import manifest_digest
from forge_core.checkpoint.tensors import load_tensors, shared_index
from forge_core.contracts.errors import SHOWN, JobError, Problem, ResumeError, did_you_mean, listed
from forge_core.contracts.runtime import SpreadStorage
from forge_kit.tools.checkpoints import evaluated_names
from forge_plugin_checkpoints.model_settings import compare_settings, refuse
from forge_plugin_checkpoints.parts import Parts, fits

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model, Outline


@frozen
class NameSelection:
    """Names of parameters and buffers by what a table makes of them."""

    loaded: Mapping[str, str]
    """With the name in the checkpoint."""
    others: Mapping[str, Sequence[str]]
    """By the reason why they are not loaded."""


def load(
    parts: Parts,
    table: str,
    folder: Path,
    manifest: Mapping[str, Any],
    context: BuildContext,
    model: Model,
    outline: Outline,
) -> tuple[Collection[str], Iterable[str]]:
    """Load what `parts`, the table at the path `table`, names of the checkpoint in `folder`; see `LoadComponent.load`.

    Raises:
        JobError: a pattern fits nothing.
        ResumeError: the checkpoint lacks something, or has it in another shape.
    """
    index = shared_index(folder)
    # Weights as they are evaluated, where an optimizer trains others: those only serve the run that trained them.
    where = evaluated_names(index.shapes)
    stored = {name: index.shapes[full][0] for name, full in where.items()}
    selection = select(parts, table, folder, where, stored, outline, model.begins_here)
    settings = compare_settings(
        manifest["job"], context.job, selection.loaded, parts.accept_changes, outline.tensors, stored
    )
    refuse(table, folder, settings.refused)
    own = model_tensors(model)
    load_tensors(folder, {full: own[name] for name, full in selection.loaded.items() if name in own}, index)
    based = {MODEL + name: full for name, full in selection.loaded.items() if name in model.unchanged}
    must_stay = False
    # No base in a bucket or in the memory of machines: its folder is a cache, which a later process may not find
    if based and folder.absolute() not in SpreadStorage.opened:
        # Of several tables, the first one with such tensors: a checkpoint has one base, and holds all else itself
        must_stay = model.base is None
        itself = {"path": str(folder.resolve()), "digest": manifest_digest(folder), "tensors": based}
        model.base = model.base or itself
    changed = [f"  accepted: {change}" for change in settings.accepted]
    changed += [f"  trained with another setting: {change}" for change in settings.others]
    if must_stay:
        changed.append(f"  keep {folder}: {len(based)} tensors that never change are not saved again")
    return selection.loaded, [*_describe(selection, folder, manifest, context, outline), *changed]


def select(
    parts: Parts,
    table: str,
    folder: Path,
    where: Mapping[str, str],
    stored: Mapping[str, Size],
    outline: Outline,
    begins_here: Collection[str] = (),
) -> NameSelection:
    """What to load: `where` has the name in the checkpoint of each parameter and buffer, and `stored` its shape.

    The checkpoint may lack those in `begins_here`.
    """
    names = outline.names(outline.tensors)  # of the whole model: all ranks of a pipeline select, and refuse, the same
    _check_patterns(parts, table, names, stored)
    wanted = {name for name, every in names.items() if parts.selects(every)}
    selected, missing = ([n for n in names if n in wanted and (n in stored) is there] for there in (True, False))
    _check_shapes(table, folder, selected, outline.tensors, stored)
    new = [name for name in missing if name in begins_here]
    if (lacking := [name for name in missing if name not in new]) and parts.strict:
        raise ResumeError(
            f"{folder} lacks some of what [{table}] selects: {listed(lacking)}. Exclude these, or set "
            "strict = false to let them keep their initial values"
        )
    _check_ties(parts, table, folder, {name: names[name] for name in selected}, stored)
    others = {
        "skipped, as include and exclude say": [name for name in names if name not in wanted],
        "new in this model": new,
        "not in the checkpoint, initial values kept": lacking,
        "only in the checkpoint": [name for name in stored if name not in names],
    }
    return NameSelection({name: where[name] for name in selected}, others)


def _describe(
    selection: NameSelection, folder: Path, manifest: Mapping[str, Any], context: BuildContext, outline: Outline
) -> Iterator[str]:
    yield f"weights from {folder}, step {manifest['step']}:"
    fates = {"loaded": list(selection.loaded), **selection.others}
    yield from (f"  {len(names)} {title}: {listed(names)}" for title, names in fates.items() if names)
    tokenizer = None if context.tokenizer is None else context.tokenizer.fingerprint()
    if manifest["provenance"].get("tokenizer") != tokenizer and _has_rows_of_tokens(selection.loaded, outline):
        yield "  they were trained with another tokenizer: token ids mean other texts now"


def _has_rows_of_tokens(names: Iterable[str], outline: Outline) -> bool:
    """Whether any of these tensors has a row for each token; a table of positions is an embedding, too."""
    shapes = outline.tensors
    rows = {shapes[n][:1] for n, every in outline.names(shapes).items() if any(o.startswith("head.") for o in every)}
    return any(outline.roles.get(n) in ("embedding", "head") and shapes[n][:1] in rows for n in names)


def _check_patterns(parts: Parts, table: str, names: Mapping[str, Sequence[str]], stored: Iterable[str]) -> None:
    """`include` must name parts of the model; `exclude` may also name what only the checkpoint has."""
    own = [name for every in names.values() for name in every]
    fitting = {"include": ("the model", own), "exclude": ("model or checkpoint", [*own, *stored])}
    problems = [
        Problem(f"{table}.{key}", f"{pattern!r} fits no parameter of {whose}{did_you_mean(pattern, known)}")
        for key, (whose, known) in fitting.items()
        for pattern in getattr(parts, key)
        if not fits(known, [pattern])
    ]
    if problems:
        raise JobError(problems)


def _check_ties(
    parts: Parts, table: str, folder: Path, names: Mapping[str, Sequence[str]], stored: Collection[str]
) -> None:
    """Refuse two tensors of the checkpoint for one of the model, of which one would be lost."""
    lost = {other: name for name, every in names.items() for other in every if other != name and other in stored}
    if lost and parts.strict:
        pairs = listed([f"{other} (tied to {name})" for other, name in lost.items()])
        raise ResumeError(
            f"{folder} has weights that would be lost, as this model ties them to others: {pairs}. Untie them in "
            f"[model], or set strict = false in [{table}] to leave them out"
        )


def _check_shapes(
    table: str, folder: Path, names: Sequence[str], own: Mapping[str, Size], stored: Mapping[str, Size]
) -> None:
    if wrong := [name for name in names if own[name] != stored[name]]:
        shapes = "; ".join(f"{n} is {list(stored[n])} there, {list(own[n])} in this model" for n in wrong[:SHOWN])
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        names_to_exclude = ", ".join(f'"{name}"' for name in wrong[:SHOWN]) + (", …" if len(wrong) > SHOWN else "")
        raise ResumeError(
            f"{folder} does not fit the model: {shapes}{more}. To train these from scratch, add to [{table}]: "
            f"exclude = [{names_to_exclude}]"
        )
