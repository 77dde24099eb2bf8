"""Where each component meets the pretended device: `components.toml`, checked by `test_components.py`.

    python tests/gpu/components.py      # writes the table anew, with a place for what has come since; reasons stay

A place is the class of a suite that trains the component on the device (`FILE::CLASS`), a whole run (`run NAME`, of
`whole_runs.py`) or a run on ranks (`ranks NAME`, of `rank_runs.py`). What has no place has a reason: `not: ...`.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = HERE / "components.toml"
NOT = "not: "
HEAD = """\
# Where each component of Forge meets the pretended device: the class of a suite that trains it there, a whole run
# (`run NAME`, of `whole_runs.py`), or a run on ranks (`ranks NAME`, of `rank_runs.py`); or why it does not.
# `python tests/gpu/components.py` writes this file anew; reasons are written by hand.
"""


def components_of(job: Any) -> set[str]:
    """The components of a job, as `kind.type`."""
    from forge_core.config.keys import walk_components
    from forge_testing.catalogs import installed

    return {f"{each.kind}.{installed().type_of(type(each)).rpartition('/')[2]}" for _, each in walk_components(job)}


def offers() -> set[str]:
    """All components of Forge's own distributions, as `kind.type`."""
    from forge_testing.catalogs import installed

    ours = (offer for offer in installed().offers() if offer.distribution.name.startswith("forge-"))
    return {f"{offer.kind}.{offer.type}" for offer in ours}


def read_table() -> tuple[dict[str, str], dict[str, str]]:
    """The place of each component by `kind.type`, and the reason of each kind of which none has a place."""
    table = tomllib.loads(TABLE.read_text())
    kinds = table.pop("kinds")
    return {f"{kind}.{type_}": place for kind, places in table.items() for type_, place in places.items()}, kinds


def found_in(place: str, suites: Iterable[type]) -> set[str]:
    """The components that meet the device in a place.

    Args:
        place: of the table.
        suites: Classes that pytest has imported already, which spares the import.

    Raises:
        AssertionError: There is no such place, or its class does not train on the device.
    """
    sys.path[:0] = [path for path in [str(ROOT / "tests")] if path not in sys.path]
    from gpu import rank_runs, whole_runs

    how, _, name = place.partition(" ")
    if how == "run":
        return components_of(whole_runs.RECIPES[name].unchecked())
    with tempfile.TemporaryDirectory() as folder:
        if how == "ranks":
            return components_of(rank_runs.job_of(name, "cpu", Path(folder)))
        suite = _suite(place, suites)
        assert not suite.needs_cpu, f"{place} does not train on the device: {suite.needs_cpu}"
        return components_of(suite().parity_job(Path(folder), {}))


def _suite(place: str, suites: Iterable[type]) -> Any:
    file, _, name = place.partition("::")
    path = ROOT / file
    for suite in suites:
        if suite.__name__ == name and Path(sys.modules[suite.__module__].__file__ or "") == path:
            return suite
    module = _imported(path)
    assert hasattr(module, name), f"there is no {place}"
    return getattr(module, name)


def _imported(path: Path) -> Any:
    name = f"suites_of_{path.parents[1].name}_{path.stem}".replace("-", "_")
    if name not in sys.modules:
        sys.path.append(str(path.parent))  # as the conftest.py of most folders of tests does
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# --- writing the table --------------------------------------------------------------------------------------------


def _places() -> Iterator[tuple[str, set[str]]]:
    """All places with their components: suites first, which compare in float64 and count waits."""
    from forge_testing.suites.parity import ParitySuite
    from gpu import rank_runs, whole_runs

    for path in sorted([*ROOT.glob("plugins/*/tests/**/test_*.py"), *ROOT.glob("tests/proofs/test_*.py")]):
        if "Suite)" not in path.read_text():
            continue
        for name, suite in vars(_imported(path)).items():
            if isinstance(suite, type) and issubclass(suite, ParitySuite) and name.startswith("Test"):
                thorough = any(mark.name == "thorough" for mark in getattr(suite, "pytestmark", ()))
                if not thorough and not suite.needs_cpu:
                    place = f"{path.relative_to(ROOT)}::{name}"
                    yield place, found_in(place, [suite])
    for name in whole_runs.RECIPES:
        yield f"run {name}", found_in(f"run {name}", ())
    for name in rank_runs.CASES:
        yield f"ranks {name}", found_in(f"ranks {name}", ())


def write_table() -> None:
    """Give every component a place: as few places as a greedy choice needs, suites before runs."""
    reasons, kinds = read_table() if TABLE.exists() else ({}, {})
    places: list[tuple[str, set[str]]] = list(_places())
    chosen: dict[str, str] = {name: place for name, place in reasons.items() if place.startswith(NOT)}
    missing = {name for name in offers() if name.partition(".")[0] not in kinds} - chosen.keys()
    for of_suites in (True, False):
        while True:
            some = [place for place in places if ("::" in place[0]) == of_suites]
            place, components = max(some, key=lambda each: len(each[1] & missing))
            if not components & missing:
                break
            chosen |= dict.fromkeys(components & missing, place)
            missing -= components
    chosen |= dict.fromkeys(missing, f"{NOT}TODO")
    _write(kinds, chosen)


def _write(kinds: Mapping[str, str], chosen: Mapping[str, str]) -> None:
    import tomli_w

    table: dict[str, dict[str, str]] = {"kinds": dict(sorted(kinds.items()))}
    for name in sorted(chosen):
        kind, _, type_ = name.partition(".")
        table.setdefault(kind, {})[type_] = chosen[name]
    TABLE.write_text(f"{HEAD}\n{tomli_w.dumps(table)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    write_table()
