"""What `check_distribution` says of wrong distributions: real ones, in a folder on `sys.path`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from forge_testing.distribution import check_distribution
from forge_testing.refusals import lacks, naming

pytestmark = pytest.mark.thorough

NAME = "forge-plugin-odd"
HEAD = """
from __future__ import annotations
import attrs
from attrs import define, field, frozen
from forge_core import OptimizerComponent, Plugin, SchedulerComponent, TrainingHook, hookimpl
"""
CLASS = '@frozen(kw_only=True)\nclass Odd(SchedulerComponent):\n    """Odd."""\n'
BUILD = "    def build(self, context):\n        return lambda step, total: 1.0\n"
LIVE = '@define(kw_only=True, slots=False)\nclass Odd({}):\n    """Odd."""\n'
IMPLEMENTED = LIVE.format("Plugin") + "    @hookimpl\n"
RIGHT = CLASS + "    x: float = 1.0\n    'What it is.'\n" + BUILD
FITTING = ("forge-run>=0.2,<0.3",)


def install(folder: Path, sources: Mapping[str, Mapping[str, str]], requires: tuple[str, ...] = FITTING) -> Path:
    """A distribution that offers a class `Odd` for each kind and type, each in a module of its own."""
    info = folder / "forge_plugin_odd-1.0.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n{needs}")
    lines = []
    for kind, types in sources.items():
        lines.append(f"[forge.{kind}]")
        for type_, source in types.items():
            (folder / f"odd_{type_}.py").write_text(HEAD + source)
            lines.append(f"{type_} = odd_{type_}:Odd")
    (info / "entry_points.txt").write_text("\n".join(lines))
    return info


def told_of(samples: Mapping[str, Mapping[str, object]] | None = None) -> str:
    with pytest.raises(AssertionError) as caught:
        check_distribution(NAME, samples)
    return str(caught.value)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


# --- the distribution ----------------------------------------------------------------------------------------------


def test_a_right_one_passes(site):
    install(site, {"scheduler": {"right": RIGHT}})
    check_distribution(NAME)


def test_one_that_is_not_there_is_told():
    with pytest.raises(AssertionError, match=naming("forge-plugin-none", "1 problem", "pip install")):
        check_distribution("forge-plugin-none")


def test_one_that_offers_nothing_is_told():
    with pytest.raises(AssertionError, match=naming("forge.KIND")):
        check_distribution("attrs")


@pytest.mark.parametrize(
    ("requires", "facts"),
    [
        ((), ["forge-run", '"forge-run>=0.2,<0.3"']),
        (("forge-run>=0.1",), ["forge-run>=0.1", "upper bound"]),
        (("forge-run>=7,<8",), ["forge-plugin-odd 1.0", "forge-run<8,>=7", "forge-run 0.2.0"]),
    ],
)
def test_requirements_that_do_not_fit_are_told(site, requires, facts):
    install(site, {"scheduler": {"right": RIGHT}}, requires)
    assert not lacks(told_of(), *facts)


def test_entry_points_that_came_after_the_install_are_told(site, tmp_path):
    info = install(site, {"scheduler": {"right": RIGHT}})
    (tmp_path / "pyproject.toml").write_text('[project.entry-points."forge.loss"]\nnew = "odd:New"\n')
    (info / "direct_url.json").write_text(json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}}))
    assert not lacks(told_of(), "loss new", "pip install --no-deps -e")


def test_a_heavy_import_is_told_even_if_it_happened_here_before(site):
    import torch  # noqa: F401

    install(site, {"scheduler": {"heavy": "import torch\n" + RIGHT}})
    assert not lacks(
        told_of(), NAME, "1 problem", "'heavy'", "odd_heavy:Odd", "import torch", "`build`", "TYPE_CHECKING"
    )


def test_a_process_that_dies_is_told_with_what_it_said(site):
    install(site, {"scheduler": {"dead": "import os, sys\nprint('oh no', file=sys.stderr, flush=True)\nos._exit(3)"}})
    assert not lacks(told_of(), NAME, "oh no")


def test_samples_make_what_defaults_cannot(site):
    source = CLASS + "    x: int = field(validator=attrs.validators.gt(99))\n    'X.'\n" + BUILD
    install(site, {"scheduler": {"large": source}})
    said = told_of({"large": {"x": 100}, "other": {}})
    assert not lacks(said, NAME, "1 problem", "'other'", "large")


DECLARES = (
    """
from forge_core import hookspec
class Specifications:
    @hookspec(firstresult=True)
    def forge_build_thing(self, component, context): ...
