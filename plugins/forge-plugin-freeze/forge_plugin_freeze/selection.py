"""Parameters that each stage trains, by their names in the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core import Problem
from forge_core.contracts.errors import did_you_mean
from forge_core.parallel.initialise import ties

if TYPE_CHECKING:
    from forge_core.contracts.model import Model
    from forge_plugin_freeze.freeze import Stage

SHOWN = 4
"""Names that a message lists."""


@frozen(kw_only=True)
class TrainedStages:
    """Parameters that each stage trains. Names are of the whole model: a pipeline rank has some of them."""

    stages: Sequence[Stage]
    names: Mapping[str, Sequence[str]]
    """All names of each parameter, by the name under which it is listed; several if it is tied."""
    sizes: Mapping[str, int]
    """Elements of each parameter, by the name under which it is listed."""
    trained: Sequence[frozenset[str]]
    """By stage, all names of the parameters that train in it."""

    @classmethod
    def of(cls, model: Model, stages: Sequence[Stage]) -> TrainedStages:
        """Select the parameters of the whole model; `problems_of` has found nothing."""
        names = _names(model)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        free = _free(model, names)
        trained = [frozenset(name for name in free if trains(stage, name)) for stage in stages]
        return cls(stages=stages, names=names, sizes=sizes, trained=trained)

    @property
    def largest(self) -> int:
        """Number of the stage that trains most elements, the first of several."""
        return max(range(len(self.stages)), key=self.count)

    def count(self, number: int) -> int:
        """Returns the elements that a stage trains, tied ones once."""
        return sum(size for name, size in self.sizes.items() if name in self.trained[number])

    def describe(self, number: int) -> str:
        """Returns how much a stage trains, for people."""
        count, total = self.count(number), sum(self.sizes.values())
        return f"{count:,} of {total:,} parameters ({count / total:.1%})"

    def parts(self, number: int) -> Iterator[tuple[str, frozenset[str]]]:
        """Yields the parts of the model that must change in a stage: a description, and names of parameters.

        There is one part for each pattern, split by whether the previous stage trained the parameters too: a change in
        parameters that continue to train does not show that the others have begun to train.
        """
        before = self.trained[number - 1] if number else frozenset()
        for pattern in self.stages[number].train:
            named = frozenset(name for name in self.trained[number] if fnmatchcase(name, pattern))
            for names, which in ((named - before, ""), (named & before, ", which trained before,")):
                if names:
                    yield f"{pattern!r}{which if named - before else ''}", names

    def apply(self, model: Model, number: int) -> None:
        """Let parameters of the whole model train as they do in a stage."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.trained[number])


def trains(stage: Stage, name: str) -> bool:
    """Whether a stage trains the parameter of this name."""
    return _fits(name, stage.train) and not _fits(name, stage.freeze)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _names(model: Model) -> Mapping[str, Sequence[str]]:
    # `named_parameters` lists a tied parameter under its first name alone, and patterns may match any of them
    others = ties(model)
    return {
        name: (name, *(other for other, first in others.items() if first == name))
        for name, _ in model.named_parameters()
    }


def _free(model: Model, names: Mapping[str, Sequence[str]]) -> list[str]:
    """All names of the parameters that stages may train: what the model or another plugin froze stays frozen."""
    trainable = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return [other for name in trainable for other in names[name]]


def problems_of(model: Model, stages: Sequence[Stage]) -> Iterator[Problem]:
    """Yields mistakes in the patterns of stages for a whole model; paths are relative to the plugin's table."""
    names = _names(model)
    free = _free(model, names)
    for number, stage in enumerate(stages):
        problems = [
            *_unfitting(stage, [n for all_names in names.values() for n in all_names], free),
            *_torn(stage, names),
        ]
        if not problems and not any(trains(stage, name) for name in free):
            problems = [Problem("", f"trains nothing: `freeze` takes away all that `train` names; {_some(free)} could")]
        yield from (problem.below(f"stages.{number}") for problem in problems)


def _unfitting(stage: Stage, names: Sequence[str], free: Sequence[str]) -> Iterator[Problem]:
    """Patterns that name nothing, or only what cannot train."""
    for key, patterns in (("train", stage.train), ("freeze", stage.freeze)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                hint = did_you_mean(pattern, [*names, *_globs(names)]) or f"; there are {_some(names)}"
                yield Problem(key, f"{pattern!r} fits no parameter of the model{hint}")
            elif key == "train" and not any(fnmatchcase(name, pattern) for name in free):
                yield Problem(key, f"{pattern!r} fits only parameters that the model, or another plugin, has frozen")


def _globs(names: Iterable[str]) -> set[str]:
    """Returns a pattern for each module that has parameters, `layers.*` and `layers.0.*`."""
    parts = (name.split(".") for name in names)
    return {".".join([*path[:depth], "*"]) for path in parts for depth in range(1, len(path))}


def _torn(stage: Stage, names: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    """Tied parameters of which a stage would train one name and not the other."""
    for all_names in names.values():
        chosen = [name for name in all_names if trains(stage, name)]
        if chosen and len(chosen) < len(all_names):
            others = ", ".join(name for name in all_names if name not in chosen)
            message = f"trains {', '.join(chosen)} and freezes {others}, which are one tensor (tied)"
            yield Problem("train", f"{message}; name all of them, or none")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
