"""Tar archives of texts, as of webdataset: one document a group of files, `NAME.txt`, `NAME.json`, or both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_kit.data.origins import ID
from forge_kit.data.tar_groups import TextGroup, tar_groups, text_groups
from forge_plugin_memmap.prepare.documents import BLOCK, Drop, Fields, Place, Read, Text, kept_value
from forge_plugin_memmap.prepare.text_files import BYTE_ORDER_MARK, parse_line

TAR = ".tar"


@frozen
class Groups:
    """Some groups of an archive."""

    name: str
    first: int
    """Number of the first group, counted from 1."""
    groups: Sequence[TextGroup]
    fields: Fields

    def documents(self) -> Iterator[Text | Drop]:
        """Yields the text of each group, or why it has none; places are `NAME:GROUP`, from 1."""
        for number, group in enumerate(self.groups, self.first):
            yield _parse(group, Place(self.name, number), self.fields)


def _parse(group: TextGroup, where: Place, fields: Fields) -> Text | Drop:
    if group.text is None:
        if group.table is None:
            return Drop(where, "no field", f"{group.name} has neither .txt nor .json")
        found = parse_line(group.table, where, fields, is_first=True)
    else:
        try:
            text = group.text.decode().removeprefix(BYTE_ORDER_MARK)
        except UnicodeDecodeError as error:
            return Drop(where, "not UTF-8", f"byte {error.start} of {group.name}.txt: {error.reason}")
        found = Text(where, text, len(text.encode()), kept=_kept(group, fields)) if text else Drop(where, "empty", "")
    return _named(found, group, fields) if isinstance(found, Text) else found


def _kept(group: TextGroup, fields: Fields) -> tuple[bytes, ...]:
    """Returns what the table next to a text has of the fields that are kept."""
    try:
        table = json.loads(group.table or b"{}")
    except (ValueError, RecursionError):
        # The text does not depend on it
        return ()
    return tuple(kept_value(table.get(name)) for name in fields.kept) if isinstance(table, dict) else ()


def _named(text: Text, group: TextGroup, fields: Fields) -> Text:
    """Returns the document with the name of its group as its id, where it has no other."""
    kept = text.kept or (b"",) * len(fields.kept)
    name = kept_value(group.name)
    own = tuple(name if key == ID and not value else value for key, value in zip(fields.kept, kept, strict=True))
    return text._replace(kept=own)


def read_tar(path: str, fields: Fields, at: Mapping[str, int], end: Mapping[str, int]) -> Iterator[Read]:
    """Yields the groups of an archive from a place on: the groups before it.

    Raises:
        JobError: it is no tar, or was cut short.
    """
    del end  # an archive is not divided between parts
    first, passed, size = at.get("group", 0), 0, 0
    groups: list[TextGroup] = []
    for begin, group in text_groups(path, first):
        if size >= BLOCK:
            yield Read({"group": first}, passed, Groups(path, first + 1, groups, fields), size)
            first, passed, size, groups = first + len(groups), begin, 0, []
        groups.append(group)
        size += len(group.text or group.table or b"")
    if groups:
        yield Read({"group": first}, passed, Groups(path, first + 1, groups, fields), size)


def tar_fault(path: str) -> str:
    """Returns why an archive cannot be read, empty if it can; reads headers only."""
    try:
        tar_groups(path)
    except JobError as error:
        return str(error)
    return ""
