"""The record of what shaped a run: which distributions were active, in which version, from where."""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.config.walk import walk_components
from forge_core.contracts.errors import CheckpointError
from forge_core.job import Job
from forge_core.plugins.catalog import CORE, Catalog, Distribution, core_version

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer


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


def compare(recorded: Mapping[str, Any], current: Mapping[str, Any], with_changes: bool = False) -> list[str]:
    """Warnings for a run that continues with other versions or local files than `recorded`.

    Args:
        with_changes: only warn of a distribution that is not installed, too.

    Raises:
        CheckpointError: a distribution that was used is not installed; says how to install it.
    """
    missing, warnings = [], []
    for name, was in recorded["distributions"].items():
        now = current["distributions"].get(name)
        if now is None and not _installed(name):
            missing.append(f"{name}=={was['version']}")
        elif now is not None and now != was:
            warnings.append(f"{name} was {_version(was)} when the checkpoint was saved, and is {_version(now)} now")
    if missing:
        used = f"the checkpoint used {', '.join(missing).replace('==', ' ')}, which is not installed"
        if not with_changes:
            fix = "or continue without it: --resume-with-changes"
            raise CheckpointError(f"{used}: pip install {' '.join(missing)}; {fix}")
        warnings.append(used)
    return warnings + _changed_files(recorded["files"], current["files"])


def check_tokenizer(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that a run continues with the tokenizer that it began with.

    Raises:
        CheckpointError: it has another one, whose ids mean other texts.
    """
    if recorded.get("tokenizer") != current.get("tokenizer"):
        raise CheckpointError("the checkpoint was trained with another tokenizer than this run has")


def _changed_files(recorded: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """A file that has moved is known by its name."""
    now = {Path(path).name: digest for path, digest in current.items()} | dict(current)
    changed = [path for path, digest in recorded.items() if now.get(path, now.get(Path(path).name, digest)) != digest]
    return [f"{path} has changed since the checkpoint was saved" for path in changed]


def _describe(dist: Distribution) -> dict[str, str]:
    described = {"version": core_version() if dist.name == CORE else dist.version}
    if dist.editable_path is not None:
        described["commit"] = _commit(dist.editable_path)
    return described


@functools.cache
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
