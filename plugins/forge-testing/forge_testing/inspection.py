"""Print the problems of distributions as a line of JSON: run by `distribution_problems`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from forge_core.contracts.errors import PluginError
from forge_core.plugins.catalog import CORE, Catalog, Distribution, Offer, check_requirement, core_version
from forge_testing.catalogs import load_target
from forge_testing.component_checks import component_problems
from forge_testing.distribution import Samples
from forge_testing.stale import stale_entries

BOUNDS = ("<", "<=", "==", "~=", "===")
"""Operators that set an upper bound."""


def problems_of(samples: Mapping[str, Samples]) -> Mapping[str, Sequence[str]]:
    """Returns every problem of each distribution, with its fix, by their names."""
    catalog = Catalog.installed()
    problems = {name: list(metadata_problems(name, given, catalog)) for name, given in samples.items()}
    name_of = {catalog.distribution(name): name for name in samples}
    # The commands of all distributions come last: they may import torch, which nothing else may.
    for commands in (False, True):
        for offer in catalog.offers():
            name = name_of.get(offer.distribution)
            if name is not None and (offer.kind == "command") is commands:
                problems[name] += offer_problems(offer, catalog, samples[name])
    return problems


def metadata_problems(name: str, samples: Samples, catalog: Catalog) -> Iterator[str]:
    """Yield the problems of a distribution that its metadata show."""
    distribution = catalog.distribution(name)
    if distribution is None:
        yield _absent(name)
        return
    if distribution.name != CORE:
        yield from requirement_problems(distribution)
    yield from stale_entries([distribution], catalog)
    known = {offer.type for offer in catalog.offers() if offer.distribution == distribution}
    for type_ in samples.keys() - known:
        yield f"samples has {type_!r}, which it does not offer; it offers {', '.join(sorted(known))}"


def _absent(name: str) -> str:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"it is not installed; pip install -e its folder (installed distributions offer: {_names()})"
    hint = '[project.entry-points."forge.optimizer"] with a line for each type, and install it again'
    return f"it offers nothing: it has no entry points in groups `forge.KIND`; add a table such as {hint}"


def _names() -> str:
    return ", ".join(sorted({offer.distribution.name for offer in Catalog.installed().offers()}))


def requirement_problems(distribution: Distribution) -> Iterator[str]:
    """Yield the problems of its requirement on the core."""
    yield from bound_problems(distribution)
    try:
        check_requirement(distribution)
    except PluginError as error:
        yield str(error)


def bound_problems(distribution: Distribution) -> Iterator[str]:
    """Yield missing bounds of its requirement on the core; loading it checks the running version against them."""
    running = Version(core_version())
    hint = f'"{CORE}>={running.major}.{running.minor},<{running.major}.{running.minor + 1}"'
    try:
        lines = [Requirement(line) for line in distribution.requires]
    except InvalidRequirement:  # reported by `check_requirement`
        return
    requirements = [line for line in lines if line.name.lower().replace("_", "-") == CORE]
    if not requirements:
        yield f"it does not require {CORE}, so an installer may pair it with any; add {hint} to `dependencies`"
    for line in requirements:
        if not any(specifier.operator in BOUNDS for specifier in line.specifier):
            yield f"it requires {line}, without an upper bound, and the next version may break it; write {hint}"


def offer_problems(offer: Offer, catalog: Catalog, samples: Samples) -> Iterator[str]:
    """Yield the problems of an entry point and of its target."""
    before = "torch" in sys.modules
    try:
        target = load_target(offer, catalog)
    except PluginError as error:
        yield str(error)
        return
    imported_torch = "torch" in sys.modules and not before
    yield from target_problems(offer, target, imported_torch, catalog, samples.get(offer.type, {}))


def target_problems(
    offer: Offer, target: Any, imported_torch: bool, catalog: Catalog, sample: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield the problems of the target of an entry point.

    Args:
        offer: The entry point.
        target: Its target, loaded.
        imported_torch: Whether loading it imported torch.
        catalog: Catalog in which the components of its keys are looked up.
        sample: See `component_problems`.
    """
    entry = f"{offer.kind} {offer.type!r} ({offer.value})"
    if imported_torch and offer.kind != "command":
        hint = "import torch inside `build`, or under TYPE_CHECKING, and no module that needs it at the top"
        yield f"{entry}: importing it imports torch, which makes checking a job slow; {hint}"
    if offer.kind not in ("kind", "command"):
        base = catalog.kind_base(offer.kind)
        for problem in component_problems(target, base, offer, catalog, sample):
            yield f"{entry}: {problem}"


if __name__ == "__main__":
    print("\n" + json.dumps(problems_of(json.load(sys.stdin))))
