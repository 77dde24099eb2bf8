"""Old import paths of public names work, name the new path, and are the same objects."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import forge_core
from forge_core import ForgeDeprecation
from forge_core.moved import MODULES, REMOVED_IN


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("forge_core.config.dump", "dump_job", "forge_core.config.load"),
        ("forge_core.components", "OptimizerComponent", "forge_core.contracts.components"),
        ("forge_core.protocols", "Model", "forge_core.contracts.model"),
        ("forge_core.protocols", "Dataset", "forge_core.contracts.data"),
        ("forge_core.protocols", "StepOutput", "forge_core.contracts.runtime"),
        ("forge_core.protocols", "PlacesState", "forge_core.contracts.optimizer"),
        ("forge_core.engine.hooks", "StepContext", "forge_core.contracts.contexts"),
        ("forge_core.vocab_parallel", "vocab_gather", "forge_kit.vocab"),
        ("forge_core.modules", "Linear", "forge_kit.modules"),
        ("forge_core.engine.trained", "TrainedModel", "forge_kit.trained"),
        ("forge_core.metrics.jsonl", "read_metrics", "forge_kit.metrics"),
        ("forge_core.testing", "tiny_job", "forge_testing"),
        ("forge_core.testing.suites", "OptimizerSuite", "forge_testing.suites"),
        ("forge_core.testing.fixtures", "catalog", "forge_testing.fixtures"),
    ],
)
def test_an_old_path_leads_to_the_new_object_with_a_warning(old: str, name: str, new: str) -> None:
    with pytest.warns(ForgeDeprecation, match=rf"importing {name} from {old} is deprecated.*import it from {new}"):
        moved = getattr(import_module(old), name)
    assert moved is getattr(import_module(new), name)


@pytest.mark.parametrize("old", MODULES)
def test_every_old_module_can_be_imported(old: str) -> None:
    assert import_module(old).__name__ == old


def test_a_name_of_forge_core_that_moved_is_still_its_own(monkeypatch) -> None:
    assert forge_core.load_model is import_module("forge_kit.trained").load_model
    for name in [name for name in sys.modules if name.partition(".")[0] == "forge_kit"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutKit(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=r"load_model is now forge_kit\.trained: pip install forge-kit"):
        from forge_core import load_model  # noqa: F401


class WithoutKit:
    """Finds no forge_kit."""

    def find_spec(self, name, path=None, target=None):
        if name == "forge_kit":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_the_warning_points_to_the_line_that_imports(tmp_path) -> None:
    (tmp_path / "old.py").write_text("x = 1\nfrom forge_core.context import BuildContext\n")
    done = subprocess.run([sys.executable, "old.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (
        f"{tmp_path}/old.py:2: ForgeDeprecation: importing BuildContext"
        in done.stderr.replace("old.py", f"{tmp_path}/old.py", 1)
        or "old.py:2: ForgeDeprecation: importing BuildContext" in done.stderr
    )


def test_a_name_that_was_never_there_is_missing_as_usual() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from forge_core.protocols import Nothing  # noqa: F401


def test_a_job_names_a_class_by_its_old_path(catalog) -> None:
    with pytest.warns(ForgeDeprecation):
        cls = catalog.load("model", "forge_core.testing:TinyModel")
    assert cls.__module__.startswith("forge_testing")
    assert REMOVED_IN == "0.3"
