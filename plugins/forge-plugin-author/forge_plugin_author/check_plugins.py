"""`forge-run plugins --check`: loads each component in a separate process and checks it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from attrs import asdict, evolve

from forge_core.contracts.errors import ExitCode
from forge_core.plugins.catalog import Catalog, Offer
from forge_kit.tools.json_output import print_json
from forge_plugin_author.plugin_checks import distribution_problems, probes
from forge_plugin_author.plugins import ListedComponent, listing, table
from forge_testing.stale import left_overs


def report(offers: Sequence[Offer], catalog: Catalog, *, left_too: bool, as_json: bool) -> int:
    """Load and check components one by one, print the outcome, and return the exit code.

    Args:
        offers: the components.
        catalog: where they are from.
        left_too: whether files that uninstalled distributions have left are named too.
        as_json: whether the components are printed as JSON.
    """
    components = checked(offers, catalog)
    # Components of one distribution share its problems, which are printed once
    problems = list(dict.fromkeys(problem for component in components for problem in problems_of(component)))
    left = [f"stale: {line}" for line in left_overs()] if left_too else []
    if as_json:
        # To standard error, so that standard output is JSON alone
        print("\n".join(left), end="\n" if left else "", file=sys.stderr)
        print_json([asdict(component) for component in components])
    else:
        loads = ["LOADS", *(component.check.verdict for component in components)]
        print("\n".join([table(components, loads), *problems, *left]))
    return ExitCode.FAILED if problems or left else ExitCode.FINISHED


def problems_of(component: ListedComponent) -> Iterator[str]:
    """Yield a line for each problem of a checked component."""
    yield from component.problems
    if component.check.error:
        yield f"error: {component.check.error}"
    yield from (f"problem: {problem}" for problem in component.check.problems)
    yield from component.distribution_problems


def checked(offers: Sequence[Offer], catalog: Catalog) -> list[ListedComponent]:
    """Load and check each component, with the problems of its distribution."""
    distributions = {offer.distribution.name: offer.distribution for offer in offers}
    of_distribution = {name: list(distribution_problems(each, catalog)) for name, each in distributions.items()}
    return [
        evolve(listing(offer, catalog), check=probe, distribution_problems=of_distribution[offer.distribution.name])
        for offer, probe in zip(offers, probes(offers), strict=True)
    ]
