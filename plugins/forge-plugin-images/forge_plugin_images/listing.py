"""Finds the files of a source, and opens them by their format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_core.contracts.errors import JobError, Problem
from forge_kit.data_files import FileFinder, missing

if TYPE_CHECKING:
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


def files_of(patterns: Sequence[str], finder: FileFinder | None = None) -> tuple[str, list[str]]:
    """Returns the format of a source and its files by name; `finder` counts what is left out.

    Files with many records come before loose images and videos: in a folder with both, these are what the records refer
    to. The format of loose files is an empty string.

    Raises:
        JobError: a pattern has no files, or they have several formats.
    """
    finder = FileFinder() if finder is None else finder
    candidates = [file for pattern in patterns for file in _existing(pattern, finder)]
    by_format = {ending: sorted({file for file in candidates if file.lower().endswith(ending)}) for ending in LISTS}
    formats = {ending: files for ending, files in by_format.items() if files}
    if len(formats) > 1:
        message = f"{list(patterns)} has files of several formats ({', '.join(formats)}); name those of one"
        raise JobError([Problem("path", message)])
    if formats:
        return next(iter(formats.items()))
    loose = (*IMAGES, *VIDEOS, *SOUNDS)
    if any(file.lower().endswith(loose) for file in candidates):
        return "", sorted({file for file in candidates if file.lower().endswith((*loose, *BESIDE))})
    known = f"{', '.join(LISTS)}, or images, videos or sounds with texts beside them"
    message = f"none of {len(candidates)} files of {list(patterns)} is of a known format ({known})"
    raise JobError([Problem("path", f"{message}; correct the path")])


def open_records(patterns: Sequence[str], folder: str, split: str) -> Records:
    """Open the records of a source; raises `JobError` if there are none."""
    if is_saved(patterns):
        from forge_plugin_images.tables import Table

        return Table.open(patterns[0], (), split, folder)
    ending, files = files_of(patterns)
    if ending == ".parquet":
        from forge_plugin_images.tables import Table

        return Table.open("parquet", tuple(files), split, folder)
    if ending == ".jsonl":
        from forge_plugin_images.json_lines import JsonLines

        return JsonLines.open(files, folder)
    from forge_plugin_images.groups import GroupedFiles

    return GroupedFiles.of_archives(files) if ending == ".tar" else GroupedFiles.of_files(files)


def is_saved(patterns: Sequence[str]) -> bool:
    """Whether the source is a folder that `save_to_disk` of Hugging Face's datasets wrote."""
    return len(patterns) == 1 and any(os.path.isfile(os.path.join(patterns[0], name)) for name in SAVED)


def _existing(pattern: str, finder: FileFinder) -> list[str]:
    """Returns the files of a path, folder or glob; raises `JobError` if there are none."""
    files = finder.find(pattern)
    if not files:
        raise JobError([Problem("path", f"{missing(pattern)}; correct the path")])
    return files
