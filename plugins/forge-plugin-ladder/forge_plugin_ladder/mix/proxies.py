"""Trains the proxies of a mix file, with the runner of `forge-run compare`, and collects their results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, field, frozen

from forge_core.checkpoint.run_folder import storage_of
from forge_core.checkpoint.storage import read_manifest
from forge_core.contracts.errors import JobError
from forge_core.files import write_atomically
from forge_kit.tools.outputs import MARK, output_file
from forge_plugin_ladder.mix.mixture import Parts, settings
from forge_plugin_ladder.runs import RUNS, last_value, reason
from forge_plugin_ladder.values import Values
from forge_plugin_runs.compare.comparison import Comparison
from forge_plugin_runs.compare.grid import Cell, Trial, trial_of
from forge_plugin_runs.compare.results import read_outcome

SCHEMA = 1
"""Number of the file's layout."""


@frozen(kw_only=True)
class Proxy:
    """A proxy and its result."""

    run: str
    shares: Sequence[float]
    """Of the parts."""
    values: Mapping[str, float] = field(factory=dict)
    """Metrics of its last evaluation."""
    failed: str = ""
    """Why it has no result; it is listed then, and not fitted."""


@frozen(kw_only=True)
class Proxies:
    """The results of a mix file."""

    parts: Sequence[str]
    sizes: Mapping[str, float]
    """Tokens of each source before any is repeated, as the proxies counted them; infinite for a stream."""
    proxies: Sequence[Proxy]

    def usable(self) -> list[Proxy]:
        """Returns those with a result."""
        return [each for each in self.proxies if not each.failed]


def trials_of(shares: Values, parts: Parts, base: Path, out: Path) -> list[Trial]:
    """Returns the proxies as `compare` trains them."""
    trials: list[Trial] = []
    for number, each in enumerate(shares):
        # By numbers and not by shares: a file with more runs keeps those that it has
        cell = Cell(job=base, settings=settings(each, parts), label="natural" if not number else f"mix-{number}")
        trials.append(trial_of(cell, "", (), out / RUNS, taken=[trial.name for trial in trials]))
    return trials


def train(
    trials: Sequence[Trial], out: Path, ranks: int, parallel: int, say: Callable[[str], object]
) -> tuple[bool, list[str]]:
    """Train the proxies that have not finished.

    Returns:
        Whether all were run, False after an interruption; and the names of those that failed.

    Raises:
        JobError: a job is wrong; nothing was started then.
    """
    comparison = Comparison(out=out, ranks=ranks, parallel=parallel, say=say)
    completed = comparison.train(trials)
    entries = comparison.record.entries
    return completed, [name for trial in trials if (name := trial.name) in entries and entries[name].failed]


def collect(
    trials: Sequence[Trial], shares: Values, parts: Parts, out: Path, metrics: Sequence[str], steps: int, seq_len: int
) -> Proxies:
    """Returns the result of each proxy, and the sizes of the sources."""
    record, proxies, sizes = Comparison(out=out).record, [], dict[str, float]()
    for trial, own in zip(trials, shares, strict=True):
        folder, values, failed = out / RUNS / trial.name, dict[str, float](), "never started"
        if trial.name in record.entries:
            failed = reason(read_outcome(trial, folder, record.entries[trial.name]))
        if not failed:
            # Of the last step alone: an earlier evaluation is of another mixture of tokens
            values = {name: last_value(folder, name, steps) for name in metrics}
            missing = [name for name, value in values.items() if not math.isfinite(value)]
            failed = f"no {missing[0]} in its last evaluation" if missing else ""
            # The same in every proxy, also of a source with a weight of 0
            sizes = sizes or _sizes(folder, seq_len)
        proxies.append(Proxy(run=trial.name, shares=tuple(map(float, own)), values=values, failed=failed))
    return Proxies(parts=parts.names, sizes=sizes, proxies=proxies)


def _sizes(folder: Path, seq_len: int) -> dict[str, float]:
    """Tokens of each source, as the last checkpoint of a run counts its sequences."""
    storage = storage_of(folder)
    if not (steps := storage.steps()):
        raise JobError(f"{folder} has no checkpoint, which has the sizes of the sources; keep the last one")
    sources = read_manifest(storage.path(max(steps)))["progress"]["samples"]["sources"]
    return {name: math.inf if each["size"] is None else each["size"] * seq_len for name, each in sources.items()}


def write_proxies(path: Path, found: Proxies) -> None:
    """Write results with every digit, in JSON."""
    # JSON has no infinity: a stream has no size
    content = {**asdict(found), "sizes": {name: size for name, size in found.sizes.items() if math.isfinite(size)}}
    text = json.dumps({"made_by": MARK, "schema": SCHEMA, **content}, indent=1, allow_nan=False)
    write_atomically(output_file(path, "output"), f"{text}\n")


def read_proxies(path: Path, parts: Parts, metrics: Sequence[str]) -> Proxies:
    """Read what `write_proxies` wrote, or the same by hand: results of other programs.

    Raises:
        JobError: the file cannot be read, or is of other parts or metrics.
    """
    # Written by other programs too, so nothing is taken for granted
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}, and this version has {SCHEMA}")
        proxies = [Proxy(**row) for row in content["proxies"]]
        sizes = dict.fromkeys(parts.sources, math.inf) | content["sizes"]
        found = Proxies(parts=tuple(content["parts"]), sizes=sizes, proxies=proxies)
        shares = np.array([each.shares for each in proxies], dtype=np.float64)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise JobError(f"{path} cannot be read as results of proxies: {error}") from None
    if tuple(found.parts) != tuple(parts.names):
        raise JobError(f"{path} is of the parts {', '.join(found.parts)}, and the mix of {', '.join(parts.names)}")
    if shares.shape != (len(proxies), len(parts.names)) or (shares < 0).any() or (abs(shares.sum(1) - 1) > 1e-6).any():
        raise JobError(f"{path}: the shares of each proxy must be one for each part, and 1 together")
    for each in found.usable():
        if missing := [name for name in metrics if name not in each.values]:
            raise JobError(f"{path}: {each.run} has no {missing[0]}, a metric of the mix")
    return found
