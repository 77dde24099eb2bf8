"""The work of `data prepare`, from arguments to a finished folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from rich.console import Console

from forge_core.config.load import to_toml
from forge_core.contracts.components import TokenizerComponent
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.data.cache import digest_of
from forge_plugin_memmap.manifest import HELD_OUT, TOKENIZER, TRAIN
from forge_plugin_memmap.prepare.console import Meter, Speed, open_meter
from forge_plugin_memmap.prepare.documents import Drop, Fields
from forge_plugin_memmap.prepare.encoding import Block, Encoded, open_pool, refuse
from forge_plugin_memmap.prepare.folder import (
    State,
    finish,
    finished_manifest,
    open_state,
    owned,
    room_to_write,
    save_state,
)
from forge_plugin_memmap.prepare.inputs import Chunk, Input, InputPosition, end_of, read_chunks
from forge_plugin_memmap.prepare.origin_files import OriginWriter
from forge_plugin_memmap.prepare.part_range import Part
from forge_plugin_memmap.prepare.shard_formats import FORMATS, ShardFormat
from forge_plugin_memmap.prepare.tokenizer import build_tokenizer, keep_tokenizer
from forge_plugin_memmap.prepare.writing import SplitWriter
from forge_plugin_memmap.tokenizer_folder import KeptTokenizer, load_kept

SAVE_EVERY_S = 5.0
"""Seconds of work that are lost at most when the process is killed."""


@frozen(kw_only=True)
class Settings:
    """The data to prepare, and how."""

    inputs: Sequence[Input]
    output: Path
    tokenizer: TokenizerComponent
    fields: Fields
    shard_tokens: int
    held_out_every: int
    strict: bool
    workers: int
    format: str = "forge"
    """One of `FORMATS`."""
    part: Part | None = None
    """Do this part of the work alone."""
    join: bool = False
    """Make the folder of the parts that were done."""

    def identities(self) -> list[dict[str, Any]]:
        """Identities of the inputs, as JSON."""
        return [input_.identity() for input_ in self.inputs]

    def arguments(self) -> dict[str, Any]:
        """Everything that the result depends on, as JSON."""
        return {
            "inputs": {
                "files": len(self.inputs),
                "bytes": sum(input_.size for input_ in self.inputs),
                "sha256": digest_of(self.identities()),
            },
            "tokenizer": to_toml(self.tokenizer, Catalog.installed()),
            "field": self.fields.text,
            "keep": list(self.fields.kept),
            "shard_tokens": self.shard_tokens,
            "held_out_every": self.held_out_every,
            "errors": "strict" if self.strict else "skip",
            "format": self.format,
        }


def prepare(settings: Settings, console: Console) -> tuple[Mapping[str, Any], str]:
    """Write the shards, or continue to.

    Returns:
        The manifest, and the time and speed, empty if the folder was finished before.

    Raises:
        JobError: the folder was made with other arguments, or the input is invalid.
        ForgeError: the disk is full, or a worker process ended; the same command continues.
    """
    output, arguments, inputs = settings.output, settings.arguments(), settings.identities()
    # The lock comes first: without it, another process may change the files that are read here
    with owned(output), room_to_write(output):
        manifest = finished_manifest(output, arguments, inputs)
        if manifest is not None:
            return manifest, ""
        state = open_state(output, State(arguments), inputs)
        tokenizer = make_tokenizer(output, settings, state, console, _training_texts(settings))
        began, speed = time.monotonic(), Speed(state.tokens)
        _encode(settings, state, tokenizer, console)
        # Before the manifest: the shards would be of no single state of the inputs.
        for input_ in settings.inputs:
            input_.demand_unchanged()
        demand_documents(settings, state)
        return finish(output, state), f"{time.monotonic() - began:.1f} s, {speed.per_second(state):,.0f} tokens/s"


def demand_documents(settings: Settings, state: State) -> None:
    """Raises `JobError` if there was no document at all."""
    if not state.tokens:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in state.dropped.counts.items())
        raise JobError(f"there is no document in {len(settings.inputs)} files ({reasons})")


def make_tokenizer(
    output: Path,
    settings: Settings,
    state: State,
    console: Console,
    documents: Callable[[], Iterable[str]],
    built: KeptTokenizer | None = None,
) -> KeptTokenizer:
    """Returns the tokenizer in the output folder, or else the one that was `built`, or may be trained on documents."""
    folder = output / TOKENIZER
    if state.tokenizer is None:
        console.print("making the tokenizer", highlight=False)
        tokenizer = keep_tokenizer(output, built or build_tokenizer(settings.tokenizer, documents))
        # Saved before anything is encoded: a process that continues must not train another one.
        state.tokenizer = _describe(tokenizer)
        save_state(output, state)
        return tokenizer
    console.print(f"continuing after {state.tokens:,} tokens", highlight=False)
    tokenizer = load_kept(folder)
    if _describe(tokenizer) != state.tokenizer:
        raise JobError(f"{folder} has changed since it was made; remove {output} and start again")
    return tokenizer


def _describe(tokenizer: KeptTokenizer) -> dict[str, Any]:
    """Returns the facts that readers of the shards need."""
    return {
        "fingerprint": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
    }


def _training_texts(settings: Settings) -> Callable[[], Iterable[str]]:
    """Returns a function that yields the texts that are not held out, very long ones in pieces.

    A tokenizer trained on the held-out documents would flatter the evaluation.
    """

    def texts() -> Iterator[str]:
        number = 0
        for chunk in read_chunks(settings.inputs, settings.fields, InputPosition()):
            for document in (document for _, item in chunk.items for document in item.documents()):
                if isinstance(document, Drop):
                    refuse(document, settings.strict)
                    continue
                if not _is_held_out(number, settings.held_out_every):
                    yield document.text
                # Counted where a document ends, as `split_block` counts
                number += document.is_last

    return texts


def _encode(settings: Settings, state: State, tokenizer: KeptTokenizer, console: Console) -> None:
    """Encode from the state's position to the end of the inputs."""
    chunks = read_chunks(settings.inputs, settings.fields, state.place)
    with ExitStack() as stack:
        writers = open_writers(settings.output, settings, state, tokenizer, stack, FORMATS[settings.format])
        meter = stack.enter_context(open_meter(console, end_of(settings.inputs).passed, state))
        kept = len(settings.fields.kept)
        pool = stack.enter_context(open_pool(settings.workers, settings.output / TOKENIZER, settings.strict, kept))
        write(pool.encode(chunks), writers, settings.output, state, meter, settings.held_out_every)


