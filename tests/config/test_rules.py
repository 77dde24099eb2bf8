"""Rules across fields: which are asked, and how their answers and failures are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
from attrs import define, frozen
from job_parts import make_catalog

from forge_core.config.rules import check_rules
from forge_core.contracts.components import ExecutorComponent, OptimizerComponent, ParallelComponent, Plugin
from forge_core.contracts.errors import Problem
from forge_core.contracts.hookspecs import hookimpl
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_testing.catalogs import with_components
from forge_testing.refusals import at, check_problems, lacks, refuses_all

Load = Callable[..., Job]
Problems = Callable[..., list[Problem]]


@frozen(kw_only=True)
class Strict(OptimizerComponent):
    """Has a rule that names its layout, and one deep inside."""

    nested: tuple[Strict, ...] = ()

    def problems(self, job: Any, layout: Any) -> Iterable[Problem]:
        return [Problem("", f"does not like {layout}")] if not self.nested else []


@frozen(kw_only=True)
class Torn(ParallelComponent):
    def degrees(self) -> dict[str, int | str]:
        raise RuntimeError("no degrees today")


@frozen(kw_only=True)
class Runs(ParallelComponent):
    brings_executor = True


@frozen(kw_only=True)
class Other(ExecutorComponent):
    """Not the default."""


@define(kw_only=True, slots=False)
class Failing(Plugin):
    @hookimpl
    def forge_validate_job(self) -> Iterable[Problem]:
        raise KeyError("steps")


def test_components_at_any_depth_are_asked_with_the_layout(load: Load) -> None:
    job = attrs.evolve(load(), optimizer=Strict(nested=(Strict(), Strict())))
    found = check_rules(job, make_catalog(), world_size=4)
    assert found == [
        Problem("optimizer.nested.0", "does not like replicate 4"),
        Problem("optimizer.nested.1", "does not like replicate 4"),
    ]


def test_a_failure_in_the_degrees_of_a_stage_is_told(load: Load) -> None:
    job = attrs.evolve(load(), parallel={"torn": Torn()})
    [problem, *_] = check_rules(job, make_catalog())
    check_problems([problem], at("parallel", "RuntimeError: no degrees today"))


def test_an_executor_beside_a_stage_that_brings_one_is_refused(load: Load) -> None:
    job = attrs.evolve(load(), parallel={"pipeline": Runs()})
    assert check_rules(job, make_catalog()) == []
    refusals = check_rules(attrs.evolve(job, executor=Other()), make_catalog())
    check_problems(refusals, at("executor", "Other'", "parallel.pipeline"))


def test_a_failure_in_a_plugins_rule_names_the_plugin(load: Load) -> None:
    catalog = with_components(make_catalog(), {"plugin": {"failing": Failing}}, "forge-plugin-failing")
    refusals = check_rules(attrs.evolve(load(), plugins={"mine": Failing()}), catalog)
    facts = ("forge_validate_job", "'mine'", "forge-plugin-failing/failing", "KeyError: 'steps'")
    check_problems(refusals, at("plugins", *facts))


def test_an_installed_plugin_that_the_job_does_not_name_is_not_asked(load: Load, problems: Problems) -> None:
    assert load("[train]\ngrad_clip_norm = 0.0").train.grad_clip_norm == 0.0
    refusals = problems("[train]\ngrad_clip_norm = 0.0\n[plugins.careful]")
    check_problems(refusals, at("train.grad_clip_norm", "(0, 1.0]", "[plugins.careful]", origin="job.toml:2"))


def test_rules_see_the_settings_of_the_plugin(load: Load, problems: Problems) -> None:
    assert load("[plugins.careful]\nlimit = 2.0", "--train.grad_clip_norm=1.5").train.grad_clip_norm == 1.5
    assert not lacks(problems("[plugins.careful]\nlimit = 0.5")[0].message, "(0, 0.5]")


def test_rules_are_checked_beside_mistakes_in_other_tables(problems: Problems) -> None:
    refusals = problems("[job]\nsede = 1\n[model]\nheads = 5")
    check_problems(
        refusals, at("job.sede", "'seed'", origin="job.toml:2"), at("model.heads", 5, "dim 64", origin="job.toml:4")
    )


def test_rules_about_a_table_with_mistakes_wait_for_their_correction(problems: Problems) -> None:
    """The default stands in for the misspelt key, and 4 heads would not divide 30."""
    check_problems(problems("[model]\ndim = 30\nhaeds = 5"), at("model.haeds", "'heads'", origin="job.toml:3"))


def test_rules_are_not_checked_with_another_component_than_the_job_names(problems: Problems) -> None:
    """With the default scheduler in its place, the rule of `careful` would report on one that nobody named."""
    refusals = problems('[train]\ngrad_clip_norm = 0.0\n[plugins.careful]\n[scheduler]\ntype = "cosin"')
    check_problems(refusals, at("scheduler.type", "cosin", origin="job.toml:5"))


def test_the_layout_is_that_of_the_ranks_asked_for(load: Load, problems: Problems) -> None:
    stages = "[parallel.tp]\ndegree = 2\n[parallel.fsdp]"
    assert load(stages, world_size=8).parallel["tp"].degrees() == {"tp": 2}
    check_problems(problems(stages, world_size=3), at("parallel", "tp 2", "3 ranks", origin="job.toml:1"))


def test_problems_are_data_as_well_as_text(load: Load) -> None:
    steps = at("train.steps", "> 0", "got 0", origin="job.toml:2")
    with refuses_all(steps, at("job.sede", "'seed'", origin="--job.sede=1")):
        load("[train]\nsteps = 0", "--job.sede=1")


def test_workers_without_their_loader_name_once_what_to_install(load: Load) -> None:
    job = load()
    job = attrs.evolve(job, data=attrs.evolve(job.data, workers=2))
    without = Catalog(offer for offer in make_catalog().offers() if offer.kind != "loader")
    [problem] = check_rules(job, without)
    check_problems([problem], at("data.workers", "'nodes'", "pip install forge-plugin-torchdata"))
    assert problem.message.count("pip install") == 1
