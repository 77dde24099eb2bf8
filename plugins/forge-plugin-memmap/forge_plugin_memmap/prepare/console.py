"""Output of the command: the progress while it works, and the summary at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from forge_kit.tools.tables import columns
from forge_plugin_memmap.manifest import SPLITS, TRAIN
from forge_plugin_memmap.origins import KEPT
from forge_plugin_memmap.prepare.documents import Example
from forge_plugin_memmap.prepare.encoding import id_dtype
from forge_plugin_memmap.prepare.folder import State

LINES = 10
"""Lines in all, where there is no terminal to draw a bar on."""


class Meter(Protocol):
    """Shows the progress; `update` is called with every state that is reached."""

    def update(self, state: State) -> None: ...


@contextmanager
def open_meter(console: Console, total_bytes: int, state: State, before: int = 0) -> Iterator[Meter]:
    """Opens a bar on a terminal, a few lines elsewhere.

    Args:
        console: where it is shown.
        total_bytes: bytes of inputs that are read in all.
        state: in which this process begins.
        before: bytes of inputs before those that are read.
    """
    speed = Speed(state.tokens)
    if not console.is_terminal:
        yield Lines(console, total_bytes, state, speed, before)
        return
    fields = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[counts]}"), TimeRemainingColumn())
    # Removed at the end, where the summary takes its place
    with Progress(*fields, console=console, transient=True) as progress:
        yield Bar(progress, total_bytes, state, speed, before)


class Speed:
    """Tokens a second of this process."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._began = tokens, time.monotonic()

    def describe(self, state: State) -> str:
        """Returns documents and tokens of the folder in all, and the speed of this process."""
        return f"{state.documents:,} documents  {state.tokens:,} tokens  {self.per_second(state):,.0f} tokens/s"

    def per_second(self, state: State) -> float:
        """Returns tokens a second, without tokens that earlier processes wrote."""
        return (state.tokens - self._tokens) / max(time.monotonic() - self._began, 1e-9)


class Bar:
    """See `Meter`."""

    def __init__(self, progress: Progress, total_bytes: int, state: State, speed: Speed, before: int) -> None:
        self._progress, self._speed, self._before = progress, speed, before
        counts = speed.describe(state)
        self._task = progress.add_task("", total=total_bytes, completed=state.place.passed - before, counts=counts)

    def update(self, state: State) -> None:
        """Moves the bar to the bytes of the inputs that were passed."""
        passed = state.place.passed - self._before
        self._progress.update(self._task, completed=passed, counts=self._speed.describe(state))


class Lines:
    """See `Meter`."""

    def __init__(self, console: Console, total_bytes: int, state: State, speed: Speed, before: int) -> None:
        self._console, self._total, self._speed, self._before = console, max(total_bytes, 1), speed, before
        # A command that continues does not repeat the lines of the process before it
        self._shown = self._tenth(state)

    def update(self, state: State) -> None:
        """Prints a line whenever another tenth of the inputs is done."""
        tenth = self._tenth(state)
        if tenth > self._shown:
            self._shown = tenth
            self._console.print(f"{100 * tenth // LINES:3} %  {self._speed.describe(state)}", highlight=False)

    def _tenth(self, state: State) -> int:
        return LINES * (state.place.passed - self._before) // self._total


def describe(folder: Path, manifest: Mapping[str, Any], speed: str) -> str:
    """Returns the summary of a finished folder.

    Args:
        folder: the output folder.
        manifest: its manifest.
        speed: time taken and tokens a second; empty if it was finished before.
    """
    rows = [[split, *_figures(manifest["splits"][split])] for split in SPLITS if manifest["splits"][split]["files"]]
    head = ["split", "documents", "tokens", "bytes of text", "shards"]
    written = sum(manifest["splits"][split]["documents"] for split in SPLITS)
    dropped, kept = _dropped(manifest["dropped"], written), _kept(manifest["kept"])
    parts = [columns([head, *rows]), speed, kept, dropped, _usage(folder, manifest)]
    return "\n\n".join(filter(None, parts))


def _figures(split: Mapping[str, Any]) -> list[str]:
    return [*(f"{split[name]:,}" for name in ("documents", "tokens", "bytes")), str(len(split["files"]))]


def describe_part(folder: Path, part: str, record: Mapping[str, Any] | None, speed: str) -> str:
    """Returns the summary of a finished part; arguments as of `describe`, and its record, None if it was joined."""
    if record is None:
        return f"part {part} of {folder} is finished, as the folder is: all parts are joined"
    total = record["splits"][TRAIN]["total"]
    head = f"part {part} of {folder} is finished: {total['documents']:,} documents, {total['tokens']:,} tokens"
    advice = "when all parts are: the same command with --join for --part"
    return "\n\n".join(filter(None, [head, speed, _dropped(record["dropped"], total["documents"]), advice]))


def _kept(counts: Mapping[str, int]) -> str:
    """Returns how many documents have what was kept with them; also of none, where it was asked for."""
    told = [f"{name} of {count:,} documents" for name, count in counts.items() if count or name not in KEPT]
    return f"kept: {', '.join(told)}" if told else ""


def _dropped(dropped: Mapping[str, Any], written: int) -> str:
    """Returns the counts of dropped inputs, by reason, beside the documents that were `written`."""
    count = sum(entry["count"] for entry in dropped.values())
    head = f"dropped {count:,} of {count + written:,} files, lines and rows"
    return "\n".join([head + (":" if count else ""), *_reasons(dropped)])


def _reasons(dropped: Mapping[str, Any]) -> Iterator[str]:
    for reason, entry in dropped.items():
        more = ", …" if entry["count"] > len(entry["examples"]) else ""
        yield f"  {reason}: {entry['count']:,}, at {', '.join(map(str, map(Example.of, entry['examples'])))}{more}"


def _usage(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Returns how a job, or the library that the shards are for, uses the folder."""
    format = manifest["arguments"].get("format", "forge")
    if format == "datatrove":
        width = np.dtype(id_dtype(manifest["tokenizer"]["vocab_size"])).itemsize
        call = f'DatatroveFolderDataset("{folder}", seq_len, filename_pattern="train-*.ds", token_size={width})'
        return f"{folder} is finished; for datatrove:\n\n{call}"
    if format == "megatron":
        prefixes = (str(folder / Path(name).stem) for name in manifest["splits"][TRAIN]["files"])
        return f"{folder} is finished; for Megatron:\n\n--data-path {' '.join(prefixes)}"
    tokenizer = f'[data.tokenizer]\ntype = "prepared"\npath = "{folder}"'
    source = f'[[data.sources]]\ntype = "memmap"\npath = "{folder}"'
    return f"{folder} is finished; in a job file:\n\n{tokenizer}\n\n{source}"
