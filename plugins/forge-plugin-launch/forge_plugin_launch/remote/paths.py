"""Paths of a run on nodes that have a copy of one folder of this machine, and storage at other paths."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import attrs

from forge_core.config.keys import resolved_fields
from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import JobError, Problem
from forge_core.job import Job
from forge_plugin_launch.clusters import SubmittedRun
from forge_plugin_launch.remote.secret_values import known_token, texts


def is_below(path: str, mounts: Iterable[str]) -> str:
    """Returns the mount that a path is in, the innermost one; empty if it is in none."""
    place = Path(os.path.expanduser(path))
    found = [mount for mount in mounts if place.is_relative_to(os.path.expanduser(mount))]
    return max(found, key=len, default="")


def has_object_store(job: Job) -> bool:
    """Whether checkpoints go to an object store, so that they need no folder that nodes share."""
    # The storage `objects` belongs to a distribution that this one need not require; no other has a URL
    return "url" in attrs.fields_dict(type(job.checkpoint.storage))


def path_problems(job: Job, mounts: Iterable[str], copied: Path) -> Iterator[Problem]:
    """Yields the paths of a job that nodes do not have.

    Args:
        job: the checked job.
        mounts: paths at which nodes have storage, images aside.
        copied: folder of this machine that nodes have a copy of.
    """
    places = list(mounts)
    for key, value in _paths(job, ""):
        path = Path(os.path.expanduser(value))
        # A path that is not here may be part of the image, or of a run folder
        if key == "job.output" or not path.exists() or is_below(value, places):
            continue
        if path.is_absolute() or not is_inside(path, copied):
            yield Problem(key, f"{value!r} is a path of this machine, which the nodes do not have; mount it there")


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or below it, by their names."""
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def _paths(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields the values of all keys of a job that are paths, by the types of their fields."""
    if isinstance(value, Mapping | list | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        found: list[tuple[str, Any, Any]] = [(str(key), child, None) for key, child in entries]
    elif attrs.has(type(value)):
        # Types as they are at run time: annotations are texts
        found = [(key, getattr(value, f.name), f.type) for key, f in resolved_fields(type(value)).items()]
    else:
        return
    for key, child, type_ in found:
        below = f"{path}.{key}" if path else key
        if {FilePath, Path}.isdisjoint(_leaves(type_)):
            yield from _paths(child, below)
        else:
            # A path, or several in an array or a table
            named = texts(os.fspath(child) if isinstance(child, Path) else child, below)
            yield from ((place, text) for place, text in named if text)


def _leaves(type_: Any) -> Iterator[Any]:
    """The types that a type is made of: `FilePath` of `FilePath | tuple[FilePath, ...]`."""
    arguments = get_args(type_)
    yield from (leaf for argument in arguments for leaf in _leaves(argument)) if arguments else (type_,)


def job_files(run: SubmittedRun) -> list[str]:
    """The job files of a run: its words before the first option."""
    count = next((number for number, word in enumerate(run.words) if word.startswith("-")), len(run.words))
    return [*run.words[:count]]


def demand_sendable(run: SubmittedRun, copied: Path) -> None:
    """Raise a `JobError` for job files that are not in the folder that nodes get, and for tokens in what they are sent.

    Args:
        run: to be submitted.
        copied: folder of this machine that nodes have a copy of.
    """
    if not is_inside(run.work, copied):
        raise JobError(f"the nodes have a copy of {copied}, which this working directory is not in: {run.work}")
    problems = []
    for name in job_files(run):
        if Path(name).is_absolute() or not is_inside(run.work / name, copied):
            where = f"write its path relative to {run.work}, in {copied}"
            problems.append(Problem("", f"the nodes have a copy of {copied} and no other file; {where}", name))
    for name, text in [*_contents(run), *(("command line", word) for word in run.words)]:
        for number, line in enumerate(text.splitlines(), start=1):
            if token := known_token(line):
                message = f"has {token}, which looks like a secret and would be sent; name a variable instead"
                problems.append(Problem("", message, f"{name}:{number}"))
    if problems:
        raise JobError(problems)


def _contents(run: SubmittedRun) -> Iterator[tuple[str, str]]:
    for name in job_files(run):
        if (run.work / name).is_file():
            yield name, (run.work / name).read_text(errors="replace")


def folder_line(work: Path, copied: Path) -> str:
    """The line of shell that goes from the copied folder to the working directory; empty if they are the same."""
    inner = os.path.relpath(work, copied)
    return "" if inner == "." else f"cd {shlex.quote(inner)}"


def name_of(name: str, allowed: str, longest: int, first: str) -> str:
    """Returns the name of a run where only some characters are allowed, `-` among them.

    Names that had to be changed end with a digest of the original, so that `a.b` and `a-b` remain two runs.

    Args:
        name: `job.name`.
        allowed: the characters.
        longest: characters of a name.
        first: what a name begins with whose own first character is no letter.
    """
    lower = name.lower() if "A" not in allowed else name
    plain = "".join(letter if letter in allowed else "-" for letter in lower)
    plain = "-".join(filter(None, plain.split("-")))
    if not plain[:1].isalpha():
        plain = f"{first}{plain}"
    if plain == name and len(plain) <= longest:
        return plain
    return f"{plain[: longest - 7].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def by_variable(entries: Iterable[str]) -> Mapping[str, str | None]:
    """Variables of `NAME=value` and `NAME` by name; None without a value."""
    return {name: value if equals else None for name, equals, value in (each.partition("=") for each in entries)}
