"""The index of a source: what room each document needs, known without decoding an image, and kept in the cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge_core import report_progress
from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.cache import CachedFolder, cached_folder, digest_of
from forge_plugin_images.documents import ImageDocuments
from forge_plugin_images.image_file import BrokenImage

logger = logging.getLogger(__name__)

FORMAT = 2
"""Part of the key: increase it when the same documents have other entries."""
COUNTS = ("positions", "patches", "images", "labels", "text_bytes")
ENTRY = np.dtype([*((name, "i4") for name in COUNTS), ("cut", "?"), ("broken", "?")])
"""Of a document; all zeros if an image of it is broken."""
REPORT_EVERY = 1000
NAMED = 8
"""Broken images that a message names."""
_opened: dict[Path, np.ndarray] = {}


def stored_index(documents: ImageDocuments, allows_broken: bool) -> CachedFolder:
    """Returns the folder with the index of these documents, made if there is none.

    Raises:
        JobError: a record does not match the job, or images are broken and this is not allowed.
    """

    def make(folder: Path) -> Mapping[str, Any]:
        logger.info("measuring the images of %d documents", len(documents))
        entries, broken = np.zeros(len(documents), ENTRY), []
        for number in range(len(entries)):
            try:
                entries[number] = _entry(documents, number)
            except BrokenImage as error:
                entries[number]["broken"] = True
                broken.append(f"{documents.record(number).place}: {error}")
            if number % REPORT_EVERY == 0:
                report_progress(f"{number:,} documents measured")  # other ranks wait for this one
        # After the loop, so that one run counts all broken documents instead of ending at the first
        _report(broken, len(entries), allows_broken)
        np.save(folder / "entries.npy", entries)
        return {"documents": len(entries), "broken": len(broken)}

    # With `allows_broken` in the key: an index that has broken documents must not serve a run that refuses them.
    return cached_folder("image-index", digest_of(FORMAT, documents.key(), allows_broken), make)


def entries_of(folder: Path) -> np.ndarray:
    """Returns the (documents,) entries in a folder of `stored_index`, mapped."""
    if folder not in _opened:
        _opened[folder] = np.load(folder / "entries.npy", mmap_mode="r")
    return _opened[folder]


def _report(broken: list[str], documents: int, allowed: bool) -> None:
    """Name broken images; raise if there must be none, so that nothing is kept and repaired ones are seen."""
    if not broken:
        return
    listed = "\n  ".join(broken[:NAMED]) + (f"\n  and {len(broken) - NAMED} more" if len(broken) > NAMED else "")
    message = f"images or videos of {len(broken)} of {documents} documents cannot be read:\n  {listed}\n"
    if not allowed:
        raise JobError([Problem("unreadable", f'{message}repair them, or set unreadable = "skip" to leave them out')])
    logger.warning(message)


def _entry(documents: ImageDocuments, number: int) -> tuple[int, int, int, int, int, bool, bool]:
    document, _, text_bytes, is_cut = documents.measure(number)
    labels = int((document.labels >= 0).sum())
    return (*document.needs, labels, text_bytes, is_cut, False)
