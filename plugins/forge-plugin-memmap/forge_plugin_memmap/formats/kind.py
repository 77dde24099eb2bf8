"""The kind `token_format`: how files of token ids that some library wrote are recognised and described."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from attrs import field, frozen

from forge_core.contracts.components import Component
from forge_core.contracts.errors import JobError
from forge_plugin_memmap.paths import AnyListing, absolute
from forge_plugin_memmap.remote import is_remote, open_file, read_range
from forge_plugin_memmap.shards import Shard, Stamp

HEAD = 4096
"""Bytes of a file that formats see of it: the longest header of those here, of llm.c, has 1,024."""
RAW_HINT = 'if it holds plain ids, write format = { type = "raw", dtype = "uint16" }, with their type'


@frozen
class Surroundings:
    """What lies beside the files of one corpus. Folders are listed once, and indexes of whole folders read once."""

    listing: AnyListing = field(factory=AnyListing)
    _tables: dict[str, Any] = field(factory=dict, init=False)
    _missing: dict[str, str] = field(factory=dict, init=False)
    _entries: dict[tuple[str, str], Mapping[str, Any]] = field(factory=dict, init=False)

    def table(self, path: str) -> Any:
        """Returns what a file of JSON holds; None if there is no such file.

        Raises:
            JobError: it is not JSON.
        """
        if path not in self._tables:
            self._tables[path] = self._read(path)
        return self._tables[path]

    def entries(self, path: str, parse: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns what `parse` makes of a table: the files that an index lists, by name."""
        key = (path, parse.__module__)
        if key not in self._entries:
            self._entries[key] = parse(self.table(path))
        return self._entries[key]

    def missing_part(self, index: str, names: Iterator[str]) -> str:
        """Returns the first of the files listed by an index that is not beside it; empty if all are there."""
        # Once for each index: it may have 10,000 shards
        if index not in self._missing:
            folder = os.path.dirname(index)
            absent = (name for name in names if not self.listing.has(os.path.join(folder, name)))
            self._missing[index] = next(absent, "")
        return self._missing[index]

    def _read(self, path: str) -> Any:
        if not self.listing.has(path):
            return None
        with open_file(path) as file:
            data = file.read()
        try:
            return json.loads(data)
        except ValueError as error:
            raise JobError(f"{path}: is not JSON ({error}); it is damaged") from error


@frozen
class Candidate:
    """A file that a format may claim, with its first bytes."""

    path: str
    """As the job reaches it."""
    head: bytes
    """Its first bytes, up to `HEAD`."""
    stamp: Stamp
    surroundings: Surroundings = field(factory=Surroundings)
    absolute: str = field(init=False)
    """The absolute path, as a `Shard` has it."""

    @absolute.default
    def _absolute(self) -> str:
        # Once, for 10,000 shards. Not the real path: a link may have its index beside itself
        return absolute(self.path)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.stamp[0]

    def beside(self, suffix: str, *, in_place: bool = True) -> str:
        """Returns the absolute path of a file that belongs to this one, whether or not it exists.

        Args:
            suffix: its suffix: `.idx`.
            in_place: whether the suffix takes the place of this file's own, or follows it.
        """
        return (os.path.splitext(self.absolute)[0] if in_place else self.absolute) + suffix

    def has(self, path: str) -> bool:
        """Whether a file beside this one exists, without a look at the file itself."""
        return self.surroundings.listing.has(path)

    def folder_table(self, name: str) -> Any:
        """Returns what `name`, a file of JSON in the same folder, holds; None if there is none."""
        return self.surroundings.table(os.path.join(os.path.dirname(self.absolute), name))

    def entries(self, name: str, parse: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the files that an index in the same folder lists, by name, as `parse` makes them of its table."""
        return self.surroundings.entries(os.path.join(os.path.dirname(self.absolute), name), parse)

    def stamps(self, paths: Sequence[str]) -> dict[str, Stamp]:
        """The stamps of this file, and of others that exist."""
        listing = self.surroundings.listing
        return {self.absolute: self.stamp, **{path: listing.stamp(path) for path in paths if self.has(path)}}


def read_part(path: str, size: int, offset: int = 0) -> bytes:
    """Returns up to `size` bytes of a file, from byte `offset` on."""
    if is_remote(path):
        return read_range(path, offset, offset + size)
    # Without a buffer, which costs more than the few bytes that are read beside each of 10,000 shards
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), size, offset)


@frozen(kw_only=True)
class TokenFormat(Component[None]):
    """How ids lie in files that some library wrote. The format `auto` tries every installed one.

    No method reads an id: a corpus of 100 TB is described as quickly as a small one.
    """

    kind = "token_format"

    in_auto: ClassVar[bool] = True
    """Whether `auto` tries this format. False where files cannot be recognised, or a key has no default."""
    has_header: ClassVar[bool] = True
    """Whether bytes of the file itself mark it, which would become tokens if it was read as raw ids."""
    index: ClassVar[tuple[str, str] | None] = None
    """Suffixes of an index and of its data, where each data file has one: an index without data is reported."""

    def suffixes(self) -> tuple[str, ...]:
        """Returns the suffixes of the files that are taken from a folder."""
        raise NotImplementedError

    def recognises(self, file: Candidate) -> bool:
        """Returns whether the file is of this format: by its first bytes, or by an index beside it that lists it.

        A name is not enough, and ids are not looked at, so that a recognised file is certainly of this format.
        """
        raise NotImplementedError

    def refusal(self, file: Candidate) -> str:
        """Returns what a file lacks that has the name of this format, and is not recognised; empty: nothing to say."""
        return ""

    def shard(self, file: Candidate) -> Shard:
        """Returns the shard that a recognised file is.

        Raises:
            JobError: it is damaged, or of a variant that cannot be read.
        """
        raise NotImplementedError

    def members(self) -> Iterable[TokenFormat]:
        """The formats that files may have: this one."""
        return (self,)

    def resolve(self, file: Candidate) -> TokenFormat:
        """Returns the format that describes this file: this one.

        Raises:
            JobError: the file is not of this format.
        """
        if self.recognises(file):
            return self
        reason = self.refusal(file) or "its first bytes, and the files beside it, are of another one"
        raise JobError(f"{file.path} is not of this format: {reason}; leave format out, or correct it")
