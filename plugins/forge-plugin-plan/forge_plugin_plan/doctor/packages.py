"""Checks of the installed packages."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from forge_core.contracts.errors import PluginError
from forge_core.plugins.catalog import (
    CORE,
    PREFIX,
    Catalog,
    Distribution,
    check_requirement,
    core_version,
    declared_entry_points,
)
from forge_plugin_plan.doctor.results import Result, Surroundings, failed, ok, warning


def distributions() -> list[Distribution]:
    """Returns the core and every installed distribution that offers something to it, by name."""
    offers = Catalog.installed().offers()
    return sorted({offer.distribution for offer in offers}, key=lambda one: (one.name != CORE, one.name))


def versions() -> dict[str, str]:
    """Returns the versions of Python, torch and these distributions; distributions that are absent are left out."""
    known = {"Python": platform.python_version()}
    for name in ("torch", "numpy", "triton", "transformers", "datasets"):
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return known | {one.name: one.version for one in distributions()}


def tested_torch() -> SpecifierSet:
    """Returns the versions of torch that the core was tested with, by its requirement."""
    [requirement] = [one for one in map(Requirement, metadata.requires(CORE) or ()) if one.name == "torch"]
    return requirement.specifier


def check_versions(_: Surroundings) -> Iterator[Result]:
    """Whether plugins fit the core, and their requirements are installed."""
    installed = distributions()
    yield ok("forge-run", f"{core_version()}, {len(installed) - 1} plugins, Python {platform.python_version()}")
    broken = [unmet for one in installed for unmet in _unmet(one)]
    if broken:
        wanted = " ".join(dict.fromkeys(install for _, install in broken))
        yield failed("requirements", "; ".join(text for text, _ in broken), f"pip install --upgrade {wanted}")
    else:
        yield ok("requirements", "all requirements of the core and of every plugin are installed")
    for one in installed:
        if changed := _changed(one):
            mend = f"pip install --no-deps -e {one.editable_path}"
            seen = f"the pyproject.toml of {one.name} changed since it was installed: {', '.join(sorted(changed))}"
            yield warning("editable install", seen, mend)


def _unmet(distribution: Distribution) -> Iterator[tuple[str, str]]:
    """Yields each requirement of a distribution that is not met, as a text and as what pip is to install."""
    try:
        check_requirement(distribution)
    except PluginError as error:
        # The command is shown once for all requirements, so only its packages are taken
        message, _, install = str(error).partition("; pip install --upgrade ")
        yield message, install or distribution.name
        return
    for line in distribution.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            yield f"the requirement {line!r} of {distribution} cannot be read", distribution.name
            continue
        # Requirements of extras may be absent
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        needs, install = f"{distribution} needs {requirement}", f"'{requirement.name}{requirement.specifier}'"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{needs}, which is not installed", install
            continue
        if requirement.name == "torch" and requirement.specifier == tested_torch():
            continue  # one line for all: the line of torch itself
        # Nightly builds and builds from source are pre-releases, and fit as well
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{needs}, installed is {version}", install


def _changed(distribution: Distribution) -> set[str]:
    """Types that the sources of an editable install have and its metadata lack, or the other way round."""
    declared = declared_entry_points(distribution)
    if not declared:
        return set()
    known = {(offer.kind, offer.type) for offer in Catalog.installed().offers() if offer.distribution == distribution}
    groups = {group.removeprefix(PREFIX): entries for group, entries in declared.items() if group.startswith(PREFIX)}
    return {f"{kind} {name}" for kind, name in known ^ {(kind, name) for kind in groups for name in groups[kind]}}