def open_writers(
    output: Path,
    settings: Settings,
    state: State,
    tokenizer: KeptTokenizer,
    stack: ExitStack,
    format: ShardFormat,
    is_part: bool = False,
) -> dict[str, SplitWriter]:
    """Returns a writer for each split of the state, which the `stack` closes; the last two as of `SplitWriter`."""
    sizes = tokenizer.vocab_size, tokenizer.end_of_text, settings.shard_tokens
    origins = OriginWriter([input_.name for input_ in settings.inputs], settings.fields.kept)
    splits = state.splits.items()
    writers = {
        split: SplitWriter(output, split, *sizes, written, origins, format, is_part) for split, written in splits
    }
    for writer in writers.values():
        stack.callback(writer.close)
    return writers


def write(
    results: Iterable[tuple[Chunk, Encoded]],
    writers: Mapping[str, SplitWriter],
    output: Path,
    state: State,
    meter: Meter,
    held_out_every: int,
) -> None:
    """Write encoded chunks to their splits and finish the shards; the state is saved now and then.

    Args:
        results: chunks in order, from the place of the state on.
        writers: of the splits; the one for `train` alone, if nothing is held out.
        output: folder of the state.
        state: kept up to date.
        meter: shows the progress.
        held_out_every: every n-th document is held out; 0: none.
    """
    saved = time.monotonic()
    for chunk, encoded in results:
        for split, block in split_block(encoded.block, state.documents, held_out_every):
            writers[split].add(block)
        # Together, so that a saved state is true of one moment: everything before `place` has been added.
        state.dropped.merge(encoded.dropped)
        state.place = chunk.then
        meter.update(state)
        if time.monotonic() - saved >= SAVE_EVERY_S:
            _save(output, state, writers)
            saved = time.monotonic()
    for writer in writers.values():
        writer.finish()
    # Of which the last shards are part, so that what they were made from may go
    _save(output, state, writers)


def _save(output: Path, state: State, writers: Mapping[str, SplitWriter]) -> None:
    # Data first: the state must not say more than the disk has.
    for writer in writers.values():
        writer.sync()
    save_state(output, state)
    # Only now: a process that continues from an earlier state makes these shards again
    for writer in writers.values():
        writer.remove_passed()


def split_block(block: Block, number: int, every: int) -> Iterator[tuple[str, Block]]:
    """Yields the parts of a block with their splits; `number` documents are before it."""
    if not every:
        yield TRAIN, block
        return
    # One beyond the whole documents, for the one that continues in the next block
    held_out = (np.arange(len(block.ends) + 1) + number) % every == 0
    # Of arrays, not document by document: where parts are joined, nothing else takes as long
    yield TRAIN, block.select(~held_out)
    yield HELD_OUT, block.select(held_out)


def _is_held_out(number: int, every: int) -> bool:
    return bool(every) and number % every == 0
