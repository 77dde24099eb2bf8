"""One part of the work of `data prepare`, done alone: the ids of its documents, in order.

Which documents are held out, and where shards end, depends on all documents before. A part does not know these, so it
writes all of its documents one after the other, with the bytes of each text; `join` does the rest.

    parts/2-of-7/train-00000.bin      ids, as in a shard, with the `.ends` beside them
    parts/2-of-7/train-00000.bytes    bytes of the texts up to the end of each document
    parts/2-of-7/train-00000.origin_rows, .origin_texts    where each comes from (`origin_files`)
    parts/2-of-7/part.json            counts, digests, arguments, what was left out; written last
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from forge_core.contracts.errors import JobError
from forge_plugin_memmap.manifest import PART, PARTS, TOKENIZER, TRAIN, UNFINISHED
from forge_plugin_memmap.prepare.console import Speed, open_meter
from forge_plugin_memmap.prepare.encoding import open_pool
from forge_plugin_memmap.prepare.folder import (
    State,
    finish_part,
    finished_manifest,
    finished_part,
    open_state,
    owned,
    room_to_write,
)
from forge_plugin_memmap.prepare.inputs import read_chunks
from forge_plugin_memmap.prepare.part_range import Part
from forge_plugin_memmap.prepare.run import Settings, make_tokenizer, open_writers, write
from forge_plugin_memmap.prepare.shard_formats import FORMATS
from forge_plugin_memmap.prepare.tokenizer import build_tokenizer
from forge_plugin_memmap.prepare.writing import Written


def part_arguments(arguments: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """Returns everything that the ids of a part depend on."""
    return {**arguments, "part": str(part)}


def part_folder(output: Path, part: Part) -> Path:
    """Returns the folder of a part."""
    return output / PARTS / part.folder


def demand_no_other_work(output: Path) -> None:
    """Raises `JobError` if the output folder was begun without parts, or is being joined."""
    if (output / UNFINISHED).exists():
        raise JobError(f"{output} is at work without --part, or with --join; finish that, or give another --out")


def prepare_part(settings: Settings, part: Part, console: Console) -> tuple[Mapping[str, Any] | None, str]:
    """Do a part, or continue to.

    Returns:
        Its record, or None if the folder of all parts is finished; and the time and speed, empty if it was done before.

    Raises:
        JobError: it was begun with other arguments, the input is invalid, or the tokenizer is not made yet.
        ForgeError: the disk is full, or a worker process ended; the same command continues.
    """
    output, inputs = settings.output, settings.identities()
    folder, arguments = part_folder(output, part), part_arguments(settings.arguments(), part)
    # An array that is queued again, after its join was killed or has finished, has nothing to do, and must not stop
    # what depends on it
    if (output / UNFINISHED).exists():
        if (record := finished_part(folder, arguments, inputs)) is not None:
            return record, ""
        demand_no_other_work(output)
    if finished_manifest(output, settings.arguments(), inputs) is not None:
        return None, ""
    is_begun = (folder / UNFINISHED).exists() or (folder / PART).exists()
    # Before the folder is made, as a tokenizer that is still to be trained is refused
    built = None if is_begun else build_tokenizer(settings.tokenizer, no_documents)
    with owned(folder), room_to_write(folder):
        record = finished_part(folder, arguments, inputs)
        if record is not None:
            return record, ""
        begin, end = part.bounds(settings.inputs)
        state = open_state(folder, State(arguments, place=begin, splits={TRAIN: Written()}), inputs)
        tokenizer = make_tokenizer(folder, settings, state, console, no_documents, built)
        began, speed = time.monotonic(), Speed(state.tokens)
        with ExitStack() as stack:
            writers = open_writers(folder, settings, state, tokenizer, stack, FORMATS["forge"], is_part=True)
            meter = stack.enter_context(open_meter(console, end.passed - begin.passed, state, begin.passed))
            kept = len(settings.fields.kept)
            pool = stack.enter_context(open_pool(settings.workers, folder / TOKENIZER, settings.strict, kept))
            chunks = read_chunks(settings.inputs, settings.fields, state.place, end)
            write(pool.encode(chunks), writers, folder, state, meter, held_out_every=0)
        # Before the record: the ids would be of no single state of the inputs
        for input_ in settings.inputs[begin.input : end.input + 1]:
            input_.demand_unchanged()
        return finish_part(folder, state), f"{time.monotonic() - began:.1f} s, {speed.per_second(state):,.0f} tokens/s"


def no_documents() -> Iterable[str]:
    """The documents on which a tokenizer is trained, where it must exist already."""
    raise JobError(
        "this tokenizer is trained on all documents, of which a part has its own alone; train it first on some of "
        "them, forge-run data prepare SAMPLE --out FOLDER with this --tokenizer, and then give all parts and --join "
        "--tokenizer prepared --tokenizer.path=FOLDER"
    )
