"""The files of a job that travel with it, in a ConfigMap: its job files, and its local component files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_launch.clusters import SubmittedRun
from forge_plugin_launch.remote import paths
from forge_plugin_launch.remote.secret_values import known_token

LIMIT = 2**20
"""Bytes of a ConfigMap: etcd's own limit is little more."""


@frozen(kw_only=True)
class JobFiles:
    """Files of a run, and its command line in terms of them."""

    texts: Mapping[str, str]
    """By their paths relative to the working directory in the container."""
    words: tuple[str, ...]
    """`SubmittedRun.words` with the paths that job files have in the container."""


def job_files(run: SubmittedRun, mounted: Sequence[str]) -> JobFiles:
    """Returns the files that a run needs next to its image and its volumes.

    Args:
        run: whose job was checked.
        mounted: paths of volumes: files there are in the container already.

    Raises:
        JobError: a file is missing, is no text, has a token, cannot have its path there, or all are too large together.
    """
    count = len(paths.job_files(run))
    texts: dict[str, str] = {}
    words = [_carried(path, run.work, mounted, texts) for path in run.words[:count]]
    for path in run.component_files:
        # Job files name these by a path that must mean the same there, so that a new place will not do
        if not paths.is_below(str(path), mounted) and not path.is_relative_to(run.work.resolve()):
            raise JobError(
                f"{path}: this component file is outside of {run.work}, so that the job names it by a path that the "
                "container does not have; move it there, or to a volume"
            )
        _carried(str(path), run.work, mounted, texts)
    _refuse_tokens([*texts.items(), *(("command line", word) for word in run.words[count:])])
    _refuse_large(texts)
    return JobFiles(texts=texts, words=(*words, *run.words[count:]))


def _carried(name: str, work: Path, mounted: Sequence[str], texts: dict[str, str]) -> str:
    """Add a file to `texts`; returns its path in the container, relative to the working directory there."""
    path = Path(os.path.normpath(work / name))
    if paths.is_below(str(path), mounted):
        return str(path)
    # Components come with their real paths, job files as they were written
    root = work.resolve() if path.is_relative_to(work.resolve()) else work
    place = str(PurePosixPath(path.relative_to(root))) if path.is_relative_to(root) else path.name
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{name}: cannot be sent with the job: {error}") from error
    if texts.setdefault(place, text) != text:
        raise JobError(f"{name}: another file of the job is {place}, too; give one of them another name")
    return place


def _refuse_tokens(texts: Sequence[tuple[str, str]]) -> None:
    problems = [
        Problem("", f"has {token}, which looks like a token; keep it in a Secret: secrets.NAME", f"{name}:{number}")
        for name, text in texts
        for number, line in enumerate(text.splitlines(), start=1)
        if (token := known_token(line))
    ]
    if problems:
        raise JobError(problems)


def _refuse_large(texts: Mapping[str, str]) -> None:
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    if sum(sizes.values()) > LIMIT:
        largest = max(sizes, key=lambda name: sizes[name])
        raise JobError(
            f"{largest}: has {sizes[largest]:,} bytes, and the files of the job {sum(sizes.values()):,} together, of "
            f"which a ConfigMap takes {LIMIT:,}; put it into the image or on a volume"
        )
