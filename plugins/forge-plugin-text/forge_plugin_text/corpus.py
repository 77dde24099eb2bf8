"""A corpus: files, settings for reading them, and the split into training and held-out documents."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from attrs import field, frozen

from forge_core import report_progress
from forge_core.contracts.errors import JobError
from forge_core.files import write_atomically
from forge_kit.data.cache import cache_root, digest_of, file_digest, locked, writable_cache
from forge_plugin_text.listing import TextFile
from forge_plugin_text.reading import Document, Reading
from forge_plugin_text.split import Split

SETTLED_AFTER_NS = 2_000_000_000
"""Age in nanoseconds below which a file may change again without a new time stamp."""

Entry = list[int | str]
"""Size, two time stamps and inode of a file, and its SHA-256."""


@frozen
class TextCorpus:
    """Documents in a fixed order: by the name of their file, then by position in it."""

    files: tuple[TextFile, ...]
    reading: Reading
    split: Split

    def __str__(self) -> str:
        first, more = repr(self.files[0].name), len(self.files) - 1
        return f"{first} and {more} more files" if more else first

    def documents(self) -> Iterator[tuple[Document, bool]]:
        """Yields all documents, and whether each is held out.

        Raises:
            JobError: a file cannot be read; the message names it.
        """
        documents = chain.from_iterable(map(self.reading.documents, self.files))
        for number, document in enumerate(documents):
            yield document, self.split.holds_out(number, document)

    def text_bytes(self) -> int:
        """Returns about how many bytes of text there are, for progress; 0 if files are compressed."""
        if any(file.compression for file in self.files):
            return 0
        return sum(file.stat().st_size for file in self.files)

    def fingerprint(self) -> str:
        """Returns the SHA-256 (hex) of all inputs of `documents`: names and contents of the files, and the settings."""
        return self.describe().fingerprint

    def describe(self) -> CorpusFacts:
        """Look at each file once; contents are read only where one has changed since the last call (see `_entries`)."""
        # As bytes: a name need not be UTF-8
        names = [os.fsencode(file.name).hex() for file in self.files]
        entries = _entries(self.files)
        digests = [str(entry[-1]) for entry in entries]
        sizes = [int(entry[0]) for entry in entries]
        return CorpusFacts(
            name=str(self),
            fingerprint=digest_of(names, digests, self.reading.errors, self.reading.field, self.split.key()),
            holds_out_any=self.split.holds_out_any,
            files=len(sizes),
            size=sum(sizes),
            empty=sizes.count(0),
        )


@frozen(kw_only=True)
class CorpusFacts:
    """What one rank finds out about a corpus for all."""

    name: str
    """For messages."""
    fingerprint: str
    """SHA-256 (hex) of all that its documents depend on."""
    holds_out_any: bool
    files: int
    size: int
    """Bytes of all files."""
    empty: int
    """Files without a byte."""
    left_out: Mapping[str, int] = field(factory=dict)
    """What the patterns reach and is not read, with how often."""


def _entries(files: Sequence[TextFile]) -> list[Entry]:
    """Returns the entry of each file. An index in the cache has the digests of files hashed before.

    An entry is valid while size, modification time, change time and inode are the same: writing to a file, or
    resetting its times, changes at least the change time.
    """
    index = _index_of(files)
    entries = _current(files, _read_index(index))
    # Without a lock while nothing has changed, which is the usual case
    if len(entries) < len(files):
        with writable_cache(), locked(index):
            entries = _update(index, files)
    return [entries[file.path] for file in files]


def _index_of(files: Sequence[TextFile]) -> Path:
    """Returns the index of the folder that the files share: a new file leaves the other entries valid."""
    folder = os.path.commonpath([file.path for file in files])
    return cache_root() / "files" / f"{digest_of(os.fsencode(folder).hex())}.json"


def _update(path: Path, files: Sequence[TextFile]) -> dict[str, Entry]:
    """Hash the files that the index lacks, and write it with those whose entries can be trusted later."""
    # Files that are gone would otherwise stay in the index for good
    index = {name: entry for name, entry in _read_index(path).items() if os.path.exists(name)}
    entries = _current(files, index)  # another process may have read some meanwhile
    # Before the first read: an entry is trusted only if its file was last changed well before that.
    started = time.time_ns()
    unread = [file for file in files if file.path not in entries]
    for number, file in enumerate(unread, 1):
        entries[file.path] = _read_entry(file)
        report_progress("reading files", number, len(unread))  # other ranks wait for this one
    settled = {name: entry for name, entry in entries.items() if _is_settled(entry, started)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(index | settled).encode())
    return entries


def _current(files: Sequence[TextFile], index: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the entries that still describe their file."""
    known = (file for file in files if file.path in index)
    return {file.path: index[file.path] for file in known if index[file.path][:-1] == _signature(file)}


def _read_entry(file: TextFile) -> Entry:
    before = _signature(file)
    try:
        digest = file_digest(file.path)
    except OSError as error:
        raise JobError(f"{file.path}: cannot be read ({error.strerror})") from error
    if _signature(file) != before:
        raise JobError(f"{file.path}: changed while it was read; start again when nothing writes to it")
    return [*before, digest]


def _signature(file: TextFile) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _is_settled(entry: Entry, started: int) -> bool:
    _, modified, changed, *_ = entry
    return max(int(modified), int(changed)) < started - SETTLED_AFTER_NS


def _read_index(path: Path) -> Mapping[str, Entry]:
    """Returns the index; empty if there is no readable one, so that every file is hashed."""
    try:
        index = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}
