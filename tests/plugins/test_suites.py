"""Every first-party component of a kind that has a suite is held to it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from forge_core.plugins.catalog import Catalog

ROOT = Path(__file__).parents[2]


@cache
def sources() -> list[str]:
    return [path.read_text() for path in [*ROOT.glob("plugins/**/tests/**/*.py"), *ROOT.glob("tests/**/*.py")]]


def components_under_test(suite: str) -> set[str]:
    """Names of the classes that the subclasses of a suite make, anywhere in the tests."""
    made = set[str]()
    for source in sources():
        if suite not in source:
            continue  # parsing all of the tests takes seconds
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and suite in {getattr(base, "id", "") for base in node.bases}:
                made |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return made


@pytest.mark.parametrize("kind", ["optimizer", "router", "scheduler", "logger"])
def test_every_component_of_a_kind_has_its_suite(kind: str) -> None:
    suite = f"{kind.capitalize()}Suite"
    offers = [offer for offer in Catalog.installed().offers(kind) if offer.distribution.name.startswith("forge-")]
    classes = {offer.value.rpartition(":")[2] for offer in offers}
    assert classes
    assert sorted(classes - components_under_test(suite)) == []
