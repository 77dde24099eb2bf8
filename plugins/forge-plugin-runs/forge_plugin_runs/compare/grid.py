"""The runs of a comparison: jobs with every combination of settings, and runs that exist."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from forge_core.checkpoint.run_diff import text_changes
from forge_core.checkpoint.run_folder import JOB
from forge_core.config.load import dump_job, load_job
from forge_core.contracts.errors import JobError, Problem
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog

SEED = "job.seed"
"""Runs that differ in this key only are repetitions of each other."""
NAMES = ("job.name", "job.output")
"""Keys in which all runs differ."""
KINDS = ("log", "uniform", "int")
_DISTRIBUTION = re.compile(rf"({'|'.join(KINDS)})\((.*)\)")


@frozen(kw_only=True)
class Cell:
    """A job with settings, without its seed: the unit of comparison."""

    job: Path
    """The job file; of a run that exists, its folder."""
    settings: Mapping[str, str]
    label: str
    """Name in the table and the picture."""


@frozen(kw_only=True)
class Trial:
    """One run of a cell."""

    cell: Cell
    seed: str
    """Value of `--set job.seed`; empty: the job's own."""
    name: str
    """Name of its run folder, unique in the comparison."""
    overrides: Sequence[str]
    digest: str = ""
    """SHA-256 of the resolved job, once that is known."""
    arguments: Sequence[str] = ()
    """Further arguments of `forge-run`, such as the checkpoint to start from."""


@frozen
class Distribution:
    """Values of a key for a search: `log(1e-4,1e-2)`, `uniform(0,1)`, `int(2,8)`."""

    kind: str
    low: float
    high: float


def trials_of(jobs: Sequence[Path], settings: Sequence[str], overrides: Sequence[str], folder: Path) -> list[Trial]:
    """Combine every job with every combination of the settings.

    Args:
        jobs: job files.
        settings: `key=value,value,…`, each value as in TOML.
        overrides: of all runs.
        folder: run folders are made in it.

    Raises:
        JobError: a setting cannot be read, or is a distribution.
    """
    axes = dict(read_setting(text) for text in settings)
    for key, values in axes.items():
        if any(_DISTRIBUTION.fullmatch(value) for value in values):
            raise JobError(f"--set {key}={','.join(values)}: a distribution is for a search; add --search optuna")
    # Not part of the cell: runs that differ in their seed alone are repetitions
    seeds = axes.pop(SEED, [""])
    stems = _stems(jobs)
    trials: list[Trial] = []
    for (job, stem), combination in product(zip(jobs, stems, strict=True), product(*axes.values())):
        chosen: dict[str, str] = dict(zip(axes, combination, strict=True))
        cell = Cell(job=job, settings=chosen, label=label_of(stem if len(jobs) > 1 else "", chosen) or stem)
        for seed in seeds:
            trials.append(trial_of(cell, seed, overrides, folder, taken=[trial.name for trial in trials]))
    return trials


def trial_of(cell: Cell, seed: str, overrides: Sequence[str], folder: Path, taken: Sequence[str] = ()) -> Trial:
    """Make a run of a cell, with a name that is not `taken`."""
    own = [f"--{key}={value}" for key, value in cell.settings.items()] + ([f"--{SEED}={seed}"] if seed else [])
    name = _file_name(f"{cell.label}{f' seed {seed}' if seed else ''}", taken)
    places = [f'--job.output="{folder}"', f'--job.name="{name}"']
    # Places last, as the last override of a key counts: no other may lead a run out of the folder
    return Trial(cell=cell, seed=seed, name=name, overrides=[*overrides, *own, *places])


def read_setting(text: str) -> tuple[str, list[str]]:
    """`optimizer.lr=1e-3,3e-4` -> its key and values. Commas inside brackets, braces and quotes do not divide.

    Raises:
        JobError: there is no key, or a value is empty or comes twice.
    """
    key, _, values = text.removeprefix("--").partition("=")
    parts = list(_divided(values))
    if not key or not all(parts):
        raise JobError(f"--set {text}: not as key=value,value,…; for example --set optimizer.lr=1e-3,3e-4")
    # Equal runs would have one name, and the same results
    if len(set(parts)) < len(parts):
        raise JobError(f"--set {text}: a value comes twice")
    return key, parts


def read_space(settings: Sequence[str]) -> dict[str, Distribution | list[str]]:
    """What a search varies: a distribution, or a list of values, by key.

    Raises:
        JobError: a setting cannot be read, or its range is empty.
    """
    space: dict[str, Distribution | list[str]] = {}
    for text in settings:
        key, values = read_setting(text)
        match = _DISTRIBUTION.fullmatch(values[0])
        if len(values) > 1 or match is None:
            space[key] = values
            continue
        try:
            low, high = (float(part) for part in match[2].split(","))
        except ValueError:
            raise JobError(f"--set {text}: {match[1]}(…) takes two numbers, the ends of the range") from None
        if not low < high or (match[1] == "log" and low <= 0):
            raise JobError(f"--set {text}: the range must go up{', from above 0' if match[1] == 'log' else ''}")
        space[key] = Distribution(match[1], low, high)
    return space


