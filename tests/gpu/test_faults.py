"""The pretended device finds mistakes of code for GPUs, each at its line."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from forge_testing.pretend import on_device
from gpu.faults import FAULTS, found_on_meta, found_on_the_device
from gpu.shipped_faults import PLANTS, found
from gpu.shipped_faults import RIGHT as RIGHT_RUNS


@pytest.fixture(scope="module")
def named() -> dict[str, str]:
    return on_device(found_on_the_device)


@pytest.mark.parametrize("name", [function.__name__ for function in FAULTS])
def test_a_mistake_is_named_by_its_line(name: str, named: dict[str, str]) -> None:
    assert named[name]


def test_the_meta_device_found_half_of_them() -> None:
    """What the steps on the meta device, which the pretended one replaced, would have noticed."""
    assert len(FAULTS) == 20
    assert len(found_on_meta()) == 12


def planted(folder: str) -> dict[str, str]:
    return found(folder)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return on_device(planted, str(tmp_path_factory.mktemp("planted")))


@pytest.mark.parametrize("name", RIGHT_RUNS)
def test_runs_without_a_mistake_end_well(name: str, ends: Mapping[str, str]) -> None:
    assert ends[name] == ""


@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_in_code_that_ships_is_named_by_its_line(name: str, ends: Mapping[str, str]) -> None:
    place = re.search(r"PretendedError: (\S+):(\d+): ", ends[name])
    assert place, ends[name]
    assert Path(place[1]).is_file()
    assert PLANTS[name].at in linecache.getline(place[1], int(place[2])), ends[name]
