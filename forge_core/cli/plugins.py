"""`forge-run plugins`: what is installed, known from metadata alone."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from attrs import asdict, field, frozen

from forge_core.cli.layout import columns
from forge_core.cli.probe import Probe
from forge_core.config.suggest import did_you_mean
from forge_core.errors import ExitCode, JobError
from forge_core.plugins.catalog import Catalog, Offer
from forge_core.plugins.stale import stale_entries

WORKERS = 4
"""Components that `--check` loads at a time."""


@frozen
class Row:
    """One entry point, as it is shown."""

    kind: str
    type: str
    distribution: str
    version: str
    target: str
    editable: str = ""
    """Source folder of an editable install."""
    conflict: str = ""
    """Other distributions that offer the same type of the same kind."""
    check: Probe | None = field(default=None)


def command(argv: list[str]) -> int:
    """List the installed components, or those of one distribution or type."""
    parser = argparse.ArgumentParser("forge-run plugins", description=command.__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a distribution or a type")
    parser.add_argument("--kind", help="only components of this kind (`kind` lists the kinds themselves)")
    parser.add_argument("--check", action="store_true", help="load each one, in a process of its own")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    catalog = Catalog.installed()
    offers = select(catalog, options.name, options.kind)
    rows = [row_of(offer, catalog, probe) for offer, probe in zip(offers, _probes(offers, options.check), strict=True)]
    distributions = {offer.distribution.name: offer.distribution for offer in offers}
    stale = list(stale_entries(distributions.values(), catalog)) if options.check else []
    print(json.dumps([asdict(row) for row in rows], indent=2) if options.json else "\n".join(_lines(rows, stale)))
    failed = stale or any(row.check and row.check.error for row in rows)
    return ExitCode.FAILED if failed else ExitCode.FINISHED


def select(catalog: Catalog, name: str | None = None, kind: str | None = None) -> list[Offer]:
    """Offers of a distribution or type called `name`, of one kind; the declarations of kinds only when asked for.

    Raises:
        JobError: nothing installed is called that.
    """
    offers = list(catalog.all_offers())
    if kind is not None:
        offers = [offer for offer in offers if offer.kind == kind]
        known = {offer.kind for offer in catalog.all_offers()} | set(catalog.kinds())
        _demand(offers, f"no installed component is of kind {kind!r}", kind, known)
    if name is not None:
        named = [offer for offer in offers if name in (offer.type, offer.qualified, offer.distribution.name)]
        names = {word for offer in offers for word in (offer.type, offer.distribution.name)}
        _demand(named, f"no installed distribution or type is called {name!r}", name, names)
        return named
    return [offer for offer in offers if offer.kind != "kind" or kind == "kind"]


def _demand(found: list[Offer], message: str, word: str, known: set[str]) -> None:
    if not found:
        raise JobError(f"forge-run plugins: {message}{did_you_mean(word, known)}")


def row_of(offer: Offer, catalog: Catalog, probe: Probe | None = None) -> Row:
    """An offer as it is shown."""
    distribution = offer.distribution
    others = [o.distribution for o in catalog.offers(offer.kind) if o.type == offer.type and o != offer]
    return Row(
        offer.kind,
        offer.type,
        distribution.name,
        distribution.version,
        offer.value,
        str(distribution.editable_path or ""),
        ", ".join(map(str, others)),
        probe,
    )


def _lines(rows: list[Row], stale: list[str]) -> Iterable[str]:
    checked = any(row.check for row in rows)
    head = ["KIND", "TYPE", "DISTRIBUTION", "VERSION", *(["LOADS"] if checked else []), "TARGET"]
    yield columns([head, *(_cells(row, checked) for row in rows)])
    for row in rows:
        if row.conflict:
            yield f"conflict: {row.kind} {row.type!r} of {row.distribution} is also offered by {row.conflict}"
    for row in rows:
        if row.check and row.check.error:
            yield f"error: {row.check.error}"
    yield from (f"stale: {line}" for line in stale)


def _cells(row: Row, checked: bool) -> list[str]:
    version = f"{row.version} (editable)" if row.editable else row.version
    loads = [row.check.verdict] if checked and row.check else []
    return [row.kind, row.type, row.distribution, version, *loads, row.target]


def _probes(offers: list[Offer], wanted: bool) -> list[Probe | None]:
    if not wanted:
        return [None] * len(offers)
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(_probe, offers))


def _probe(offer: Offer) -> Probe:
    """Load an entry point in a process of its own, so that neither its failure nor its imports touch another."""
    arguments = [sys.executable, "-m", "forge_core.cli.probe", offer.kind, offer.qualified]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Probe(f"loading {offer.kind} {offer.qualified} ended the process: {last}")
    return Probe(**answer)
