"""The manifest: the contents of a checkpoint, and size and digest of each of its files.

`manifest.json` is written last. It holds everything that is not a tensor, and the size and SHA-256 of every other file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from forge_core.checkpoint.ranks import Ranks, describe_fault
from forge_core.contracts.errors import CheckpointError
from forge_core.launch.progress_beacon import report_progress

MANIFEST = "manifest.json"
FORMAT = 2
"""2: tensors as raw bytes."""

BLOCK = 1 << 24
"""Bytes that are hashed at a time."""

How = Literal["full", "sizes"]


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write and flush the manifest.

    Raises:
        CheckpointError: some state is not of a plain type.
    """
    with (folder / MANIFEST).open("w") as file:
        file.write(to_json(manifest))
        file.flush()
        os.fsync(file.fileno())


def to_json(values: Mapping[str, Any]) -> str:
    """Plain types as JSON.

    Raises:
        CheckpointError: something in them is not plain, or is the key of a table and no string.
    """
    _check_keys(values, "")
    try:
        return json.dumps(values, indent=1)
    except TypeError as error:
        raise CheckpointError(f"state must be tensors or plain types: {error}") from error


def _check_keys(value: Any, path: str) -> None:
    """JSON turns keys into strings without a word: a run that continues would not find its own."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"state must be tensors or plain types: a key of {path} is {key!r}, no string")
            _check_keys(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner, path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, not compared with its files.

    Raises:
        CheckpointError: it is missing, or not of the form that is written here.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            message = f"format {manifest['format']!r}; this version of forge-run reads {FORMAT}"
            raise CheckpointError(f"{folder}: {message}")
        for name, entry in manifest["files"].items():
            own_file(name)
            _ = entry["size"], entry["sha256"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {describe_fault(error)}") from error
    return manifest


def own_file(name: str) -> str:
    """A file's name, as long as it is in the checkpoint's own folder.

    Raises:
        ValueError: it is elsewhere.
    """
    if "/" in name or name.startswith("."):
        raise ValueError(f"not a file of a checkpoint: {name!r}")
    return name


def verify(folder: Path, how: How, ranks: Ranks | None = None) -> dict[str, Any]:
    """Check the files of a checkpoint against its manifest, which is returned. Collective: each rank checks its share
    of the files, and all come to the same result.

    Raises:
        CheckpointError: names each file and what is wrong with it.
    """
    ranks = ranks or Ranks()
    manifest = ranks.on_rank0(lambda: read_manifest(folder))
    names = sorted(manifest["files"], key=lambda name: -manifest["files"][name]["size"])
    mine = find_faults(folder, manifest, names[ranks.rank :: ranks.world_size], how)
    faults = [fault for named in ranks.gather(mine) for fault in named]
    if faults:
        raise CheckpointError("; ".join(faults))
    return manifest


def find_faults(folder: Path, manifest: Mapping[str, Any], names: Sequence[str], how: How) -> list[str]:
    """The faults of these files of a checkpoint, in words. Not collective."""
    with ThreadPoolExecutor(threads()) as pool:
        faults = pool.map(lambda name: _fault(folder / name, manifest["files"][name], how), names)
        return [fault for fault in faults if fault]


def threads() -> int:
    """How many files this process should read or write at a time: hashing keeps a core busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _fault(path: Path, entry: Mapping[str, Any], how: How) -> str:
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{path} has {size} bytes, the manifest says {entry['size']}"
        if how == "full" and _sha256(path) != entry["sha256"]:
            return f"{path} is damaged: its SHA-256 is not the manifest's"
    except FileNotFoundError:
        return f"{path} is missing, the manifest says {entry['size']} bytes"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return ""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            report_progress("verifying")
    return digest.hexdigest()
