"""Every component that can touch tensors of a device does so somewhere on the pretended one: `components.toml`.

And `waits.toml` has every class of a suite that waits for the device.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from gpu.components import HERE, NOT, ROOT, found_in, offers, read_table

PLACES, KINDS = read_table()


def test_every_component_has_a_place_or_a_reason() -> None:
    """To give a new one its place: `python tests/gpu/components.py`."""
    installed = offers()
    assert sorted(name for name in installed - PLACES.keys() if name.partition(".")[0] not in KINDS) == []
    assert sorted(PLACES.keys() - installed) == []
    assert sorted(KINDS.keys() - {name.partition(".")[0] for name in installed}) == []


def test_a_reason_is_a_sentence() -> None:
    reasons = [*KINDS.values(), *(place.removeprefix(NOT) for place in PLACES.values() if place.startswith(NOT))]
    assert [reason for reason in reasons if len(reason.split()) < 3] == []


@pytest.mark.parametrize("place", sorted({place for place in PLACES.values() if not place.startswith(NOT)}))
def test_components_are_where_the_table_says(place: str, request: pytest.FixtureRequest) -> None:
    suites = {item.cls for item in request.session.items if isinstance(item, pytest.Function) and item.cls}
    assert sorted({name for name, where in PLACES.items() if where == place} - found_in(place, suites)) == []


def test_a_place_that_is_none_is_found_out() -> None:
    file = "plugins/forge-plugin-mla/tests/test_mla_conformance.py"
    with pytest.raises(AssertionError, match="there is no"):
        found_in(f"{file}::TestNothing", ())
    with pytest.raises(AssertionError, match="does not train on the device"):
        found_in(f"{file}::TestMLAWithoutQueryLatents", ())
    assert "optimizer.lion" not in found_in("run text", ())


def waiting_classes() -> Iterator[tuple[str, Any]]:
    """The attributes `waits` of classes in the tests, which the suites compare with what they count."""
    for path in [*ROOT.glob("plugins/*/tests/**/test_*.py"), *ROOT.glob("tests/**/test_*.py")]:
        if "    waits = {" not in (source := path.read_text()):
            continue
        for node in ast.walk(ast.parse(source)):
            for line in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "waits":
                    yield f"{path.relative_to(ROOT)}::{node.name}", ast.literal_eval(line.value)  # type: ignore[attr-defined]


def test_the_table_of_waits_has_every_class_that_waits() -> None:
    found = dict(waiting_classes())
    assert found
    assert tomllib.loads((HERE / "waits.toml").read_text())["suites"] == found
