"""Folders that `forge-run data prepare` wrote, and the contents of their manifests.

A folder holds `train-00000.bin`, …, perhaps `held_out-00000.bin`, …, each with its `.ends`, the tokenizer in a
subfolder, the list of its inputs, and, once it is finished, `manifest.json`. Until then it holds `unfinished.json`
instead.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core import report_progress
from forge_core.contracts.errors import JobError
from forge_kit.data.block_sums import BLOCK
from forge_kit.data.cache import file_digest
from forge_plugin_memmap.paths import AnyListing, absolute
from forge_plugin_memmap.remote import is_remote, open_file

MANIFEST, UNFINISHED, INPUTS, TOKENIZER = "manifest.json", "unfinished.json", "inputs.json", "tokenizer"
MADE_BY = "forge-run data prepare"
FORMAT = 1
PIECE = 1 << 24
"""Bytes of a remote file that are read at a time."""
PARTS, PART = "parts", "part.json"
"""The folder of parts that are not joined yet, and the record of each that is finished."""
TRAIN, HELD_OUT = SPLITS = ("train", "held_out")


@frozen
class Prepared:
    """A finished folder."""

    folder: str
    manifest: Mapping[str, Any]
    split_of: Mapping[str, str]
    """The split of each of its token files, by name."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer that made the ids."""
        return self.manifest["tokenizer"]["fingerprint"]

    def is_summed(self, name: str) -> bool:
        """Whether the sums of a file's blocks are beside it."""
        return self.manifest["files"].get(name, {}).get("sums_of") == BLOCK

    def size_fault(self, name: str, sizes: Mapping[str, int], listing: AnyListing) -> str:
        """How the size of a file differs from the manifest; empty if it does not.

        Args:
            name: the file in the folder.
            sizes: sizes that are known already, by absolute path.
            listing: of the folders, which has the sizes of remote files.
        """
        path, expected = os.path.join(self.folder, name), self.manifest["files"][name]["size"]
        # Absolute, as the paths of shards are
        size = sizes.get(absolute(path))
        if size is None:
            try:
                size = listing.stamp(path)[0]
            except FileNotFoundError:
                return f"{path} is missing, though {MANIFEST} lists it"
        return "" if size == expected else f"{path} has {size} bytes, but its manifest lists {expected}: it is damaged"

    def digest_fault(self, name: str) -> str:
        """How the SHA-256 of a file differs from the manifest; empty if it does not. Reads the file."""
        path = os.path.join(self.folder, name)
        digest = _remote_digest(path) if is_remote(path) else file_digest(path)
        same = digest == self.manifest["files"][name]["sha256"]
        return "" if same else f"the SHA-256 of {path} does not match its manifest: it is damaged"


def read_prepared(folder: str | Path) -> Prepared | None:
    """The contents of `folder`, if `data prepare` wrote it.

    Raises:
        JobError: it is not finished, of another version, or its manifest is damaged.
    """
    folder = str(folder) or "."
    exists = AnyListing().has
    if exists(os.path.join(folder, UNFINISHED)):
        raise JobError(f"{folder!r} is not finished; run the same forge-run data prepare command again to continue it")
    if exists(os.path.join(folder, PART)):
        raise JobError(f"{folder!r} is a part of data that is not finished; join all of them by --join in its place")
    try:
        with open_file(os.path.join(folder, MANIFEST)) as file:
            manifest = json.loads(file.read())
    # Not an error: any folder may lack this file, or have another one of the same name
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("made_by") != MADE_BY:
        return None
    if manifest.get("format") != FORMAT:
        message = f"{folder!r} has format {manifest.get('format')}, this version of forge-plugin-memmap reads {FORMAT}"
        raise JobError(f"{message}; prepare the data again, or install the version that wrote it")
    try:
        names = {name: split for split in SPLITS for name in manifest["splits"][split]["files"]}
    except (TypeError, LookupError) as error:
        message = f"{os.path.join(folder, MANIFEST)} does not list the files of both splits"
        raise JobError(f"{message} ({type(error).__name__}: {error}); prepare the data again") from error
    return Prepared(folder, manifest, names)


def _remote_digest(path: str) -> str:
    """The SHA-256 (hex) of a remote file, which is downloaded for it, piece by piece."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            report_progress(f"reading {path}")
    return digest.hexdigest()
