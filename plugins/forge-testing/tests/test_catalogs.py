"""Catalogs in memory: what is given is there, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from attrs import define, evolve, frozen

from forge_core.contracts.components import Component, Plugin
from forge_core.contracts.errors import PluginError
from forge_core.contracts.hookspecs import hookimpl
from forge_core.plugins.catalog import Catalog
from forge_testing import TinyAdamW
from forge_testing.catalogs import load_target
from forge_testing.documents import Sentences
from forge_testing.refusals import naming, refuses


@frozen(kw_only=True)
class Adapter(Component):
    kind = "adapter"


@frozen(kw_only=True)
class LowRank(Adapter):
    rank: int = 4


@define(kw_only=True, slots=False)
class Halved(Plugin):
    @hookimpl(wrapper=True)
    def forge_build_scheduler(self):
        schedule = yield
        return lambda step, total: 0.5 * schedule(step, total)


@pytest.fixture
def catalog(catalog_of) -> Catalog:
    """What the other fixtures take in this module."""
    return catalog_of({"optimizer": {"tiny": TinyAdamW}})


def test_nothing_that_is_installed_leaks_in(catalog):
    assert Catalog.installed().types("optimizer") != catalog.types("optimizer") == ["tiny"]
    assert {offer.distribution.name for offer in catalog.offers()} == {"forge-run", "in-memory"}
    assert catalog.types("loss") == ["cross_entropy"]


def test_the_other_fixtures_take_it(make_job, train, lines):
    summary = train(make_job(steps=2))
    assert len(lines(summary)) == 2
    assert 'type = "in-memory/tiny"' in (summary.folder / "job.toml").read_text()


def test_a_kind_is_declared_by_its_base(catalog_of):
    catalog = catalog_of({"kind": {"adapter": Adapter}, "adapter": {"low_rank": LowRank}}, "forge-plugin-lora")
    assert catalog.load("adapter", "low_rank")() == LowRank(rank=4)
    assert catalog.type_of(LowRank) == "forge-plugin-lora/low_rank"


def test_hooks_of_plugins_are_called_in_memory(plugins_with, make_job, build):
    assert list(plugins_with(halved=Halved()).active) == ["halved"]
    assert build(make_job(plugins={"halved": Halved()})).rates.apply(0, 0) == 0.005


def test_plugins_that_do_not_fit_are_refused(plugins_with):
    class Idle(Plugin):
        pass

    with pytest.raises(PluginError, match=naming("idle", "hook")):
        plugins_with(idle=Idle())


def test_a_command_must_be_a_function(catalog_of):
    catalog = catalog_of({"command": {"greet": lambda argv: 0}})
    [offer] = [offer for offer in catalog.offers("command") if offer.type == "greet"]
    assert load_target(offer, catalog)([]) == 0
    with pytest.raises(PluginError, match=naming("'greet'", "in-memory", "argv")):
        load_target(evolve(offer, target=3), catalog)


def test_sentences_need_a_tokenizer():
    with refuses("", "[data.tokenizer]"):
        Sentences().build(SimpleNamespace(tokenizer=None))
