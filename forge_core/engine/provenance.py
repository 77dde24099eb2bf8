"""The record of what shaped a run: which distributions were active, in which version, from where."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.config.job import Job
from forge_core.config.walk import walk_components
from forge_core.errors import CheckpointError
from forge_core.plugins.catalog import CORE, Catalog, Distribution, core_version

if TYPE_CHECKING:
    from forge_core.protocols import Tokenizer


def collect(job: Job, catalog: Catalog, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Provenance of a job, as plain types: `components` (path -> type), `distributions` (name -> version and where an
    editable one comes from), `files` (local component files -> SHA-256), the tokenizer's fingerprint, Python and torch
    versions. Only what the job uses; nothing of the environment's variables."""
    components = {path: catalog.type_of(type(component)) for path, component in walk_components(job)}
    used = {CORE, *(type_.split("/")[0] for type_ in components.values() if ":" not in type_)}
    known = {name: catalog.distribution(name) for name in sorted(used)}
    return {
        "components": components,
        "distributions": {name: _describe(dist) for name, dist in known.items() if dist is not None},
        "files": dict(catalog.files),
        "tokenizer": None if tokenizer is None else tokenizer.fingerprint(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def compare(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Warnings for a run that continues with other versions than `recorded`.

    Raises:
        CheckpointError: a distribution that was used is not installed (says how to install it), or the tokenizer is
            another: its ids would mean other texts.
    """
    warnings = []
    if recorded.get("tokenizer") != current.get("tokenizer"):
        raise CheckpointError("the checkpoint was trained with another tokenizer than this run has")
    for name, was in recorded["distributions"].items():
        now = current["distributions"].get(name)
        if now is None and not _installed(name):
            version = was["version"]
            raise CheckpointError(
                f"the checkpoint used {name} {version}, which is not installed: pip install {name}=={version}"
            )
        if now is not None and now != was:
            warnings.append(f"{name} was {_version(was)} when the checkpoint was saved, and is {_version(now)} now")
    for path, digest in recorded["files"].items():
        if current["files"].get(path, digest) != digest:
            warnings.append(f"{path} has changed since the checkpoint was saved")
    return warnings


def _describe(dist: Distribution) -> dict[str, str]:
    described = {"version": core_version() if dist.name == CORE else dist.version}
    if dist.editable_path is not None:
        described["commit"] = _commit(dist.editable_path)
    return described


def _commit(path: Path) -> str:
    """`git describe` of an editable install, whose version alone says nothing; empty outside a repository."""
    command = ["git", "-C", str(path), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _version(described: Mapping[str, str]) -> str:
    commit = described.get("commit")
    return described["version"] + (f" ({commit})" if commit else "")
