"""Finds the files of a source, and opens them by their format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.data_files import FileFinder, missing

if TYPE_CHECKING:
    from forge_plugin_huggingface.source import DescribedSource
    from forge_plugin_images.records import Records

LISTS = (".jsonl", ".tar", ".parquet")
"""Endings of files with many records each."""
IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
SOUNDS = (".wav",)
BESIDE = (".json", ".txt", ".text", ".caption")
"""Endings of files that belong to an image, video or sound of the same name."""
SAVED = ("state.json", "dataset_dict.json")
"""Files that identify a folder of `save_to_disk`."""
SAVED_TABLE = "saved"
"""Stands for such a folder where formats are named by endings."""


def files_of(patterns: Sequence[str], finder: FileFinder | None = None) -> tuple[str, list[str]]:
    """Returns the format of a source and its files by name; `finder` counts the files that are left out.

    Files with many records come before loose images and videos: in a folder with both, these are what the records refer
    to. The format of loose files is an empty string.

    Raises:
        JobError: a pattern has no files, or they have several formats.
    """
    finder = FileFinder() if finder is None else finder
    candidates = [file for pattern in patterns for file in _existing(pattern, finder)]
    # Sorted, as documents are held out by their number; a set, as patterns may overlap
    by_format = {ending: sorted({file for file in candidates if file.lower().endswith(ending)}) for ending in LISTS}
    formats = {ending: files for ending, files in by_format.items() if files}
    if len(formats) > 1:
        message = f"{list(patterns)} has files of several formats ({', '.join(formats)}); name files of one format"
        raise JobError([Problem("path", message)])
    if formats:
        return next(iter(formats.items()))
    loose = (*IMAGES, *VIDEOS, *SOUNDS)
    if any(file.lower().endswith(loose) for file in candidates):
        return "", sorted({file for file in candidates if file.lower().endswith((*loose, *BESIDE))})
    known = f"{', '.join(LISTS)}, or images, videos or sounds with texts beside them"
    message = f"none of {len(candidates)} files of {list(patterns)} is of a known format ({known})"
    raise JobError([Problem("path", f"{message}; correct the path")])


@frozen(kw_only=True)
class Found:
    """The files of a source, as one rank finds them for all."""

    ending: str
    """Their format: one of `LISTS`; empty: loose files; `SAVED_TABLE`."""
    files: Sequence[str] = ()
    """Files with many records. Loose ones may be millions: they are listed again where they must be grouped."""
    key: str = ""
    """Of their index in the cache, where the format has one."""
    identity: str = ""
    """See `Records.identity`: a digest of names, sizes and times of all files, where the format has an index."""
    table: DescribedSource | None = None
    """Of Parquet and `save_to_disk`."""


def find_source(patterns: Sequence[str], folder: str, split: str) -> Found:
    """Returns what `open_records` needs to know of the files; each is looked at once, here. See `files_of`."""
    from forge_kit.data.cache import digest_of
    from forge_plugin_images import groups, json_lines
    from forge_plugin_images.records import stamps
    from forge_plugin_images.tables import describe_table

    if is_saved(patterns):
        return Found(ending=SAVED_TABLE, table=describe_table((), patterns[0], split))
    ending, files = files_of(patterns)
    if ending == ".parquet":
        return Found(ending=ending, files=files, table=describe_table(files, "", split))
    described = stamps(files)
    if ending == ".jsonl":
        key = digest_of(json_lines.FORMAT, described)
        return Found(ending=ending, files=files, key=key, identity=digest_of(described, folder))
    # Paths are in the key as they are in the groups: relative ones hold for any folder with these files
    key = digest_of(groups.FORMAT, list(files), described)
    identity = digest_of(groups.FORMAT, described)
    return Found(ending=ending, files=files if ending else (), key=key, identity=identity)


def open_records(found: Found, patterns: Sequence[str], folder: str, split: str) -> Records:
    """Open the records of a source; raises `JobError` if there are none."""
    if found.table is not None:
        from forge_plugin_images.tables import Table

        path = found.files[0] if found.files else patterns[0]
        home = os.path.dirname(path) if found.files else path
        return Table.open(found.table, path, split, folder or home)
    if found.ending == ".jsonl":
        from forge_plugin_images.json_lines import JsonLines

        return JsonLines.open(found, folder)
    from forge_plugin_images.groups import GroupedFiles

    return GroupedFiles.open(found, patterns)


def is_saved(patterns: Sequence[str]) -> bool:
    """Whether the source is a folder that `save_to_disk` of Hugging Face's datasets wrote."""
    return len(patterns) == 1 and any(os.path.isfile(os.path.join(patterns[0], name)) for name in SAVED)


def _existing(pattern: str, finder: FileFinder) -> list[str]:
    """Returns the files of a path, folder or glob; raises `JobError` if there are none."""
    files = finder.find(pattern)
    if not files:
        raise JobError([Problem("path", f"{missing(pattern)}; correct the path")])
    return files
