"""The mix file, the mixtures that proxies train on, and what stands for one in a job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen
from attrs.validators import and_, deep_mapping, ge, instance_of, min_len

from forge_core.config.load import load_job
from forge_core.config.mixture import source_names
from forge_core.config.structure import structure
from forge_core.config.tree import read_job
from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import JobError, Problem, did_you_mean, listed
from forge_core.plugins.catalog import Catalog, install_line
from forge_plugin_ladder.values import Values

if TYPE_CHECKING:
    from forge_core.job import Job

AMOUNTS: Any = deep_mapping(instance_of(str), ge(0))
STRENGTHS = (0.5, 5.0)
"""Of the Dirichlet distribution, for each part of a mixture: from sparse mixtures to ones near the natural one."""
SPARSE = 0.02
"""Shares below this are 0: a source that is met once in fifty sequences shows nothing in a proxy."""
FEWEST = 3
"""Proxies for each part of a mixture by default; Olmix has as many as grow linearly with the parts."""


@frozen(kw_only=True)
class Mix:
    """A mix file."""

    job: FilePath
    """The proxies' job, relative to this file; its sources have names."""
    output: FilePath = "mix"
    """Folder of all that the command makes, relative to the working directory."""
    runs: int = field(default=0, validator=ge(0))
    """Proxies, of which the first has the natural mixture; 0: three for each part and one."""
    seed: int = field(default=0, validator=ge(0))
    """Of the mixtures that are drawn."""
    natural: Mapping[str, float] = field(factory=dict, validator=AMOUNTS)
    """`[natural]`: amounts by source, such as their tokens, whose proportions are what the result is compared with and
    what mixtures are drawn around; by default the weights of the job."""
    groups: Mapping[str, Mapping[str, float]] = field(
        factory=dict, validator=deep_mapping(instance_of(str), and_(min_len(1), AMOUNTS))
    )
    """`[groups.NAME]`: sources that keep their proportions, with these amounts, and are one part of the mixture. So a
    mixture is reused when another source is added or changed (Olmix, section 4)."""
    metrics: Mapping[str, float] = field(default={"eval/loss": 1.0}, validator=[min_len(1), AMOUNTS])
    """`[metrics]`: metrics of the last evaluation that should be small, such as losses and bits a byte, by weight."""
    tokens: float = field(default=0.0, validator=ge(0))
    """Tokens of the run that the mixture is for: with the `max_epochs` of sources, they limit shares; 0: not."""
    regularization: float = field(default=0.05, validator=ge(0))
    """Nats of the metric that each nat of divergence from the natural mixture must gain (Olmix)."""


@frozen
class Parts:
    """The parts of a mixture: sources, and groups of them."""

    names: Sequence[str]
    sources: Sequence[str]
    inner: Values = field(eq=False)
    """(parts, sources): the share of each source in a part."""
    natural: Values = field(eq=False)
    """(parts,): the natural shares."""

    def weights(self, shares: Values) -> dict[str, float]:
        """Returns the weights of all sources for shares (parts,) of the parts."""
        return dict(zip(self.sources, map(float, shares @ self.inner), strict=True))


def read_mix(path: Path, catalog: Catalog) -> tuple[Mix, Path, Job, Parts]:
    """Read a mix file and its job.

    Returns:
        The file, the path of the job, the job, and the parts of its mixtures.

    Raises:
        JobError: either cannot be read, or they do not fit; lists every problem.
    """
    root, problems = read_job([path])
    mix, findings = structure(root, Mix, catalog)
    if problems := [*problems, *findings.problems]:
        raise JobError([*problems, *install_line(findings.missing)])
    base = path.parent / Path(mix.job).expanduser()
    job = load_job(base, catalog=catalog, world_size=1)
    problems = list(_problems(mix, job))
    if problems:
        raise JobError(problems)
    return mix, base, job, _parts(mix, job)


