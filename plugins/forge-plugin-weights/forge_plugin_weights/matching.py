"""Which of a published model's tensors are which of Forge's, by the rules of an architecture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_weights.kinds import ArchitectureComponent, Filler, Flat, Part, Shape, Shapes
from forge_plugin_weights.tables import fits_any

SHOWN = 5
"""Names that an error lists."""


@frozen
class Match:
    """The parts of all tensors."""

    parts: Mapping[str, Sequence[Part]]
    """By Forge's names."""
    shapes: Shapes
    """Of Forge's tensors."""
    fillers: Sequence[Filler] = ()

    def theirs(self) -> dict[str, Shape]:
        """Returns the shapes of the published tensors that an export has, in the order of ours."""
        return {part.theirs: part.shape for parts in self.parts.values() for part in parts if part.written}

    @property
    def used(self) -> set[str]:
        """Names of the published tensors that parts come from."""
        return {part.theirs for part in self.all_parts()}

    def all_parts(self) -> Iterable[Part]:
        """Yields every part."""
        return (part for parts in self.parts.values() for part in parts)


def match_names(architecture: ArchitectureComponent, model: Flat, shapes: Shapes) -> Match:
    """Returns the published model's tensors for each of Forge's.

    Args:
        architecture: whose rules are applied.
        model: the table `[model]`, flat and complete.
        shapes: of Forge's parameters and persistent buffers.

    Raises:
        JobError: the architecture has no tensor for one of Forge's.
    """
    # Every rule is tried on every tensor, since copies come from further rules for the same one.
    rules = architecture.rules(model)
    parts = {name: [part for rule in rules for part in rule.parts(name, shapes)] for name in shapes}
    # A copy is not enough, as files may lack it.
    if lost := [name for name, own in parts.items() if not any(not part.copy for part in own)]:
        raise JobError(f"{architecture.name} has no tensor for {listed(lost)}")
    return Match(parts, shapes, architecture.fillers(model))


def check_tensors(architecture: ArchitectureComponent, match: Match, found: Shapes, folder: object) -> None:
    """Compare the tensors that a folder has with those that the model needs.

    Raises:
        JobError: some are missing, are left over, or have another shape; lists them.
    """
    wanted = {part.theirs: part for part in match.all_parts()}
    needed = [name for name, part in wanted.items() if not part.copy]  # files may lack copies
    missing = [name for name in needed if name not in found]
    unused = {*unused_tensors(architecture, match, found)}
    extra = [name for name in found if not (name in wanted or name in unused or fits_any(name, architecture.ignored))]
    reshaped = [
        f"{name} ({list(found[name])}, where config.json describes {list(part.shape)})"
        for name, part in wanted.items()
        if name in found and tuple(found[name]) != tuple(part.shape)
    ]
    # All three in one error, as together they show which model the files are of
    faults = [
        f"{title} {listed(names)}"
        for title, names in (("it lacks", missing), ("it also has", extra), ("other shapes have", reshaped))
        if names
    ]
    if faults:
        raise JobError(f"the tensors in {folder} do not match its config.json: {'; '.join(faults)}")


def unused_tensors(architecture: ArchitectureComponent, match: Match, found: Shapes) -> Sequence[str]:
    """Returns the weights in a folder that Forge computes nothing with, which an import leaves out."""
    fillers, used = {filler.theirs for filler in match.fillers}, match.used
    # A pattern may fit tensors of all layers, of which only some compute nothing
    return [name for name in found if name in fillers or (name not in used and fits_any(name, architecture.left_out))]


def listed(names: Sequence[str]) -> str:
    """Returns the first of some names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
