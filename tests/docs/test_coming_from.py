"""The tables for users of other trainers name keys that there are."""

from __future__ import annotations

import re

import pytest
from fences import ROOT

from forge_core import Catalog
from forge_core.config.field_types import component_in
from forge_core.config.tree import hints
from forge_core.job import Job
from forge_kit.tools.documented_keys import keys_of
from forge_plugin_author.explain import section_in

PAGE = ROOT / "docs" / "coming-from.md"
SECTIONS = "|".join(key.name for key in keys_of(Job))
PATH = re.compile(rf"(?:{SECTIONS})(?:\.[a-z_0-9]+)+")
ANSWERS = [answer for names in hints("keys").values() for answer in names.values()]
PATHS = sorted({path for text in ANSWERS for code in re.findall(r"`([^`]+)`", text) for path in PATH.findall(code)})


def has_key(cls: type, path: str) -> bool:
    """Whether a section or component has a key; of a nested component, whether some type that is installed has it."""
    name, _, rest = path.partition(".")
    key = next((key for key in keys_of(cls) if key.name == name), None)
    if key is None:
        return name == "type"
    if not rest:
        return True
    if (section := section_in(key.type)) is not None:
        return has_key(section, rest)
    if (base := component_in(key.type)) is None:
        return False
    catalog = Catalog.installed()
    named, _, inside = rest.partition(".")
    if named in catalog.types(base.kind):  # a table of tables, whose name is the type
        return not inside or has_key(catalog.load(base.kind, named), inside)
    return any(has_key(catalog.load(base.kind, offer.qualified), rest) for offer in catalog.offers(base.kind))


def test_there_are_many():
    assert len(PATHS) > 60


@pytest.mark.parametrize("path", PATHS)
def test_a_key_of_the_table_exists(path):
    assert has_key(Job, path)


@pytest.mark.parametrize("path", ["train.stepz", "optimizer.learning", "parallel.fsdp.shards", "model.ffn.gate"])
def test_a_key_that_does_not_exist_is_noticed(path):
    assert not has_key(Job, path)


def test_the_page_has_a_table_of_each_trainer():
    assert re.findall("<!-- generated: names (.*) -->", PAGE.read_text()) == list(hints("keys"))
