"""The ladder file: a base job, sizes, budgets, seeds and rules; and the runs that follow from it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomli_w
from attrs import evolve, field, frozen
from attrs.validators import deep_iterable, deep_mapping, ge, gt, instance_of, min_len

from forge_core.config.load import load_job
from forge_core.config.structure import structure
from forge_core.config.tree import read_job
from forge_core.contracts.components import FilePath, default_type
from forge_core.contracts.errors import JobError, Problem, listed
from forge_core.plugins.catalog import Catalog, install_line
from forge_plugin_ladder.law import Law
from forge_plugin_ladder.planned import STEPS, Planned, overrides
from forge_plugin_ladder.rules import Fixed, Rule, Scale
from forge_plugin_ladder.trunk import HOOK, trunk_settings, with_trunks

if TYPE_CHECKING:
    from forge_core.job import Job

BATCH = "train.global_batch_size"
TAKEN = (STEPS, "train.stop_after", "job.name", "job.output", "job.seed")
"""Keys that the ladder sets itself."""
OUTSIDE = ("embedding", "head")
"""Roles of parameters that `parameters` does not count."""


@frozen(kw_only=True)
class Budgets:
    """`[budgets]`: how long each size is trained, in one unit or several."""

    tokens_per_parameter: tuple[float, ...] = field(default=(), validator=deep_iterable(gt(0)))
    """Tokens for each parameter without embedding and head; 20 is about Chinchilla's."""
    flops: tuple[float, ...] = field(default=(), validator=deep_iterable(gt(0)))
    """FLOPs of a run, by the model's own count; runs of one budget are an IsoFLOP curve."""
    tokens: tuple[float, ...] = field(default=(), validator=deep_iterable(gt(0)))
    """Tokens, the same for every size."""
    least_ratio: float = field(default=0.0, validator=ge(0))
    """Tokens for each parameter below which a size has no run of a budget: the first steps of a large model are far
    from what any law is of, and say little about its size."""
    largest_ratio: float = field(default=0.0, validator=ge(0))
    """Tokens for each parameter beyond which it has none, such as runs that would repeat data; 0: no limit."""

    def has(self, ratio: float) -> bool:
        """Returns whether a run of so many tokens for each parameter is made."""
        return self.least_ratio <= ratio and (not self.largest_ratio or ratio <= self.largest_ratio)


@frozen(kw_only=True)
class Ladder:
    """A ladder, as its file has it."""

    job: FilePath
    """The base job, relative to the ladder's file."""
    output: FilePath = "ladder"
    """Folder of all that the ladder makes, relative to the working directory, as `job.output` is."""
    sizes: Mapping[str, Mapping[str, Any]] = field(validator=min_len(1))
    """`[sizes.NAME]`: keys over `[model]` that make the model of a size: `dim = 256`, `attention.heads = 4`."""
    budgets: Budgets
    seeds: tuple[int, ...] = field(default=(), validator=deep_iterable(ge(0)))
    """Values of `job.seed`, each a further run; none: the base job's."""
    rules: Mapping[str, Rule] = field(factory=dict)
    """`[rules."optimizer.lr"]`: how a key of the job follows from the scale."""
    tune: Mapping[str, tuple[float, ...]] = field(
        factory=dict, validator=deep_mapping(instance_of(str), deep_iterable(gt(0)))
    )
    """`"optimizer.lr" = [0.5, 1, 2]`: factors on what the job or its rule gives, each a run of every size and budget.
    The law is of the best ones, and `fit` finds how the best value follows from parameters and tokens."""
    trunk: bool = False
    """Train what runs of one size and seed have in common once, in the longest; the others branch from its checkpoints
    at the last step that both share, which is where the decay of the shorter one begins."""
    unique_tokens: float = field(default=0.0, validator=ge(0))
    """Tokens of the data, beyond which a run repeats some; 0: as each run has counted them itself."""
    metric: str = field(default="eval/loss", validator=min_len(1))
    """Metric of the last evaluation that the law is of, such as the bits a byte of a task."""
    accuracy: str = ""
    """Metric of the last evaluation that follows from `metric` in a second step, such as a task's accuracy."""
    count: Literal["parameters", "parameters_total"] = "parameters"
    """N of the law: parameters without embedding and head, or all."""
    law: Law = default_type("additive")
    """Form of the loss that is fitted."""


def read_ladder(path: Path, catalog: Catalog) -> Ladder:
    """Read a ladder's file.

    Raises:
        JobError: it cannot be read; lists every problem with its line.
    """
    root, problems = read_job([path])
    found, findings = structure(root, Ladder, catalog)
    problems = [*problems, *findings.problems]
    # What follows from several keys, only of a file that could be read
    if not problems:
        problems = list(_problems(found))
    if problems:
        raise JobError([*problems, *install_line(findings.missing)])
    return found


