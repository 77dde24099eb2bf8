"""A job that is written loads back equal, whatever it is made of."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from job_parts import Muon, make_catalog
from job_strategies import components, tables

from forge_core import dump_job, load_job
from forge_core.config.keys import walk_components
from forge_core.config.load import to_toml
from forge_core.config.structure import structure
from forge_core.config.tree import Origin, annotate
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog, Offer

SMALL = make_catalog()
USABLE = Catalog([o for o in SMALL.offers() if o.type not in ("sophia", "odd", "soap", "clumsy")])
INSTALLED = Catalog.installed()
COMPONENTS = [offer for offer in INSTALLED.offers() if offer.kind not in ("kind", "command")]
SLOW = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


def read(table: dict[str, Any], type_: Any, catalog: Catalog) -> Any:
    """The typed value of a table. Tables that a check of the class refuses are not of interest here."""
    value, findings = structure(annotate(table, {}, Origin("")), type_, catalog)
    assume(not findings.problems)
    return value


def written(value: Any, catalog: Catalog) -> dict[str, Any]:
    return tomllib.loads(tomli_w.dumps(to_toml(value, catalog)))


@pytest.mark.parametrize(
    "offer",
    [o for o in INSTALLED.offers() if o.kind not in ("kind", "command")],
    ids=lambda o: f"{o.kind}-{o.type}",
)
@SLOW
@given(st.data())
def test_every_installed_component_loads_back_equal(offer: Offer, data: st.DataObject) -> None:
    cls = INSTALLED.load(offer.kind, offer.qualified)
    table = data.draw(tables(cls, INSTALLED))
    base = INSTALLED.kind_base(offer.kind)
    component = read({"type": offer.qualified, **table}, base, INSTALLED)
    assert read(written(component, INSTALLED), base, INSTALLED) == component


@SLOW
@given(tables(Job, USABLE))
def test_whole_jobs_load_back_equal(table: dict[str, Any]) -> None:
    job = read(table, Job, USABLE)
    assert read(written(job, USABLE), Job, USABLE) == job


@SLOW
@given(components(USABLE.kind_base("optimizer"), USABLE))
def test_what_is_written_is_complete(table: dict[str, Any]) -> None:
    """Every key is there, so that another default in a later version would change nothing."""
    component = read(table, USABLE.kind_base("optimizer"), USABLE)
    once = written(component, USABLE)
    assert set(table) <= set(once)
    assert written(read(once, USABLE.kind_base("optimizer"), USABLE), USABLE) == once


def test_types_are_qualified_and_none_is_left_out(load: Callable[..., Job], small_catalog: Catalog) -> None:
    table = tomllib.loads(dump_job(load(), small_catalog))
    assert table["optimizer"] == {
        "type": "forge-plugin-muon/muon",
        "lr": 0.01,
        "momentum": 0.9,
        "nesterov": True,
        "groups": [],
    }
    assert table["loggers"]["console"]["type"] == "forge-run/console"
    assert "seed" not in table["data"]


def test_a_dump_can_be_loaded_from_a_file(
    load: Callable[..., Job], write: Callable[..., Path], small_catalog: Catalog
) -> None:
    job = load("[optimizer]\nlr = 0.5\n[loggers.tensorboard.tags]\n'a.b' = 'x'")
    assert load_job(write(dump_job(job, small_catalog), "resolved.toml"), catalog=small_catalog) == job


def test_a_component_from_a_local_file_is_found_again_from_elsewhere(
    load: Callable[..., Job], write: Callable[..., Path], small_catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(
        "from attrs import frozen\nfrom forge_core import OptimizerComponent\n"
        "@frozen(kw_only=True)\nclass Mine(OptimizerComponent):\n    lr: float = 1.0\n",
        "mine.py",
    ).resolve()
    job = load("", '--optimizer={type = "./mine.py:Mine", lr = 2.0}')
    resolved = write(dump_job(job, small_catalog), "resolved.toml").resolve()
    monkeypatch.chdir("/")
    assert tomllib.loads(resolved.read_text())["optimizer"]["type"] == f"{source}:Mine"
    assert load_job(resolved, catalog=small_catalog) == job


def test_every_component_is_walked_with_its_path(load: Callable[..., Job]) -> None:
    job = load('[model.ffn]\ntype = "moe"\nexperts = 2\n[hooks.hist]\ntype = "grad_histogram"')
    walked = dict(walk_components(job))
    assert list(walked) == [
        "model",
        "model.ffn",
        "model.ffn.router",
        "data.sources.0",
        "data.tokenizer",
        "data.packing",
        "optimizer",
        "scheduler",
        "loss",
        "executor",
        "checkpoint.storage",
        "evaluations.held_out",
        "loggers.console",
        "loggers.jsonl",
        "hooks.hist",
    ]
    assert walked["optimizer"] is job.optimizer
    assert isinstance(walked["optimizer"], Muon)
