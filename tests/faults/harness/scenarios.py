"""The jobs that are killed, and what each of them covers."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from attrs import frozen

from forge_core import Catalog

FOLDER = Path(__file__).parent.parent


@frozen
class Scenario:
    """A small job."""

    name: str
    covers: tuple[str, ...]
    job: Mapping[str, Any]
    ranks: int = 1
    """Started by `--nproc`, if there are several."""

    @property
    def steps(self) -> int:
        return self.job["train"]["steps"]

    def write(self, folder: Path) -> None:
        """Make `folder`, with `job.toml` and all that it needs. Its components are the same file in every folder, so
        that the records of two runs are equal."""
        folder.mkdir(parents=True)
        (folder / "job.toml").write_text(tomli_w.dumps(self.job))
        (folder / "parts").symlink_to(FOLDER / "parts")


def scenarios(catalog: Catalog) -> dict[str, Scenario]:
    """Those of `scenarios.toml`, and one for each installed optimizer, by name."""
    tables = tomllib.loads((FOLDER / "scenarios.toml").read_text())
    base = tables.pop("base")["job"]
    written = [
        Scenario(name, tuple(table["covers"]), merge(base, table["job"]), table.get("ranks", 1))
        for name, table in tables.items()
    ]
    return {scenario.name: scenario for scenario in (*written, *optimizer_scenarios(base, catalog))}


def optimizer_scenarios(base: Mapping[str, Any], catalog: Catalog) -> Iterator[Scenario]:
    """The base job with each installed optimizer, accumulating."""
    for offer in catalog.offers("optimizer"):
        job = merge(base, {"optimizer": {"type": offer.qualified}, "train": {"micro_batch_size": 2}})
        yield Scenario(f"optimizer-{offer.type}", (f"optimizer {offer.qualified}", "accumulation"), job)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of both, key by key. A table with a `type` is another component: nothing of the one below is left."""
    merged = dict(below)
    for key, value in above.items():
        tables = isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
        merged[key] = merge(below[key], value) if tables and "type" not in value else value
    return merged