"""
    + IMPLEMENTED
)
DECLARES += "    def forge_add_hookspecs(self):\n        return Specifications\n"


def test_a_plugin_may_implement_a_hook_that_another_one_declares(site):
    implements = IMPLEMENTED + "    def forge_build_thing(self, component): ...\n"
    install(site, {"plugin": {"declares": DECLARES, "implements": implements}})
    check_distribution(NAME)


def test_a_broken_neighbour_is_not_the_fault_of_a_plugin(site):
    implements = IMPLEMENTED + "    def forge_build_thing(self, component): ...\n"
    install(site, {"plugin": {"declares": "1 / 0\n" + DECLARES, "implements": implements}})
    told = told_of()
    assert not lacks(told, "2 problems", "'forge_build_thing'", "ZeroDivisionError")


# --- its components ------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "broken": ("1 / 0", "from forge-plugin-odd 1.0 (odd_broken:Odd): ZeroDivisionError: division by zero"),
    "other_kind": ("class Odd(OptimizerComponent):\n    pass", "is not a subclass of SchedulerComponent"),
    "bare": ("class Odd(SchedulerComponent):\n    x: int = 1", "is not an attrs class; decorate it with @attrs.frozen"),
    "silent": ("@frozen(kw_only=True)\nclass Odd(SchedulerComponent):\n" + BUILD, "the class has no docstring"),
    "empty": (CLASS, "it does not implement build(self, context), which SchedulerComponent requires"),
    "other_build": (CLASS + BUILD.replace("context", "context, dim"), "build cannot be called: missing a required"),
    "other_problems": (CLASS + BUILD + "    def problems(self, job): ...", "problems cannot be called: too many pos"),
    "undocumented": (CLASS + "    x: float = 1.0\n" + BUILD, "x: has no documentation; put a string under the"),
    "untyped": (CLASS + "    x = field(default=1.0)\n    'X.'\n" + BUILD, "x: has no type; annotate it, as in `x: f"),
    "positional": (RIGHT.replace("(kw_only=True)", ""), "x: is positional; decorate the class with @frozen(kw_only"),
    "unknown_type": (RIGHT.replace("float", "Tensor"), "name 'Tensor' is not defined; import the types of fields out"),
    "no_null": (RIGHT.replace("float", "float | None"), "x: may be None, which TOML cannot say, so None must be its"),
    "no_toml": (CLASS + "    x: complex = 1j\n    'X.'\n" + BUILD, "written to TOML, it cannot be read back: "),
    "unequal": (
        CLASS + "    x: float = field(default=1.0, converter=lambda x: x + 1)\n    'X.'\n" + BUILD,
        "written to TOML and read back, it is not equal: x: 2.0 became 3.0",
    ),
    "large": (
        CLASS + "    x: int = field(validator=attrs.validators.gt(99))\n    'X.'\n" + BUILD,
        'it cannot be made for a trial: x: must be > 99, got 2; give samples={"large": {…}} with keys that work',
    ),
}
PLUGINS = {
    "misspelt": (
        IMPLEMENTED + "    def forge_build_modell(self): ...",
        "there is no hook 'forge_build_modell'; did you",
    ),
    "never_passed": (
        IMPLEMENTED + "    def forge_build_model(self, *, context): ...",
        "parameter 'context' would never",
    ),
    "renamed": (IMPLEMENTED + "    def forge_build_model(self, config): ...", "'config'"),
    "idle": (LIVE.format("Plugin") + "    pass", "implements no hook; mark its methods with @forge_core.hookimpl"),
}
HOOKS = {
    "no_event": (
        LIVE.format("TrainingHook") + "    def on_step(self, context): ...",
        "there is no event on_step, so it is never called; did you mean on_step_end?",
    )
}
CASES = {"scheduler": SCHEDULERS, "plugin": PLUGINS, "hook": HOOKS}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[str]]:
    """Kind and type -> what is told of it, when all are looked at together."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, {kind: {type_: source for type_, (source, _) in cases.items()} for kind, cases in CASES.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        _, *lines = told_of().splitlines()

    def of(kind: str, type_: str) -> list[str]:
        names = (f"{kind} '{type_}'", f"{kind} '{NAME}/{type_}'")
        return [line for line in lines if any(name in line for name in names)]

    return of


@pytest.mark.parametrize(("kind", "type_"), [(kind, type_) for kind, cases in CASES.items() for type_ in cases])
def test_what_is_wrong_is_told_once(problems: Callable[[str, str], list[str]], kind: str, type_: str) -> None:
    _, told = CASES[kind][type_]
    assert [told in problem for problem in problems(kind, type_)] == [True], problems(kind, type_)
