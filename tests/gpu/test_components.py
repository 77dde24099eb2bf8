"""Every component that can touch tensors of a device does so somewhere on the pretended one: `components.toml`."""

from __future__ import annotations

import pytest

from gpu.components import NOT, found_in, offers, read_table

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
