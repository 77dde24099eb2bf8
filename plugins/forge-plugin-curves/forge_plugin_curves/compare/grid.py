"""The runs of a comparison."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from attrs import frozen

from forge_core.config.load import load_job
from forge_core.contracts.errors import JobError, Problem

SEED = "job.seed"
"""Runs that differ in this key only are repetitions of each other."""


@frozen(kw_only=True)
class Cell:
    """A job with settings, without its seed: the unit of comparison."""

    job: Path
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


def trials_of(jobs: Sequence[Path], settings: Sequence[str], overrides: Sequence[str], folder: Path) -> list[Trial]:
    """Combine every job with every combination of the settings.

    Args:
        jobs: job files.
        settings: `key=value,value,…`, each value as in TOML.
        overrides: of all runs.
        folder: run folders are made in it.

    Raises:
        JobError: a setting cannot be read.
    """
    axes = dict(read_setting(text) for text in settings)
    seeds = axes.pop(SEED, [""])
    stems = _stems(jobs)
    trials: list[Trial] = []
    for (job, stem), values in product(zip(jobs, stems, strict=True), product(*axes.values())):
        chosen: dict[str, str] = dict(zip(axes, values, strict=True))
        cell = Cell(job=job, settings=chosen, label=_label(stem if len(jobs) > 1 else "", chosen) or stem)
        for seed in seeds:
            own = [f"--{key}={value}" for key, value in chosen.items()] + ([f"--{SEED}={seed}"] if seed else [])
            name = _file_name(f"{cell.label}{f' seed {seed}' if seed else ''}", taken=[trial.name for trial in trials])
            places = [f'--job.output="{folder}"', f'--job.name="{name}"']
            trials.append(Trial(cell=cell, seed=seed, name=name, overrides=[*overrides, *own, *places]))
    return trials


def read_setting(text: str) -> tuple[str, list[str]]:
    """`optimizer.lr=1e-3,3e-4` -> its key and values. Commas inside brackets, braces and quotes do not divide.

    Raises:
        JobError: there is no key, or a value is empty or comes twice.
    """
    key, _, values = text.removeprefix("--").partition("=")
    parts = list(_divided(values))
    if not key or not all(parts):
        raise JobError(f"--set {text}: not as key=value,value,…; for example --set optimizer.lr=1e-3,3e-4")
    if len(set(parts)) < len(parts):
        raise JobError(f"--set {text}: a value comes twice")
    return key, parts


def check_jobs(trials: Sequence[Trial], ranks: int) -> None:
    """Look at the jobs of all runs, before any is started.

    Raises:
        JobError: with every problem of every run, each once.
    """
    problems = dict[Problem, None]()
    for trial in trials:
        try:
            load_job(trial.cell.job, overrides=trial.overrides, world_size=ranks)
        except JobError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise JobError(problems)


def _divided(values: str) -> Iterator[str]:
    depth, quote, part = 0, "", ""
    for character in values:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and not depth:
            yield part.strip()
            part = ""
            continue
        part += character
    yield part.strip()


def _stems(jobs: Sequence[Path]) -> list[str]:
    """File names without their ends; with their folders where several are equal."""
    stems = [job.stem for job in jobs]
    return [stem if stems.count(stem) == 1 else str(job.with_suffix("")) for stem, job in zip(stems, jobs, strict=True)]


def _label(stem: str, settings: Mapping[str, str]) -> str:
    """Keys by their last part, where that is no other's too."""
    last = [key.rpartition(".")[2] for key in settings]
    short = [name if last.count(name) == 1 else key for name, key in zip(last, settings, strict=True)]
    return ", ".join(([stem] if stem else []) + [f"{n} {v}" for n, v in zip(short, settings.values(), strict=True)])


def _file_name(text: str, taken: Sequence[str]) -> str:
    """The same for the same comparison, so that it can go on."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:80]
    return plain if plain not in taken else f"{plain}-{len(taken)}"
