"""From the parts of `data prepare --part` to the folder that one command would have written, to the byte.

The documents of the parts take the place of those that workers encode. All that depends on the documents before, which
are held out and where shards end, is decided by the code of the command without parts, and so are saving and
continuing. Only the numbers of lines are missing, in a file within which a part begins: they are added here.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from attrs import frozen
from rich.console import Console

from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.cache import file_digest
from forge_kit.data.token_file import ENDS, HEADER, TOKENS
from forge_plugin_memmap.manifest import PARTS, TRAIN, UNFINISHED
from forge_plugin_memmap.prepare.console import Speed, open_meter
from forge_plugin_memmap.prepare.documents import Dropped
from forge_plugin_memmap.prepare.encoding import Block, Encoded, id_dtype
from forge_plugin_memmap.prepare.folder import (
    State,
    finish,
    finished_manifest,
    finished_part,
    open_state,
    owned,
    room_to_write,
)
from forge_plugin_memmap.prepare.inputs import Chunk, InputPosition
from forge_plugin_memmap.prepare.origin_files import ROWS, TEXTS, Origins, read_origins
from forge_plugin_memmap.prepare.part_range import Part
from forge_plugin_memmap.prepare.parts import no_documents, part_arguments, part_folder
from forge_plugin_memmap.prepare.run import Settings, demand_documents, make_tokenizer, open_writers, write
from forge_plugin_memmap.prepare.shard_formats import FORMATS
from forge_plugin_memmap.prepare.writing import TEXT_BYTES

TOKENS_AT_ONCE = 1 << 22
"""Tokens that are read from a part at a time. The result does not depend on it."""


@frozen
class FinishedPart:
    """A part that is done."""

    part: Part
    folder: Path
    record: Mapping[str, Any]

    @property
    def command(self) -> str:
        """How it is named in messages."""
        return f"--part {self.part}"

    @property
    def shards(self) -> Sequence[str]:
        """Names of its files of ids, in order."""
        shards: list[str] = self.record["splits"][TRAIN]["shards"]
        return shards

    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """Size and SHA-256 of all its files, by name."""
        files: dict[str, Mapping[str, Any]] = self.record["splits"][TRAIN]["files"]
        return files

    def fault(self, name: str) -> str:
        """Returns how a file differs from what the part has written; empty if it does not. Reads the file."""
        path, expected = self.folder / name, self.files[name]
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            return "is missing"
        if size != expected["size"]:
            return f"has {size} bytes, but {expected['size']} were written"
        return "" if file_digest(path) == expected["sha256"] else "is damaged: its SHA-256 is not the one of its record"


def join(settings: Settings, console: Console) -> tuple[Mapping[str, Any], str]:
    """Make the folder of all parts, or continue to, and remove them.

    Returns:
        The manifest, and the time and speed, empty if the folder was finished before.

    Raises:
        JobError: parts are missing, damaged, or of other arguments or inputs; names all of them.
        ForgeError: the disk is full; the same command continues.
    """
    output, arguments, inputs = settings.output, settings.arguments(), settings.identities()
    with owned(output), room_to_write(output):
        manifest = finished_manifest(output, arguments, inputs)
        if manifest is not None:
            # A process may have died before it removed all
            _remove(output, [part_folder(output, part) for part in parts_in(output)])
            return manifest, ""
        parts = _finished_parts(settings, arguments, inputs)
        _demand_whole(parts, settings.workers)
        state = open_state(output, State(arguments, source="parts"), inputs)
        tokenizer = make_tokenizer(output, settings, state, console, no_documents)
        began, speed = time.monotonic(), Speed(state.tokens)
        _demand_tokenizer(parts, state)
        with ExitStack() as stack:
            writers = open_writers(output, settings, state, tokenizer, stack, FORMATS[settings.format])
            total = sum(_bytes_of(part) for part in parts)
            meter = stack.enter_context(open_meter(console, total, state))
            kept = len(settings.fields.kept)
            chunks = _read(parts, state.place, np.dtype(id_dtype(tokenizer.vocab_size)), kept)
            write(chunks, writers, output, state, meter, settings.held_out_every)
        demand_documents(settings, state)
        manifest = finish(output, state)
        _remove(output, [part.folder for part in parts])
        return manifest, f"{time.monotonic() - began:.1f} s, {speed.per_second(state):,.0f} tokens/s"


def _remove(output: Path, folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)
    # Something else in it is not ours
    with suppress(OSError):
        (output / PARTS).rmdir()


# --- which parts there are ---------------------------------------------------------------------------------------


def parts_in(output: Path) -> list[Part]:
    """Returns the parts of which there are folders, in order."""
    parts = (Part.of_folder(path.name) for path in (output / PARTS).glob("*"))
    return sorted((part for part in parts if part), key=lambda part: (part.count, part.number))


def _finished_parts(
    settings: Settings, arguments: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]]
) -> list[FinishedPart]:
    """Returns all parts, in order; a `JobError` names each that is missing, unfinished or of other arguments."""
    output = settings.output
    found = parts_in(output)
    counts = sorted({part.count for part in found})
    if not counts:
        raise JobError(f"--join: {output / PARTS} has no parts; run the command with --part 1/N to N/N first")
    if len(counts) > 1:
        several = " and ".join(map(str, counts))
        raise JobError(f"--join: {output / PARTS} has parts of {several}; remove the folders of all but one division")
    problems, parts = list[Problem](), list[FinishedPart]()
    for part in (Part(number, counts[0]) for number in range(1, counts[0] + 1)):
        folder = part_folder(output, part)
        try:
            record = finished_part(folder, part_arguments(arguments, part), inputs)
        except JobError as error:
            problems += error.problems
            continue
        if record is None:
            state = "is not finished" if (folder / UNFINISHED).exists() else "is missing"
            problems.append(Problem("", f"--join: part {part} {state}; run the command with --part {part}"))
        else:
            parts.append(FinishedPart(part, folder, record))
    if problems:
        raise JobError(problems)
    return parts


def _demand_whole(parts: Sequence[FinishedPart], threads: int) -> None:
    """Raises `JobError` with every file of the parts that is missing or damaged. Reads all of them."""
    files = [(part, name) for part in parts for name in part.files]
    # Threads, as SHA-256 releases Python's lock
    with ThreadPoolExecutor(threads) as pool:
        faults = list(pool.map(lambda file: file[0].fault(file[1]), files))
    problems = [
        Problem("", f"{part.folder / name} {fault}; remove {part.folder} and run the command with {part.command} again")
        for (part, name), fault in zip(files, faults, strict=True)
        if fault
    ]
    if problems:
        raise JobError(problems)


def _demand_tokenizer(parts: Sequence[FinishedPart], state: State) -> None:
    """Raises `JobError` if a part has ids of another tokenizer, as one that was made by another version."""
    problems = [
        Problem(
            "",
            f"part {part.part} has another tokenizer, though of the same keys; remove {part.folder} and run "
            f"the command with {part.command} again",
        )
        for part in parts
        if part.record["tokenizer"] != state.tokenizer
    ]
    if problems:
        raise JobError(problems)


# --- their documents ---------------------------------------------------------------------------------------------


def _read(
    parts: Sequence[FinishedPart], place: InputPosition, dtype: np.dtype, kept: int
) -> Iterator[tuple[Chunk, Encoded]]:
    """Yields the documents of all parts from a place on: the part, the shard in it, and the tokens before."""
    bases = list(_line_bases(parts))
    passed = sum(_bytes_of(part) for part in parts[: place.input])
    for number, part in enumerate(parts[place.input :], place.input):
        at = place.at if number == place.input else {}
        for shard, name in enumerate(part.shards):
            # Shards before the place are passed over
            start = at["token"] if at and shard == at["shard"] else 0
            blocks = () if at and shard < at["shard"] else _blocks(part.folder / name, start, dtype, kept)
            for stop, block in blocks:
                _add_lines(block.origins, bases[number])
                then = InputPosition(number, {"shard": shard, "token": stop}, passed + stop * dtype.itemsize)
                yield Chunk((), then), Encoded(block, Dropped())
            passed += part.files[name]["size"] - HEADER.size
        # After its documents: with the place behind this part, so that it is counted once
        nothing = Block(np.empty(0, dtype), np.empty(0, np.int64), np.zeros(1, np.int64), Origins.none(kept))
        then = InputPosition(number + 1, {}, passed)
        yield Chunk((), then), Encoded(nothing, _dropped(part, bases[number].lines))


def _blocks(path: Path, start: int, dtype: np.dtype, kept: int) -> Iterator[tuple[int, Block]]:
    """Yields the ids of a shard of a part from a token on, each block with the token at which it ends."""
    ends = np.fromfile(path.with_suffix(ENDS), "<i8")
    texts = np.diff(np.fromfile(path.with_suffix(TEXT_BYTES), "<i8"), prepend=0)
    total = int(ends[-1])
    with path.open("rb") as file:
        file.seek(HEADER.size + start * dtype.itemsize)
        while start < total:
            stop = min(start + TOKENS_AT_ONCE, total)
            first, last = np.searchsorted(ends, [start, stop], side="right")
            origins = read_origins(path.with_suffix(ROWS), path.with_suffix(TEXTS), int(first), int(last), kept)
            ids, sizes = np.fromfile(file, dtype, stop - start), np.append(texts[first:last], 0)
            # A document counts where it ends, and all of its bytes with it
            yield stop, Block(ids, ends[first:last] - start, sizes, origins)
            start = stop


def _bytes_of(part: FinishedPart) -> int:
    return sum(described["size"] - HEADER.size for name, described in part.files.items() if name.endswith(TOKENS))


class _Base(NamedTuple):
    """What lies before a part in the file in which it begins."""

    input: int
    lines: int


def _line_bases(parts: Sequence[FinishedPart]) -> Iterator[_Base]:
    """Yields for each part the lines of its first file that lie before it."""
    number = lines = 0
    for part in parts:
        yield _Base(number, lines)
        number, at = part.record["place"]["input"], part.record["place"]["at"]
        # Where it ended: the number of the next line, which it has counted from where it began in this file, or from
        # the file's beginning. Without a line it has not ended within JSON lines.
        lines = at.get("line", 1) - 1 + (lines if "after" in at else 0)


def _add_lines(origins: Origins, base: _Base) -> None:
    """Count the lines of a part from the beginning of their file, in place."""
    if base.lines:
        origins.lines[origins.inputs == base.input] += base.lines


def _dropped(part: FinishedPart, lines: int) -> Dropped:
    """Returns what a part has left out, with the numbers of lines in their files."""
    dropped = Dropped.of(part.record["dropped"])
    for reason, examples in dropped.examples.items():
        dropped.examples[reason] = [each.numbered(lines) for each in examples]
    return dropped
