"""What `check_distribution` says of wrong distributions: real ones, in a folder on `sys.path`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core.testing.distribution import check_distribution

NAME = "forge-plugin-odd"
HEAD = """
from __future__ import annotations
import attrs
from attrs import define, field, frozen
from forge_core import OptimizerComponent, Plugin, SchedulerComponent, TrainingHook, hookimpl
"""
RIGHT = '''
@frozen(kw_only=True)
class Right(SchedulerComponent):
    """Half the rate."""

    factor: float = 0.5
    """What the rate is multiplied by."""

    def build(self, context):
        return lambda step, total: self.factor
'''
FITTING = ("forge-run>=0.1,<0.2",)


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Source of a module, entry points by kind -> the message about the distribution that offers them."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def run(source: str, *, requires=FITTING, samples=None, editable: str = "", **kinds: str) -> str:
        info = tmp_path / "site" / "forge_plugin_odd-1.0.dist-info"
        info.mkdir(parents=True)
        (tmp_path / "site" / "odd.py").write_text(HEAD + source)
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n{needs}")
        entries = "\n".join(f"[forge.{kind}]\ntested = odd:{cls}" for kind, cls in kinds.items())
        (info / "entry_points.txt").write_text(entries)
        if editable:
            (tmp_path / "pyproject.toml").write_text(editable)
            url = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
            (info / "direct_url.json").write_text(json.dumps(url))
        with pytest.raises(AssertionError) as caught:
            check_distribution(NAME, samples)
        return str(caught.value)

    return run


def test_a_right_one_passes(problems):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        problems(RIGHT, scheduler="Right")


def test_one_that_is_not_there_is_told():
    with pytest.raises(
        AssertionError, match=r"forge-plugin-none has 1 problem:\n- it is not installed; pip install -e"
    ):
        check_distribution("forge-plugin-none")


def test_one_that_offers_nothing_is_told():
    with pytest.raises(AssertionError, match=r"it offers nothing: it has no entry points in groups `forge.KIND`; add"):
        check_distribution("attrs")


@pytest.mark.parametrize(
    ("requires", "told"),
    [
        ((), 'it does not require forge-run, so an installer may pair it with any; add "forge-run>=0.1,<0.2" to'),
        (("forge-run>=0.1",), "it requires forge-run>=0.1, without an upper bound, and the next version may break it"),
        (
            ("forge-run>=7,<8",),
            "forge-plugin-odd 1.0 requires forge-run<8,>=7, but this is forge-run 0.1.0; pip install",
        ),
    ],
)
def test_requirements_that_do_not_fit_are_told(problems, requires, told):
    assert told in problems(RIGHT, requires=requires, scheduler="Right")


def test_entry_points_that_came_after_the_install_are_told(problems):
    said = problems(RIGHT, scheduler="Right", editable='[project.entry-points."forge.loss"]\nnew = "odd:New"\n')
    assert "loss new came after it was installed; refresh with: pip install --no-deps -e" in said


CLASS = '@frozen(kw_only=True)\nclass Odd(SchedulerComponent):\n    """Odd."""\n'
BUILD = "    def build(self, context):\n        return lambda step, total: 1.0\n"
PLUGIN = '@define(kw_only=True, slots=False)\nclass Odd(Plugin):\n    """Odd."""\n    @hookimpl\n    '


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("1 / 0", "cannot load scheduler 'tested' from forge-plugin-odd 1.0 (odd:Odd): ZeroDivision"),
        ("import torch\n" + CLASS + BUILD, "importing it imports torch, which makes checking a job slow; import torch"),
        ("class Odd(OptimizerComponent):\n    pass", "is not a subclass of SchedulerComponent"),
        ("class Odd(SchedulerComponent):\n    x: int = 1", "is not an attrs class; decorate it with @attrs.frozen"),
        ("@frozen(kw_only=True)\nclass Odd(SchedulerComponent):\n" + BUILD, "(odd:Odd): the class has no docstring"),
        (CLASS, "it does not implement build(self, context), as SchedulerComponent asks"),
        (
            CLASS + BUILD.replace("context", "context, dim"),
            "build cannot be called: missing a required argument: 'dim'; it",
        ),
        (
            CLASS + BUILD + "    def problems(self, job):\n        return ()\n",
            "problems cannot be called: too many positional",
        ),
        (CLASS + "    x: float = 1.0\n" + BUILD, "x: has no documentation; put a string under the field"),
        (
            CLASS + "    x = field(default=1.0)\n    'X.'\n" + BUILD,
            "x: has no type; annotate it, as in `x: float = 1.0`",
        ),
        (
            CLASS.replace("kw_only=True", "") + "    x: int = 1\n    'X.'\n" + BUILD,
            "x: is positional; decorate the class",
        ),
        (
            CLASS + "    x: Tensor = 1\n    'X.'\n" + BUILD,
            "name 'Tensor' is not defined; import the types of fields outside",
        ),
        (
            CLASS + "    x: int | None = 3\n    'X.'\n" + BUILD,
            "x: may be None, which TOML cannot say, so None must be its",
        ),
        (CLASS + "    x: complex = 1j\n    'X.'\n" + BUILD, "written to TOML, it cannot be read back: "),
        (
            CLASS + "    x: float = field(default=1.0, converter=lambda x: x + 1)\n    'X.'\n" + BUILD,
            "written to TOML and read back, it is not equal: x: 2.0 became 3.0",
        ),
        (
            CLASS + "    x: int = field(validator=attrs.validators.gt(99))\n    'X.'\n" + BUILD,
            'it cannot be made for a trial: x: must be > 99, got 2; give samples={"tested": {…}} with keys that work',
        ),
    ],
)
def test_components_that_are_wrong_are_told(problems, source, told):
    assert told in problems(source, scheduler="Odd")


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("def forge_build_modell(self):\n        pass", "there is no hook 'forge_build_modell'; did you mean"),
        ("def forge_build_model(self, *, context):\n        pass", "parameter 'context' would never be passed"),
        ("def forge_build_model(self, config):\n        pass", "'config'"),
    ],
)
def test_hooks_that_do_not_fit_are_told(problems, method, told):
    assert told in problems(PLUGIN + method, plugin="Odd")


def test_events_that_do_not_exist_are_told(problems):
    head = '@define(kw_only=True, slots=False)\nclass Odd(TrainingHook):\n    """Odd."""\n'
    source = head + "    def on_step(self, context): ..."
    assert "there is no event on_step, so it is never called; did you mean on_step_end?" in problems(source, hook="Odd")


def test_all_problems_are_told_at_once(problems):
    said = problems(CLASS + "    x: float = 1.0\n", requires=("forge-run",), scheduler="Odd")
    first, *lines = said.splitlines()
    assert first == "forge-plugin-odd has 3 problems:"
    assert [line.partition(": ")[2] or line for line in lines] == [
        "- it requires forge-run, without an upper bound, and the next version may break it; write "
        '"forge-run>=0.1,<0.2"',
        "it does not implement build(self, context), as SchedulerComponent asks",
        "x: has no documentation; put a string under the field: meaning, unit, what 0 or None stand for",
    ]


def test_samples_make_what_defaults_cannot(problems):
    source = CLASS + "    x: int = field(validator=attrs.validators.gt(99))\n    'X.'\n" + BUILD
    said = problems(source, scheduler="Odd", samples={"tested": {"x": 100}, "other": {}})
    assert said == f"{NAME} has 1 problem:\n- samples has 'other', which it does not offer; it offers tested"


def test_a_process_that_dies_is_told_with_what_it_said(problems):
    said = problems("import os, sys\nprint('oh no', file=sys.stderr, flush=True)\nos._exit(3)", scheduler="Odd")
    assert said == f"looking at {NAME} ended the process:\noh no\n"


def test_an_import_that_happened_here_hides_nothing(problems):
    assert "torch" in sys.modules or __import__("torch")
    assert "importing it imports torch" in problems("import torch\n" + RIGHT, scheduler="Right")
