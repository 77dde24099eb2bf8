"""Folders that `forge-run data prepare` wrote, and the contents of their manifests.

A folder holds `train-00000.bin`, …, perhaps `held_out-00000.bin`, …, each with its `.ends`, the tokenizer in a
subfolder, the list of its inputs, and, once it is finished, `manifest.json`. Until then it holds `unfinished.json`
instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_kit.data.block_sums import BLOCK
from forge_kit.data.cache import file_digest

MANIFEST, UNFINISHED, INPUTS, TOKENIZER = "manifest.json", "unfinished.json", "inputs.json", "tokenizer"
MADE_BY = "forge-run data prepare"
FORMAT = 1
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

    def size_fault(self, name: str, sizes: Mapping[str, int]) -> str:
        """How the size of a file differs from the manifest; empty if it does not.

        Args:
            name: the file in the folder.
            sizes: sizes that are known already, by absolute path.
        """
        path, expected = os.path.join(self.folder, name), self.manifest["files"][name]["size"]
        # Absolute, as the paths of shards are
        size = sizes.get(os.path.abspath(path))
        if size is None:
            try:
                size = os.path.getsize(path)
            except FileNotFoundError:
                return f"{path} is missing, though {MANIFEST} lists it"
        return "" if size == expected else f"{path} has {size} bytes, but its manifest lists {expected}: it is damaged"

    def digest_fault(self, name: str) -> str:
        """How the SHA-256 of a file differs from the manifest; empty if it does not. Reads the file."""
        path = os.path.join(self.folder, name)
        same = file_digest(path) == self.manifest["files"][name]["sha256"]
        return "" if same else f"the SHA-256 of {path} does not match its manifest: it is damaged"


def read_prepared(folder: str | Path) -> Prepared | None:
    """The contents of `folder`, if `data prepare` wrote it.

    Raises:
        JobError: it is not finished, of another version, or its manifest is damaged.
    """
    folder = str(folder) or "."
    if os.path.exists(os.path.join(folder, UNFINISHED)):
        raise JobError(f"{folder!r} is not finished; run the same forge-run data prepare command again to continue it")
    if os.path.exists(os.path.join(folder, PART)):
        raise JobError(f"{folder!r} is a part of data that is not finished; join all of them by --join in its place")
    try:
        manifest = json.loads(Path(folder, MANIFEST).read_bytes())
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
