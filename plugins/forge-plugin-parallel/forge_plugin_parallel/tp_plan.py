"""Reads and checks the tensor-parallel plan that a model declares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from forge_core.contracts.errors import Problem
from forge_core.contracts.model import Model
from forge_plugin_parallel.tp_ways import AT_REST, WAYS, Way

NUMBER = re.compile(r"\d+")


def ways_of(model: Model) -> dict[str, Way | str]:
    """Returns the way of each module that the model's plan names; the first pattern that matches wins.

    An unknown way stays the string of the plan, for `plan_problems` to report.
    """
    plan = model.tensor_parallel_plan()
    fits = {
        name: next((way for pattern, way in plan.items() if fnmatchcase(name, pattern)), None)
        for name, _ in model.named_modules()
    }
    return {name: WAYS.get(way, way) if isinstance(way, str) else way for name, way in fits.items() if way is not None}


def plan_problems(model: Model, ranks: int) -> Iterator[Problem]:
    """Yields why `ranks` ranks cannot share a model; one problem for parameters whose names differ in numbers only."""
    if ranks == 1:
        return
    kind = type(model).__name__
    if not model.tensor_parallel_plan():
        message = f"{kind} has no tensor_parallel_plan(), so it cannot be split"
        yield Problem("", f"{message}; leave the stage out, or add a plan to the model")
        return
    named = ways_of(model)
    ways = {name: way for name, way in named.items() if isinstance(way, Way)}
    if unknown := {way if isinstance(way, str) else repr(way) for way in named.values() if not isinstance(way, Way)}:
        yield Problem("", f"the plan of {kind} has {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    yield from _method_problems(model, ways)
    problems: dict[str, Problem] = {}
    for name, parameter in model.named_parameters():
        module, _, key = name.rpartition(".")
        if module not in named:
            problem = Problem("", f"the plan of {kind} does not name {module!r}, which has parameters")
            problems.setdefault(NUMBER.sub("*", module), problem)
        # An unknown way, which is reported above
        elif module not in ways:
            continue
        elif key == "bias" and not ways[module].bias:
            message = f"the plan of {kind} has {ways[module].name} for {module!r}, whose bias each rank would add"
            problems.setdefault(NUMBER.sub("*", name), Problem("", f"{message}; take row, or leave the bias out"))
        elif message := _size_message(name, parameter.shape, ways[module].split.get(key), ranks):
            problems.setdefault(NUMBER.sub("*", name), Problem("degree", message))
    yield from problems.values()
    yield from _pair_problems(kind, ways)


def _method_problems(model: Model, ways: Mapping[str, Way]) -> Iterator[Problem]:
    """Yields modules without the method that their way extends; one problem for names alike."""
    problems: dict[str, Problem] = {}
    for name, way in ways.items():
        module = model.get_submodule(name)
        if way.method and not hasattr(module, way.method):
            message = f"the plan of {type(model).__name__} has {way.name} for {name!r}, and {type(module).__name__} has"
            hint = f"no {way.method}, which that way needs; give it one, or take another way"
            problems.setdefault(NUMBER.sub("*", name), Problem("", f"{message} {hint}"))
    yield from problems.values()


def _pair_problems(kind: str, ways: Mapping[str, Way]) -> Iterator[Problem]:
    """Yields modules whose inputs or gradients would be wrong where they are; one problem for names alike.

    A module that computes a part needs all positions (with sequence parallel), and its input's gradients summed over
    the ranks: the `whole_input` module around it does both.
    """
    holders = {name for name, way in ways.items() if way.holder}
    problems: dict[str, Problem] = {}
    for name, way in ways.items():
        # The empty name is the model itself, which is around every module
        holder = next((h for h in holders if name.startswith(f"{h}.") or (name == h) or not h), None)
        if way.inside and holder is None:
            message = f"the plan of {kind} has {way.name} for {name!r}, and whole_input for no module around it"
            hint = "name the module that calls it whole_input"
        elif way.partial == AT_REST and not way.inside and holder is not None:
            message = f"the plan of {kind} has {way.name} for {name!r}, inside {holder!r}, which has all positions"
            hint = "take replicate"
        else:
            continue
        problems.setdefault(NUMBER.sub("*", name), Problem("", f"{message}; {hint}"))
    yield from problems.values()


def _size_message(name: str, shape: Sequence[int], dimension: int | None, ranks: int) -> str:
    if dimension is None or shape[dimension] % ranks == 0:
        return ""
    # The last dimension of a weight is its inputs, one column each
    across = dimension % len(shape) == len(shape) - 1
    message = f"{name} has {shape[dimension]} {'columns' if across else 'rows'}"
    return f"{message}, which {ranks} ranks cannot share equally; change one of them"