def check_jobs(
    trials: Sequence[Trial], ranks: int, load: Callable[[Trial], Job] | None = None
) -> tuple[list[Trial], list[Job]]:
    """Look at the jobs of all runs, before any is started.

    Args:
        trials: the runs.
        ranks: of each run.
        load: returns the checked job of a run; by default with the files that it reads, which must be here.

    Returns:
        The runs, with their digests, and their jobs.

    Raises:
        JobError: with every problem of every run, each once.
    """
    # An ordered set: most runs have the same problems
    problems = dict[Problem, None]()
    jobs: list[Job] = []
    for trial in trials:
        try:
            jobs.append(load(trial) if load else _load(trial, ranks))
        except JobError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise JobError(problems)
    # Of the resolved job: a changed job file makes a finished run another one
    digests = [hashlib.sha256(dump_job(job).encode()).hexdigest() for job in jobs]
    return [evolve(trial, digest=digest) for trial, digest in zip(trials, digests, strict=True)], jobs


def _load(trial: Trial, ranks: int) -> Job:
    return load_job(trial.cell.job, overrides=trial.overrides, world_size=ranks)


def existing(folders: Sequence[Path]) -> list[Trial]:
    """Returns existing runs, each as a separate cell, named by its folder."""
    stems, settings = _stems(folders), _differences(folders)
    labels = [": ".join(filter(None, [stem, label_of("", own)])) for stem, own in zip(stems, settings, strict=True)]
    return [
        Trial(cell=Cell(job=path, settings=own, label=label), seed="", name=stem, overrides=())
        for path, stem, own, label in zip(folders, stems, settings, labels, strict=True)
    ]


def _differences(folders: Sequence[Path]) -> list[dict[str, str]]:
    """The keys in which the jobs of runs differ, with the value that each has: what a person would call them by."""
    texts = [(folder / JOB).read_text() if (folder / JOB).is_file() else "" for folder in folders]
    known = [text for text in texts if text]
    # One run without a job file, and what it differs in is unknown
    if len(known) < len(texts) or len(texts) < 2:
        return [{} for _ in folders]
    catalog = Catalog.installed()
    # A key in which any two runs differ, differs from the first one in at least one of them
    changes = [{each.path: each for each in text_changes(known[0], text, catalog)} for text in texts]
    firsts = {path: change.before for own in changes for path, change in own.items() if path not in NAMES}
    values = [{path: own[path].after if path in own else before for path, before in firsts.items()} for own in changes]
    return [{path: "none" if value is None else _spelt(value) for path, value in own.items()} for own in values]


def _spelt(value: Any) -> str:
    return value.rpartition("/")[2] if isinstance(value, str) else _toml(value)


def label_of(stem: str, settings: Mapping[str, str]) -> str:
    """`optimizer.type=muon, optimizer.lr=0.02`: keys as a job has them, tables key by key."""
    return ", ".join(([stem] if stem else []) + [part for pair in settings.items() for part in _words(*pair)])


def _words(key: str, value: str) -> Iterator[str]:
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value  # a bare word, such as a type
    if isinstance(parsed, dict) and parsed:
        for name, item in parsed.items():
            yield from _words(f"{key}.{name}", f'"{item}"' if isinstance(item, str) else _toml(item))
    else:
        yield f"{key}={parsed if isinstance(parsed, str) else value}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _divided(values: str) -> Iterator[str]:
    depth, quote, part = 0, "", ""
    for character in values:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        # A comma inside brackets or quotes is part of a value: `betas=[0.9,0.95]`
        elif character == "," and not depth:
            yield part.strip()
            part = ""
            continue
        part += character
    yield part.strip()


def _stems(jobs: Sequence[Path]) -> list[str]:
    """Names without their ends; with their folders where several are equal."""
    # A run folder may have dots in its name, which are no suffix
    paths = [job.with_suffix("") if job.suffix == ".toml" else job for job in jobs]
    stems = [path.name for path in paths]
    return [stem if stems.count(stem) == 1 else str(path) for stem, path in zip(stems, paths, strict=True)]


def _file_name(text: str, taken: Sequence[str]) -> str:
    """Returns a name that is the same whenever a comparison is repeated, so that the comparison can be continued."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:80]
    # Labels that differ in punctuation alone would share a run folder
    return plain if plain not in taken else f"{plain}-{len(taken)}"
