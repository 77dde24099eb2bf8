"""`forge-run plugins`: lists the installed components, from metadata alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import asdict, frozen

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode, JobError, did_you_mean
from forge_core.plugins.catalog import Catalog, Offer
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import FLAG, NUMBER, TEXT, Schema, array, keyed, maybe
from forge_kit.tools.tables import columns


@frozen
class ListedComponent:
    """One entry point, as it is listed."""

    kind: str
    type: str
    distribution: str
    version: str
    target: str
    editable: str = ""
    """Source folder of an editable install."""
    conflict: str = ""
    """Other distributions that offer the same type of the same kind."""
    check: Any = None
    """With `--check`: the outcome of loading it. JSON has the same keys with and without."""
    distribution_problems: Sequence[str] = ()
    """With `--check`: problems of its distribution as it is installed."""

    @property
    def problems(self) -> Iterable[str]:
        """A line for each problem that metadata shows."""
        if self.conflict:
            yield f"conflict: {self.kind} {self.type!r} of {self.distribution} is also offered by {self.conflict}"


HEADING = "extend"


def command(argv: list[str]) -> int:
    """List the installed components, or check a plugin.

    NAME restricts the list to one distribution or type.
    """
    parser = list_parser("forge-run plugins", str(command.__doc__))
    check = "load each one in a separate process and check it; exit code 1 if anything is wrong"
    parser.add_argument("--check", action="store_true", help=check)
    with_examples(parser, "forge-run plugins --kind optimizer", "forge-run plugins forge-plugin-muon --check")
    options = parser.parse_args(argv)
    catalog = Catalog.installed()
    offers = select(catalog, options.name, options.kind)
    if options.check:
        from forge_plugin_author.check_plugins import report  # late: what it needs to load components takes longer

        return report(offers, catalog, left_too=options.name is None, as_json=options.json)
    # From here on nothing is imported: a component that cannot be loaded is listed all the same.
    listed = [listing(offer, catalog) for offer in offers]
    if options.json:
        print_json([asdict(component) for component in listed])
    else:
        print("\n".join([table(listed), *dict.fromkeys(line for component in listed for line in component.problems)]))
    return ExitCode.FINISHED


def list_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Make a parser with the options that select components."""
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a distribution or a type")
    parser.add_argument(
        "--kind", metavar="KIND", help="only components of this kind (`kind` lists the kinds themselves)"
    )
    add_json(parser)
    return parser


def select(catalog: Catalog, name: str | None = None, kind: str | None = None) -> list[Offer]:
    """Offers of a distribution or type called `name`, of one kind; the declarations of kinds only when asked for.

    Raises:
        JobError: nothing installed is called that.
    """
    offers = catalog.offers(kind)
    if kind is not None and not offers:
        hint = did_you_mean(kind, {*catalog.types("kind"), *(offer.kind for offer in catalog.offers())})
        raise JobError(f"forge-run plugins: no installed component is of kind {kind!r}{hint}")
    if name is None:
        return [offer for offer in offers if offer.kind != "kind" or kind == "kind"]
    named = [offer for offer in offers if name in (offer.type, offer.qualified, offer.distribution.name)]
    if not named:
        hint = did_you_mean(name, {word for offer in offers for word in (offer.type, offer.distribution.name)})
        raise JobError(f"forge-run plugins: no installed distribution or type is called {name!r}{hint}")
    return named


def listing(offer: Offer, catalog: Catalog) -> ListedComponent:
    """An offer as it is listed."""
    source, editable = offer.distribution, str(offer.distribution.editable_path or "")
    others = ", ".join(str(other.distribution) for other in catalog.matching(offer.kind, offer.type) if other != offer)
    return ListedComponent(offer.kind, offer.type, source.name, source.version, offer.value, editable, others)


def table(listed: Sequence[ListedComponent], extra: Sequence[str] = ()) -> str:
    """Components in columns; `extra` is one more before the last: its title, then a cell for each component."""
    rows = [["KIND", "TYPE", "DISTRIBUTION", "VERSION", "TARGET"]]
    for component in listed:
        version = f"{component.version} (editable)" if component.editable else component.version
        rows.append([component.kind, component.type, component.distribution, version, component.target])
    # Not strict: without `extra`, there is no cell for any row
    for row, cell in zip(rows, extra, strict=False):
        row.insert(-1, cell)
    return columns(rows)


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    checked = keyed(error=TEXT, seconds=NUMBER, torch=FLAG, problems=array(TEXT))
    component = keyed(
        kind=TEXT,
        type=TEXT,
        distribution=TEXT,
        version=TEXT,
        target=TEXT,
        editable=TEXT,
        conflict=TEXT,
        check=maybe(checked),
        distribution_problems=array(TEXT),
    )
    return {"": array(component)}