def _problems(mix: Mix, job: Job) -> Iterator[Problem]:
    names = source_names(job)
    if unnamed := [name for name, source in zip(names, job.data.sources, strict=True) if source.name is None]:
        yield Problem("job", f"its sources {listed(unnamed)} have no name; give each a name")
    tables = {"natural": mix.natural, **{f"groups.{name}": table for name, table in mix.groups.items()}}
    for where, table in tables.items():
        for name in table:
            if name not in names:
                message = f"the job has no such source, but {', '.join(names)}{did_you_mean(name, names)}"
                yield Problem(f"{where}.{name}", message)
    empty = [where for where, table in {**tables, "metrics": mix.metrics}.items() if table and not any(table.values())]
    yield from (Problem(where, "all amounts are 0") for where in empty)
    grouped = [name for table in mix.groups.values() for name in table]
    if twice := sorted({name for name in grouped if grouped.count(name) > 1}):
        yield Problem("groups", f"{listed(twice)} are in two groups")
    for name in mix.groups:
        if name in names:
            yield Problem(f"groups.{name}", "is the name of a source, too")
    count = len(names) - len(grouped) + len(mix.groups)
    if count < 2:
        yield Problem("groups" if mix.groups else "job", "a mixture needs two parts or more")
    if 0 < mix.runs < count + 3:
        yield Problem("runs", f"{mix.runs}, but a law of {count} parts has {count + 1} values and needs {count + 3}")
    if job.data.phases:
        yield Problem("job", "has phases, which change its weights; leave them out")
    if job.data.temperature != 1:
        yield Problem("job", "has a temperature, which changes its weights; leave it out")


def _parts(mix: Mix, job: Job) -> Parts:
    sources = source_names(job)
    amounts = mix.natural or {name: source.weight for name, source in zip(sources, job.data.sources, strict=True)}
    whole = np.array([amounts.get(name, 0.0) for name in sources])
    grouped = {name for table in mix.groups.values() for name in table}
    tables: dict[str, Mapping[str, float]] = {name: {name: 1.0} for name in sources if name not in grouped}
    tables |= mix.groups
    inner = np.array([[table.get(name, 0.0) for name in sources] for table in tables.values()], dtype=np.float64)
    inner /= inner.sum(1, keepdims=True)
    # A group's natural share is the sum over its sources
    natural = np.array([sum(whole[sources.index(name)] for name in table) for table in tables.values()])
    return Parts(tuple(tables), tuple(sources), inner, natural / natural.sum())


def mixtures(mix: Mix, parts: Parts) -> Values:
    """Returns the shares of each proxy, (runs, parts): the natural ones, and draws around them.

    Dirichlet distributions have the natural mixture as their mean and strengths between sparse and near, one for each
    draw. Sources that are 0 in the natural mixture have the smallest share of the others there, so that they are tried.
    """
    count = len(parts.names)
    # Draws of one generator: a file with more runs begins with the same mixtures
    generator = np.random.default_rng(mix.seed)
    mean = np.where(parts.natural > 0, parts.natural, parts.natural[parts.natural > 0].min())
    mean /= mean.sum()
    found = [parts.natural]
    low, high = map(math.log, STRENGTHS)
    while len(found) < (mix.runs or FEWEST * count + 1):
        strength = math.exp(generator.uniform(low, high)) * count
        shares = generator.dirichlet(strength * mean)
        shares = np.where(shares < SPARSE, 0.0, shares)
        shares /= shares.sum()
        # A single source is drawn often, and one proxy measures it
        if np.abs(np.stack(found) - shares).max(1).min() > 1e-6:
            found.append(shares)
    return np.stack(found)


def settings(shares: Values, parts: Parts) -> dict[str, str]:
    """Returns the keys of a proxy that has this mixture from its first step to its last, values as in TOML."""
    weights, keys = parts.weights(shares), dict[str, str]()
    for number, name in enumerate(parts.sources):
        keys[f"data.sources.{number}.weight"] = repr(weights[name])
        # Limits are those of the large run: in a proxy, others would take the part of a source that has reached its own
        keys[f"data.sources.{number}.max_epochs"] = "0.0"
    return keys
