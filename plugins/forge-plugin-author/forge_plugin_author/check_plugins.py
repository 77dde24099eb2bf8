"""`forge-run plugins --check`: each component is loaded in a process of its own and examined."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from attrs import asdict, evolve, field, frozen

from forge_core.cli.plugins import ListedComponent, list_parser, listing, select, table
from forge_core.contracts.errors import ExitCode
from forge_core.plugins.catalog import Catalog, Offer
from forge_plugin_author.plugin_checks import distribution_problems, probes
from forge_plugin_author.probe import Probe
from forge_testing.stale import left_overs


@frozen
class CheckedComponent(ListedComponent):
    """One entry point, with what loading it showed."""

    check: Probe = field(factory=Probe)
    distribution_problems: Sequence[str] = ()
    """Problems of its distribution as it is installed."""

    @property
    def problems(self) -> Iterable[str]:
        """A line for each problem."""
        yield from super().problems
        if self.check.error:
            yield f"error: {self.check.error}"
        yield from (f"problem: {problem}" for problem in self.check.problems)
        yield from self.distribution_problems


def command(argv: list[str]) -> int:
    """Load installed components one by one, and check each; the same as `plugins --check`."""
    options = list_parser("forge-run check-plugins", str(command.__doc__)).parse_args(argv)
    catalog = Catalog.installed()
    components = checked(select(catalog, options.name, options.kind), catalog)
    problems = list(dict.fromkeys(problem for component in components for problem in component.problems))
    left = [f"stale: {line}" for line in left_overs()] if options.name is None else []
    if options.json:
        print("\n".join(left), end="\n" if left else "", file=sys.stderr)
        print(json.dumps([asdict(component) for component in components], indent=2))
    else:
        loads = [component.check.verdict for component in components]
        print("\n".join([table(components, loads, "LOADS"), *problems, *left]))
    return ExitCode.FAILED if problems or left else ExitCode.FINISHED


def checked(offers: Sequence[Offer], catalog: Catalog) -> list[CheckedComponent]:
    """Each component, loaded, with the problems of its distribution."""
    distributions = {offer.distribution.name: offer.distribution for offer in offers}
    of_distribution = {name: list(distribution_problems(each, catalog)) for name, each in distributions.items()}
    components = []
    for offer, probe in zip(offers, probes(offers), strict=True):
        listed = asdict(listing(offer, catalog))
        component = CheckedComponent(**listed, check=probe)
        components.append(evolve(component, distribution_problems=of_distribution[offer.distribution.name]))
    return components
