"""What is to go is announced to those who use it, and goes when it was said to."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import attrs
import pytest
from attrs import define, field, frozen
from packaging.version import Version

from forge_core import (
    ForgeDeprecation,
    Plugin,
    SchedulerComponent,
    deprecated,
    deprecated_key,
    hookimpl,
    hookspec,
    load_job,
)
from forge_core.cli import main
from forge_core.contracts.components import Component
from forge_core.contracts.deprecation import KEY
from forge_core.contracts.hookspecs import PROJECT, ForgeHooks
from forge_core.job import Job
from forge_core.plugins.catalog import CORE, Catalog, core_version
from forge_kit.tools.documented_keys import keys_of
from forge_testing import TINY_JOB
from forge_testing.catalogs import catalog_of, load_target, plugins_with
from forge_testing.refusals import lacks, naming


class OldHooks:
    """Specifications of which one is to go, and an argument of another."""

    @hookspec(warn_on_impl=deprecated("the hook forge_old", "0.9", "implement forge_new"))
    def forge_old(self):
        """Never called."""

    @hookspec(warn_on_impl_args={"layout": deprecated("the argument layout of forge_new", "0.9", "take job")})
    def forge_new(self, job, layout):
        """Never called."""


@define(kw_only=True, slots=False)
class Declares(Plugin):
    @hookimpl
    def forge_add_hookspecs(self):
        return OldHooks


@define(kw_only=True, slots=False)
class Behind(Plugin):
    @hookimpl
    def forge_old(self):
        pass


@define(kw_only=True, slots=False)
class HalfBehind(Plugin):
    @hookimpl
    def forge_new(self, layout):
        pass


@define(kw_only=True, slots=False)
class UpToDate(Plugin):
    @hookimpl
    def forge_new(self, job):
        pass


def test_who_implements_a_hook_that_is_to_go_is_warned():
    with pytest.warns(ForgeDeprecation, match=naming("forge_old", "0.9", "forge_new")) as told:
        plugins_with(declares=Declares(), behind=Behind())
    assert {Path(warning.filename) for warning in told} == {Path(__file__)}


def test_who_takes_an_argument_that_is_to_go_is_warned():
    with pytest.warns(ForgeDeprecation, match=naming("layout", "forge_new", "job")):
        plugins_with(declares=Declares(), behind=HalfBehind())


def test_nobody_else_is():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugins_with(declares=Declares(), current=UpToDate())


@frozen(kw_only=True)
class Decay(SchedulerComponent):
    """A schedule with a key that is to go."""

    floor: float = field(default=0.0, metadata=deprecated_key("0.9", "set min_ratio"))
    """The lowest factor."""

    def build(self, context):
        return lambda step, total: 1.0


SCHEDULER = """
[scheduler]
type = "decay"
floor = {floor}
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Load the job with a floor."""
    monkeypatch.chdir(tmp_path)

    def read(floor: float) -> Job:
        Path("job.toml").write_text(SCHEDULER.format(floor=floor) + TINY_JOB)
        return load_job("job.toml", catalog=catalog_of({"scheduler": {"decay": Decay}}))

    return read


def test_who_sets_a_key_that_is_to_go_is_told_where(load):
    with pytest.warns(ForgeDeprecation) as told:
        assert load(0.5).scheduler.floor == 0.5
    [message] = [str(warning.message) for warning in told]
    assert message.startswith("job.toml:4: scheduler.floor: ")
    assert not lacks(message, "0.9", "set min_ratio")


def test_its_default_is_not_worth_a_word(load):
    """A resolved job has every key."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(0.0).scheduler.floor == 0.0


def test_its_documentation_says_so():
    [key] = keys_of(Decay)
    assert key.doc.startswith("The lowest factor. ")
    assert not lacks(key.doc, "0.9", "set min_ratio")


def test_the_command_line_shows_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("decay.py").write_text(
        "from attrs import field, frozen\n"
        "from forge_core import SchedulerComponent, deprecated_key\n"
        "@frozen(kw_only=True)\n"
        "class Decay(SchedulerComponent):\n"
        "    floor: float = field(default=0.0, metadata=deprecated_key('0.9', 'set min_ratio'))\n"
        "    def build(self, context):\n"
        "        return lambda step, total: 1.0\n"
    )
    Path("job.toml").write_text(SCHEDULER.format(floor=0.5).replace('"decay"', '"./decay.py:Decay"') + TINY_JOB)
    with pytest.warns(ForgeDeprecation, match=naming("job.toml:4: scheduler.floor: ")):
        assert main(["check", "job.toml"]) == 0


def announced(catalog: Catalog) -> dict[str, ForgeDeprecation]:
    """Every deprecation of the core's hooks, sections and components, by what it is of."""
    found: dict[str, ForgeDeprecation] = {}
    for name, method in inspect.getmembers(ForgeHooks, lambda member: hasattr(member, f"{PROJECT}_spec")):
        options = getattr(method, f"{PROJECT}_spec")
        found |= {name: options["warn_on_impl"]} if options["warn_on_impl"] else {}
        found |= {f"{name}({argument})": told for argument, told in (options["warn_on_impl_args"] or {}).items()}
    core = [offer for offer in catalog.offers() if offer.distribution.name == CORE and offer.kind != "command"]
    classes = [load_target(offer, catalog) for offer in core]
    sections = [f.type for f in attrs.fields(attrs.resolve_types(Job)) if attrs.has(f.type)]
    for cls in [Job, *sections, *(cls for cls in classes if issubclass(cls, Component))]:
        warned = {f"{cls.__name__}.{f.name}": f.metadata.get(KEY) for f in attrs.fields(cls)}
        found |= {name: warning for name, warning in warned.items() if warning is not None}
    return found


def late(catalog: Catalog) -> dict[str, str]:
    """What should be gone by now, and the version that was told."""
    told = {name: warning.removed_in for name, warning in announced(catalog).items()}
    return {name: version for name, version in told.items() if Version(version) <= Version(core_version())}


def test_what_is_to_go_goes_in_the_version_that_was_told(catalog):
    assert late(catalog) == {}, "remove these, or tell a later version"


def test_what_should_be_gone_is_found(catalog, monkeypatch):
    options = ForgeHooks.forge_build_loss.forge_spec
    monkeypatch.setitem(options, "warn_on_impl", deprecated("the hook forge_build_loss", "0.0.1", "do without"))
    assert late(catalog) == {"forge_build_loss": "0.0.1"}