def _problems(ladder: Ladder) -> Iterator[Problem]:
    if not any((ladder.budgets.tokens_per_parameter, ladder.budgets.flops, ladder.budgets.tokens)):
        yield Problem("budgets", "there is no budget: give tokens_per_parameter, flops or tokens")
    for key in ladder.rules:
        if key in TAKEN or (ladder.trunk and key.startswith(("checkpoint.", HOOK))):
            yield Problem(f"rules.{key}", "the ladder sets this key itself")
    for key, factors in ladder.tune.items():
        if key in TAKEN:
            yield Problem(f"tune.{key}", "the ladder sets this key itself")
        if len(set(factors)) < 3 or len(set(factors)) < len(factors):
            yield Problem(f"tune.{key}", f"{list(factors)}: a best value is found among three different ones or more")


def plan_runs(ladder: Ladder, base: Path, catalog: Catalog) -> list[Planned]:
    """Returns every run of a ladder: each size with each budget and seed.

    Args:
        ladder: as read.
        base: its base job.
        catalog: the installed components.

    Raises:
        JobError: a size or a rule makes a job that cannot run, or a model does not state its FLOPs.
    """
    runs = []
    for name, keys in ladder.sizes.items():
        settings = {f"model.{key}": _toml(value) for key, value in _flat(keys)}
        # Built once for each size, without memory: all its runs have the same model
        job = _load(base, settings, catalog)
        size = _Size(name, settings, job, *_counts(job, catalog))
        for label, tokens in size.budgets(ladder.budgets):
            for factors in _grid(ladder.tune):
                runs += [size.run(label, tokens, seed, ladder.rules, factors) for seed in ladder.seeds or (None,)]
    if left := [name for name in ladder.sizes if all(run.size != name for run in runs)]:
        raise JobError(
            f"budgets: {listed(left)} has none within least_ratio and largest_ratio, in tokens for each parameter; "
            "leave the size out, or add budgets"
        )
    _demand_names(runs)
    _demand_values(runs)
    runs = with_trunks(runs, _jobs(runs, base, catalog), ladder.trunk, catalog)
    if ladder.trunk:
        # Their hooks may want other checkpoints than a trunk has
        trunks = [evolve(run, settings={**run.settings, **trunk_settings(run)}) for run in runs if run.branch_points]
        _jobs(trunks, base, catalog)
    return runs


def _grid(tune: Mapping[str, Sequence[float]]) -> Iterator[Mapping[str, float]]:
    """Every combination of a factor of each key; one without keys where none is tuned."""
    for factors in itertools.product(*tune.values()):
        yield dict(zip(tune, factors, strict=True))


def _demand_names(runs: Sequence[Planned]) -> None:
    """Raise where two runs have one name, and would share a folder: budgets that are equal to three digits."""
    for name, count in Counter(run.name for run in runs).items():
        if count > 1:
            raise JobError(
                f"{count} runs are called {name}: sizes, budgets and seeds must differ, budgets in three digits"
            )


def _demand_values(runs: Sequence[Planned]) -> None:
    """Raise where factors of a whole number are rounded to one value."""
    found: dict[tuple[Any, ...], Planned] = {}
    for run in runs:
        other = found.setdefault((run.size, run.budget, run.seed, *run.tuned.items()), run)
        if other is not run:
            raise JobError(f"{other.name} and {run.name} are one run, as their values are rounded: {dict(run.tuned)}")


def _load(base: Path, settings: Mapping[str, str], catalog: Catalog) -> Job:
    # Sizes and costs need no data, which only the nodes of a cluster may have: runs are checked with them
    return load_job(base, overrides=overrides(settings), catalog=catalog, world_size=1, with_data=False)


def _jobs(runs: Sequence[Planned], base: Path, catalog: Catalog) -> dict[str, Job]:
    """The job of each run by its name; raises with every problem of every job, each once with the runs that have it."""
    problems: dict[Problem, list[str]] = {}
    jobs: dict[tuple[tuple[str, str], ...], Job] = {}
    # Seeds change nothing that a check looks at
    by_settings: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        by_settings.setdefault(tuple(run.settings.items()), []).append(run.name)
    for settings, names in by_settings.items():
        try:
            jobs[settings] = _load(base, dict(settings), catalog)
        except JobError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).extend(names)
    if problems:
        raise JobError([_of_runs(problem, names, len(runs)) for problem, names in problems.items()])
    return {name: jobs[settings] for settings, names in by_settings.items() for name in names}


def _of_runs(problem: Problem, names: Sequence[str], count: int) -> Problem:
    if len(names) == count:
        return problem
    return evolve(problem, message=f"{problem.message} (in {', '.join(names)})")


