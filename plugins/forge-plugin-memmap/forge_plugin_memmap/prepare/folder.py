"""The output folder: its lock, its state while it is unfinished, and its manifest once it is finished."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from attrs import define, field

from forge_core.config.load import to_toml
from forge_core.contracts.components import TokenizerComponent
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.files import write_atomically
from forge_core.plugins.catalog import Catalog
from forge_kit.data.cache import remove_leftovers
from forge_kit.tools.commands import parse_component
from forge_plugin_memmap.manifest import (
    FORMAT,
    INPUTS,
    MADE_BY,
    MANIFEST,
    PART,
    PARTS,
    SPLITS,
    UNFINISHED,
    read_prepared,
)
from forge_plugin_memmap.prepare.documents import Dropped
from forge_plugin_memmap.prepare.inputs import InputPosition
from forge_plugin_memmap.prepare.writing import Written

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
"""Errors of a file system that cannot lock a folder. Keeping other processes away is then up to the user."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Source = Literal["inputs", "parts"]
Arguments = Mapping[str, Any]
"""Everything that the result depends on, as JSON; of the inputs, a digest."""
Inputs = Sequence[Mapping[str, Any]]
"""The identity of each input. There may be many, so they are stored in a separate file, which is written once and not
read when a job starts."""


@define
class State:
    """The state of an unfinished folder. All of it is true of one moment, between two chunks."""

    arguments: Arguments
    tokenizer: Mapping[str, Any] | None = None
    """Fingerprint, vocabulary and end-of-text; None: it is still to be made."""
    place: InputPosition = field(factory=InputPosition)
    splits: dict[str, Written] = field(factory=lambda: {split: Written() for split in SPLITS})
    dropped: Dropped = field(factory=Dropped)
    source: Source = "inputs"
    """What `place` is a place in: the inputs, or the parts that are joined."""

    @property
    def documents(self) -> int:
        """Documents written so far: of whole shards, and of the shard being written."""
        return sum(w.total.documents + w.open.documents for w in self.splits.values())

    @property
    def tokens(self) -> int:
        """Tokens written so far, likewise."""
        return sum(w.total.tokens + w.open.tokens for w in self.splits.values())

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> State:
        """The inverse of `plain`."""
        splits = {split: Written.parse(written) for split, written in plain["splits"].items()}
        place, dropped = InputPosition(**plain["place"]), Dropped.of(plain["dropped"])
        # Folders that were begun before there were parts do not say
        return cls(plain["arguments"], plain["tokenizer"], place, splits, dropped, plain.get("source", "inputs"))

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "arguments": self.arguments,
            "tokenizer": self.tokenizer,
            "place": self.place.plain(),
            "splits": {split: written.plain() for split, written in self.splits.items()},
            "dropped": self.dropped.plain(),
            "source": self.source,
        }

    def manifest(self) -> dict[str, Any]:
        """The manifest of a finished folder. It depends on the arguments alone."""
        splits = {split: {**_counts(written), "files": written.shards} for split, written in self.splits.items()}
        files = {name: described for written in self.splits.values() for name, described in written.files.items()}
        head = {"made_by": MADE_BY, "format": FORMAT, "arguments": self.arguments, "tokenizer": self.tokenizer}
        kept = {name: sum(w.kept.get(name, 0) for w in self.splits.values()) for name in self.arguments["keep"]}
        return {**head, "splits": splits, "kept": kept, "dropped": self.dropped.plain(), "files": files}


def _counts(written: Written) -> dict[str, int]:
    total = written.total
    return {"documents": total.documents, "tokens": total.tokens, "bytes": total.bytes}


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Lock the folder while this context lasts, and create it if need be. The kernel unlocks it when the process ends.

    Raises:
        ForgeError: another process works in it.
        JobError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The folder itself is locked, so that no lock file is left in it.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise JobError(f"--out {folder}: {error.strerror}; give a folder that can be written") from error
    try:
        _lock(descriptor, folder)
        yield
    finally:
        # This also unlocks: no other descriptor is open on the folder's lock
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        # Without a wait: a command that hangs would not show why
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        fix = "wait for it, or give another --out"
        raise ForgeError(f"another data prepare is at work in {folder}; {fix}") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    else:
        # Only with the lock: another process may be writing them
        for name in (INPUTS, UNFINISHED, MANIFEST, PART):
            remove_leftovers(folder / name)


def finished_manifest(folder: Path, arguments: Arguments, inputs: Inputs) -> Mapping[str, Any] | None:
    """Returns the manifest if the folder is finished, else None.

    Raises:
        JobError: it was made with other arguments.
    """
    if (folder / MANIFEST).exists():  # written last: a process may have died before it removed the other
        (folder / UNFINISHED).unlink(missing_ok=True)
    if (folder / UNFINISHED).exists() or (prepared := read_prepared(folder)) is None:
        return None
    _demand_same(folder, _comparable(prepared.manifest["arguments"], arguments), arguments, inputs)
    return prepared.manifest


