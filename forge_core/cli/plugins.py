"""`forge-run plugins`: what is installed, known from metadata alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence

from attrs import asdict, field, frozen

from forge_core.cli.layout import columns
from forge_core.cli.probe import Probe
from forge_core.config.suggest import did_you_mean
from forge_core.errors import ExitCode, JobError
from forge_core.plugins.catalog import Catalog, Offer
from forge_core.plugins.stale import left_overs


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
    """What loading it showed, with `--check`."""
    distribution_problems: Sequence[str] = ()
    """What is wrong with its distribution as it is installed, with `--check`."""

    @property
    def problems(self) -> Iterable[str]:
        """A line for each thing that is wrong; of a row that was not loaded, only conflicts are known."""
        if self.conflict:
            yield f"conflict: {self.kind} {self.type!r} of {self.distribution} is also offered by {self.conflict}"
        if self.check and self.check.error:
            yield f"error: {self.check.error}"
        if self.check:
            yield from (f"problem: {problem}" for problem in self.check.problems)
        yield from self.distribution_problems


def command(argv: list[str]) -> int:
    """List the installed components, or those of one distribution or type."""
    parser = argparse.ArgumentParser("forge-run plugins", description=command.__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a distribution or a type")
    parser.add_argument("--kind", help="only components of this kind (`kind` lists the kinds themselves)")
    check = "load each one in a process of its own, and look at it; exit code 1 if anything is wrong"
    parser.add_argument("--check", action="store_true", help=check)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    catalog = Catalog.installed()
    offers = select(catalog, options.name, options.kind)
    rows = checked(offers, catalog) if options.check else [row_of(offer, catalog) for offer in offers]
    problems = list(dict.fromkeys(problem for row in rows for problem in row.problems))
    left = [f"stale: {line}" for line in left_overs()] if options.check and options.name is None else []
    if options.json:
        print("\n".join(left), end="\n" if left else "", file=sys.stderr)
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print("\n".join([table(rows), *problems, *left]))
    return ExitCode.FAILED if options.check and (problems or left) else ExitCode.FINISHED


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


def row_of(
    offer: Offer, catalog: Catalog, probe: Probe | None = None, distribution_problems: Sequence[str] = ()
) -> Row:
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
        distribution_problems,
    )


def checked(offers: Sequence[Offer], catalog: Catalog) -> list[Row]:
    """Offers with what is found when they are loaded, and when their distributions are looked at."""
    from forge_core.cli.plugin_checks import distribution_problems, probes

    distributions = {offer.distribution.name: offer.distribution for offer in offers}
    found = {name: list(distribution_problems(each, catalog)) for name, each in distributions.items()}
    pairs = zip(offers, probes(offers), strict=True)
    return [row_of(offer, catalog, probe, found[offer.distribution.name]) for offer, probe in pairs]


def table(rows: Sequence[Row]) -> str:
    """Rows in columns, with how long each took to load where that was tried."""
    loaded = any(row.check for row in rows)
    head = ["KIND", "TYPE", "DISTRIBUTION", "VERSION", *(["LOADS"] if loaded else []), "TARGET"]
    return columns([head, *map(_cells, rows)])


def _cells(row: Row) -> list[str]:
    version = f"{row.version} (editable)" if row.editable else row.version
    loads = [row.check.verdict] if row.check else []
    return [row.kind, row.type, row.distribution, version, *loads, row.target]
