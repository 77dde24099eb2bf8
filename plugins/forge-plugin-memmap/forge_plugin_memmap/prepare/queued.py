"""All parts of `data prepare` and their join, as jobs of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from forge_core.contracts.errors import JobError
from forge_kit.tools.divided_commands import DividedCommand
from forge_plugin_memmap.manifest import PARTS, UNFINISHED
from forge_plugin_memmap.prepare.folder import finished_manifest, finished_part
from forge_plugin_memmap.prepare.join import parts_in
from forge_plugin_memmap.prepare.part_range import Part
from forge_plugin_memmap.prepare.parts import demand_no_other_work, no_documents, part_arguments, part_folder
from forge_plugin_memmap.prepare.run import Settings
from forge_plugin_memmap.prepare.tokenizer import build_tokenizer

QUEUE = "-queue"
"""What the folder of scripts and logs is called in addition to the output folder, next to which it is: files in that
one are those of a command without parts."""


def divided(settings: Settings, count: int, words: Sequence[str]) -> DividedCommand | None:
    """Returns the work that is not done yet, as a command that a cluster can queue; None if there is none.

    Args:
        settings: of the command.
        count: parts.
        words: of the command line, without options of the queue.

    Raises:
        JobError: the folder has other parts, or was begun in another way, or a tokenizer is still to be trained.
    """
    output = settings.output
    missing = _missing(settings, count)
    if missing is None:
        return None
    if missing:
        demand_no_other_work(output)
        # As the first part would, and not when a node has been waited for
        build_tokenizer(settings.tokenizer, no_documents)
    return DividedCommand(
        name=output.absolute().name,
        words=("data", "prepare", *words),
        count=count,
        missing=missing,
        folder=output.absolute().with_name(f"{output.absolute().name}{QUEUE}"),
    )


def _missing(settings: Settings, count: int) -> Sequence[int] | None:
    """The parts that are not finished; None where the folder is."""
    output, arguments, inputs = settings.output, settings.arguments(), settings.identities()
    # While a join is at work, its state is its own to remove
    if not (output / UNFINISHED).exists() and finished_manifest(output, arguments, inputs) is not None:
        # A join that died while it removed the parts does the rest when it is started again
        return () if (output / PARTS).exists() else None
    others = sorted({part.count for part in parts_in(output)} - {count})
    if others:
        fix = f"give --parts {others[0]}, or remove their folders"
        raise JobError(f"--parts {count}: {output / PARTS} has parts of {' and '.join(map(str, others))}; {fix}")
    parts = (Part(number, count) for number in range(1, count + 1))
    return [
        part.number
        for part in parts
        if finished_part(part_folder(output, part), part_arguments(arguments, part), inputs) is None
    ]