def open_state(folder: Path, new: State, inputs: Inputs) -> State:
    """Returns the state that an earlier process saved, or else the `new` one, in an empty folder.

    Raises:
        JobError: the folder holds something else, or was begun with other arguments.
    """
    if not (folder / UNFINISHED).exists():
        _demand_empty(folder, new.source)
        return _begin(folder, new, inputs)
    state = State.parse(json.loads((folder / UNFINISHED).read_bytes()))
    state.arguments = _comparable(state.arguments, new.arguments)
    if not state.tokens and (state.arguments, state.source) != (new.arguments, new.source):
        # There is nothing yet that they have shaped
        return _begin(folder, new, inputs)
    _demand_same(folder, state.arguments, new.arguments, inputs)
    if state.source != new.source:
        # Its place would be taken for one in something else
        before = {"inputs": "without --join", "parts": "with --join"}[state.source]
        raise JobError(f"{folder} was begun {before}; give the same command to continue, or another --out")
    return state


def _begin(folder: Path, state: State, inputs: Inputs) -> State:
    # Before the state, which marks the folder as one to continue
    _replace(folder / INPUTS, inputs)
    save_state(folder, state)
    return state


def _demand_empty(folder: Path, source: Source) -> None:
    # The list of inputs is written first: a process may have died right after it.
    others = sorted(path.name for path in folder.iterdir() if path.name not in (INPUTS, PARTS))
    if source == "inputs" and (folder / PARTS).exists():
        raise JobError(f"{folder} has parts of data prepare; join them with --join, or give another --out")
    if others:
        message = f"{folder} holds {others[0]!r}, which is not of an unfinished data prepare"
        raise JobError(f"{message}; give an empty or new folder as --out")


def _comparable(before: Arguments, now: Arguments) -> Arguments:
    """Returns earlier arguments as they would be written now.

    Strict `errors` are the present ones: unfailed, strict has skipped nothing. Keys that the tokenizer's component has
    got since have their defaults, and so has the format. Folders that were begun without origins of documents kept
    nothing (None), which is not the same as no field.
    """
    before = {**before, "format": before.get("format", "forge"), "keep": before.get("keep")}
    if before["tokenizer"].keys() < now["tokenizer"].keys():
        catalog = Catalog.installed()
        component = parse_component(before["tokenizer"], MANIFEST, TokenizerComponent, catalog)
        before = {**before, "tokenizer": to_toml(component, catalog)}
    return {**before, "errors": now["errors"]} if before["errors"] == "strict" else before


def finished_part(folder: Path, arguments: Arguments, inputs: Inputs) -> Mapping[str, Any] | None:
    """Returns the record of a part if it is finished, else None.

    Raises:
        JobError: it was made with other arguments.
    """
    if not (folder / PART).exists():
        return None
    # A process may have died before it removed the other
    (folder / UNFINISHED).unlink(missing_ok=True)
    record: dict[str, Any] = json.loads((folder / PART).read_bytes())
    _demand_same(folder, _comparable(record["arguments"], arguments), arguments, inputs)
    return record


def finish_part(folder: Path, state: State) -> Mapping[str, Any]:
    """Finish the folder of a part and return its record."""
    record = state.plain()
    _replace(folder / PART, record)
    (folder / UNFINISHED).unlink()
    return record


def save_state(folder: Path, state: State) -> None:
    """Save the state; everything that the splits have written must be on the disk before."""
    _replace(folder / UNFINISHED, state.plain())


def finish(folder: Path, state: State) -> Mapping[str, Any]:
    """Finish the folder and return its manifest."""
    manifest = state.manifest()
    # The manifest before the removal: a process that dies in between leaves a folder that is finished.
    _replace(folder / MANIFEST, manifest)
    (folder / UNFINISHED).unlink()
    return manifest


@contextmanager
def room_to_write(folder: Path) -> Iterator[None]:
    """Within this context, a failure to write to the folder raises an error that states how to fix it."""
    try:
        yield
    except OSError as error:
        # An error about an input is not about this folder
        ours = error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(folder)
        if error.errno not in DISK_FULL and not ours:
            raise
        where = error.filename if ours else folder
        fix = "make room" if error.errno in DISK_FULL else "correct that"
        again = "and run the same command again: it continues where it stopped"
        raise ForgeError(f"cannot write to {where}: {error.strerror}; {fix} {again}") from error


def _replace(path: Path, content: Any) -> None:
    # The state is written often and read by programs only, so it has no line breaks
    text = json.dumps(content, indent=None if path.name == UNFINISHED else 1, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode())


def _demand_same(folder: Path, before: Arguments, now: Arguments, inputs: Inputs) -> None:
    if before == now:
        return
    keys = [key for key in now if key != "inputs" and before[key] != now[key]]
    differences = [f"{key}: {json.dumps(before[key])} then, {json.dumps(now[key])} now" for key in keys]
    if before["inputs"] != now["inputs"]:
        differences += _input_differences(json.loads((folder / INPUTS).read_bytes()), inputs)
    listed = "\n".join(f"  {difference}" for difference in [*differences[:10], *(["…"] if differences[10:] else [])])
    fix = "give the same arguments to continue, or another --out"
    raise JobError(f"{folder} was begun with other arguments; {fix}:\n{listed}")


def _input_differences(before: Inputs, now: Inputs) -> Iterator[str]:
    old, new = ({entry["name"]: entry for entry in entries} for entries in (before, now))
    yield from (f"input {name}: no longer given" for name in old if name not in new)
    yield from (f"input {name}: not given then" for name in new if name not in old)
    yield from (f"input {name}: has changed since" for name in old if name in new and old[name] != new[name])
    if list(old) != list(new) and set(old) == set(new):
        yield "the inputs are given in another order"
