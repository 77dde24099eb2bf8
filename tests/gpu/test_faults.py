"""The pretended device finds mistakes of code for GPUs, each at its line."""

from __future__ import annotations

import pytest

from forge_testing.pretend import on_device
from gpu.faults import FAULTS, found_on_meta, found_on_the_device


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return on_device(found_on_the_device)


@pytest.mark.parametrize("name", [function.__name__ for function in FAULTS])
def test_a_mistake_is_named_by_its_line(name: str, found: dict[str, str]) -> None:
    assert found[name]


def test_the_meta_device_found_half_of_them() -> None:
    """What the steps on the meta device, which the pretended one replaced, would have noticed."""
    assert len(FAULTS) == 20
    assert len(found_on_meta()) == 12
