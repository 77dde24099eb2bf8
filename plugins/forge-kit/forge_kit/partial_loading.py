"""`[checkpoint.load]`: weights of other runs from which one starts, selected by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from attrs import frozen
from torch import Size

from forge_core.checkpoint.state import evaluated_names, model_tensors
from forge_core.checkpoint.tensors import Index, load_tensors, shared_index
from forge_core.contracts.errors import SHOWN, JobError, Problem, ResumeError, did_you_mean, listed
from forge_core.engine.build import Outline, Run
from forge_core.engine.groups import Names, fits
from forge_core.job import LoadSection


def take_weights(
    checkpoints: Sequence[tuple[Path, Mapping[str, Any]]], run: Run, provenance: Mapping[str, Any]
) -> Iterator[str]:
    """Load what the tables of `[checkpoint.load]` select, and yield lines about it. Collective.

    Args:
        checkpoints: folder and manifest of the checkpoint of each table, verified.
        run: the run that starts from them.
        provenance: its own.

    Raises:
        JobError: a pattern fits nothing.
        CheckpointError: a checkpoint lacks what is selected, or has other shapes; or two tables load one tensor.
    """
    tables, folders = run.job.checkpoint.loads, [folder for folder, _ in checkpoints]
    selections = [_select(*table, folder, run.outline) for table, folder in zip(tables.items(), folders, strict=True)]
    _check_overlap(dict(zip(tables, selections, strict=True)))
    own = model_tensors(run.model)
    for (folder, manifest), selection in zip(checkpoints, selections, strict=True):
        tensors = {where: own[name] for name, where in selection.loaded.items() if name in own}
        load_tensors(folder, tensors, selection.index)
        yield f"weights from {folder}, step {manifest['step']}:"
        fates = {"loaded": list(selection.loaded), **selection.others}
        yield from (f"  {len(names)} {title}: {listed(names)}" for title, names in fates.items() if names)
        same = manifest["provenance"].get("tokenizer") == provenance.get("tokenizer")
        if not same and _has_rows_of_tokens(selection.loaded, run.outline):
            yield "  they were trained with another tokenizer: token ids mean other texts now"


def _has_rows_of_tokens(names: Iterable[str], outline: Outline) -> bool:
    """Whether any of these tensors has a row for each token; a table of positions is an embedding, too."""
    shapes = outline.tensors
    rows = {shapes[n][:1] for n, every in outline.names(shapes).items() if any(o.startswith("head.") for o in every)}
    return any(outline.roles.get(n) in ("embedding", "head") and shapes[n][:1] in rows for n in names)


@frozen
class _Selection:
    """Names of parameters and buffers by what a table of `[checkpoint.load]` makes of them."""

    index: Index
    loaded: Mapping[str, str]
    """With the name in the checkpoint."""
    others: Mapping[str, Sequence[str]]


def _select(table: str, section: LoadSection, folder: Path, outline: Outline) -> _Selection:
    index = shared_index(folder)
    # Weights as they are evaluated, where an optimizer trains others: those only serve the run that trained them.
    where = evaluated_names(index.shapes)
    stored = {name: index.shapes[full][0] for name, full in where.items()}
    names = outline.names(outline.tensors)  # of the whole model: all ranks of a pipeline select, and refuse, the same
    _check_patterns(table, section, names, stored)
    wanted = {n for n, names_ in names.items() if fits(names_, section.include) and not fits(names_, section.exclude)}
    selected, missing = ([n for n in names if n in wanted and (n in stored) is there] for there in (True, False))
    _check_shapes(table, folder, selected, outline.tensors, stored)
    if missing and section.strict:
        raise ResumeError(
            f"{folder} lacks some of what [{table}] selects: {listed(missing)}. Exclude these, or set "
            "strict = false to let them keep their initial values"
        )
    others = {
        "skipped, as include and exclude say": [name for name in names if name not in wanted],
        "not in the checkpoint, initial values kept": missing,
        "only in the checkpoint": [name for name in stored if name not in names],
    }
    return _Selection(index, {name: where[name] for name in selected}, others)


def _check_overlap(selections: Mapping[str, _Selection]) -> None:
    """Refuse weights that two tables load: which one stays would be a matter of their order."""
    for (one, first), (other, second) in combinations(selections.items(), 2):
        if both := [name for name in first.loaded if name in second.loaded]:
            raise ResumeError(f"[{one}] and [{other}] both load {listed(both)}; exclude these from one of them")


def _check_patterns(table: str, section: LoadSection, names: Names, stored: Iterable[str]) -> None:
    """`include` must name parts of the model; `exclude` may also name what only the checkpoint has."""
    own = [name for names_ in names.values() for name in names_]
    fitting = {"include": ("the model", own), "exclude": ("model or checkpoint", [*own, *stored])}
    problems = [
        Problem(f"{table}.{key}", f"{pattern!r} fits no parameter of {whose}{did_you_mean(pattern, known)}")
        for key, (whose, known) in fitting.items()
        for pattern in getattr(section, key)
        if not fits(known, [pattern])
    ]
    if problems:
        raise JobError(problems)


def _check_shapes(
    table: str, folder: Path, names: Sequence[str], own: Mapping[str, Size], stored: Mapping[str, Size]
) -> None:
    if wrong := [name for name in names if own[name] != stored[name]]:
        shapes = "; ".join(f"{n} is {list(stored[n])} there, {list(own[n])} in this model" for n in wrong[:SHOWN])
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        names_to_exclude = ", ".join(f'"{name}"' for name in wrong[:SHOWN]) + (", …" if len(wrong) > SHOWN else "")
        raise ResumeError(
            f"{folder} does not fit the model: {shapes}{more}. To train these anew, add to [{table}]: "
            f"exclude = [{names_to_exclude}]"
        )
