"""Names of `forge_core` that forge-kit defines: without it an import says what to install."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

import forge_core
from forge_testing.refusals import naming


def test_a_name_of_the_kit_is_the_same_object(monkeypatch) -> None:
    assert forge_core.load_model is import_module("forge_kit.tools.trained_model").load_model
    for name in [name for name in sys.modules if name.partition(".")[0] == "forge_kit"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutKit(), *sys.meta_path])
    with pytest.raises(
        ModuleNotFoundError, match=naming("load_model", "forge_kit.tools.trained_model", "pip install forge-kit")
    ):
        from forge_core import load_model  # noqa: F401


class WithoutKit:
    """Finds no forge_kit."""

    def find_spec(self, name, path=None, target=None):
        if name == "forge_kit":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