@frozen
class _Size:
    """A size of the ladder, and its runs."""

    name: str
    settings: Mapping[str, str]
    job: Job
    parameters: int
    parameters_total: int
    flops: float
    """Of a token."""

    def budgets(self, budgets: Budgets) -> Iterator[tuple[str, float]]:
        """Label and tokens of each budget that this size has."""
        for label, tokens in self._all(budgets):
            if budgets.has(tokens / self.parameters):
                yield label, tokens

    def _all(self, budgets: Budgets) -> Iterator[tuple[str, float]]:
        # Labels are parts of the runs' names, and of their folders', in which a plus would become a minus
        for ratio in budgets.tokens_per_parameter:
            yield f"{ratio:g}x", ratio * self.parameters
        for flops in budgets.flops:
            yield f"{flops:.3g}".replace("+", ""), flops / self.flops
        for tokens in budgets.tokens:
            yield f"{tokens:.3g}-tokens".replace("+", ""), tokens

    def run(
        self, budget: str, tokens: float, seed: int | None, rules: Mapping[str, Rule], factors: Mapping[str, float]
    ) -> Planned:
        """The run of a budget; its tokens are rounded to whole steps."""
        values, warnings = self._values(tokens, rules, factors)
        train = self.job.train
        batch = int(values.get(BATCH, train.global_batch_size))
        # FLOPs follow from the tokens that are fed, not from those that were asked for
        sized = evolve(train, global_batch_size=batch)
        steps = max(1, round(tokens / (batch * train.seq_len)))
        if train.batch_schedule is not None:
            # Its steps differ in size, and are counted to the first that has fed them all
            steps = max(1, sized.steps_until(round(tokens / train.seq_len)))
        fed = sized.sample_after(steps) * train.seq_len
        suffix = [] if seed is None else [f"seed-{seed}"]
        return Planned(
            name="-".join([self.name, budget, *map(_label, factors.items()), *suffix]),
            size=self.name,
            budget=budget,
            seed=seed,
            parameters=self.parameters,
            parameters_total=self.parameters_total,
            steps=steps,
            tokens=fed,
            flops=fed * self.flops,
            settings={**self.settings, **values, STEPS: str(steps)},
            warnings=warnings,
            factors=factors,
            tuned={key: float(values[key]) for key in factors},
        )

    def _values(
        self, tokens: float, rules: Mapping[str, Rule], factors: Mapping[str, float]
    ) -> tuple[dict[str, str], list[str]]:
        """What rules and factors set, values as in TOML, and what the rules warn of."""
        values, warnings, train = dict[str, str](), list[str](), self.job.train
        batch = train.global_batch_size
        # The batch first, of which the other keys are functions
        for key in sorted(dict.fromkeys([*rules, *factors]), key=lambda key: key != BATCH):
            rule = rules.get(key) or Fixed(to=_number(self.job, key))
            of_step = math.nan if key == BATCH else float(batch * train.seq_len)
            scale = Scale(
                parameters=self.parameters,
                parameters_total=self.parameters_total,
                tokens=tokens,
                batch_tokens=of_step,
                seq_len=train.seq_len,
            )
            value = rule.value(scale) * factors.get(key, 1.0)
            # No rule is right to a fraction of a sequence or a step
            values[key] = _toml(max(1, round(value)) if _is_whole(self.job, key) else value)
            batch = int(values[key]) if key == BATCH else batch
            if text := rule.warning(scale):
                warnings.append(f"{key}: {text}")
        return values, warnings


def _counts(job: Job, catalog: Catalog) -> tuple[int, int, float]:
    """Parameters without embedding and head, all of them, and FLOPs of a token, of a model without memory."""
    import torch

    from forge_core.contracts.layout import Layout
    from forge_core.engine.build import build_bare_model, build_tokenizer
    from forge_core.parallel.initialise import bare_context

    context = bare_context(job, Layout(), catalog, torch.device("cpu"))
    # Before the model, whose vocabulary may follow from the tokenizer
    _, outline = build_bare_model(job, evolve(context, tokenizer=build_tokenizer(job, context)))
    if outline.flops is None:
        raise JobError("the model does not state its FLOPs (`Model.flops`), which a law needs")
    # A tied head is counted once, with the embedding
    inside = sum(size for name, size in outline.sizes.items() if outline.roles[name] not in OUTSIDE)
    return inside, sum(outline.sizes.values()), outline.flops


def _label(factor: tuple[str, float]) -> str:
    """`lr-0.5x`."""
    key, value = factor
    return f"{key.rpartition('.')[2]}-{value:g}x"


def _is_whole(job: Job, key: str) -> bool:
    """Whether the base job has a whole number at a key."""
    value = _value(job, key)
    return isinstance(value, int) and not isinstance(value, bool)


def _number(job: Job, key: str) -> float:
    """The number that the base job has at a key that is tuned."""
    value = _value(job, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        raise JobError([Problem(f"tune.{key}", f"the job has {value!r} there, of which there are no multiples")])
    return value


def _value(job: Job, key: str) -> Any:
    """What the base job has at a key; None where it has none."""
    value: Any = job
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _toml(value: Any) -> str:
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip()
