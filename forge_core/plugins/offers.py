"""Installed distributions and the components that they offer, from metadata alone: nothing is imported here."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from attrs import field, frozen

from forge_core.contracts.errors import PluginError

CORE = "forge-run"
PREFIX = "forge."
"""Entry points of group `forge.KIND` name components of that kind."""


@frozen
class Distribution:
    """An installed distribution: the part of its metadata that Forge needs."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    direct_url: str = ""
    """PEP 610 `direct_url.json`, as text."""

    @property
    def editable_path(self) -> Path | None:
        """The source folder of an editable install."""
        info = json.loads(self.direct_url) if self.direct_url else {}
        if not info.get("dir_info", {}).get("editable"):
            return None
        return Path(unquote(info["url"].removeprefix("file://")))

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@frozen
class Offer:
    """One entry point: `type` of `kind`, found at `value` in `distribution`."""

    kind: str
    type: str
    value: str
    distribution: Distribution
    target: Any = field(default=None, eq=False, repr=False)
    """The class itself, in catalogs made in memory."""

    @property
    def qualified(self) -> str:
        return f"{self.distribution.name}/{self.type}"

    def load(self) -> Any:
        """Import what the entry point names."""
        return self.target if self.target is not None else metadata.EntryPoint(self.type, self.value, "").load()


def installed_offers() -> tuple[list[Offer], list[Distribution]]:
    """Every offer, and the distributions that have any: one scan of the metadata."""
    offers: list[Offer] = []
    distributions: dict[str, Distribution] = {}
    for dist in metadata.distributions():
        # Most distributions have nothing to do with Forge, and their entry points need not be parsed.
        if PREFIX not in (dist.read_text("entry_points.txt") or "") or not has_metadata(dist):
            continue
        name, url = dist.metadata["Name"], dist.read_text("direct_url.json") or ""
        key = normalised(name)
        if key in distributions:  # a copy further down sys.path, which Python does not import either
            continue
        distributions[key] = owner = Distribution(name, dist.version, tuple(dist.requires or ()), url)
        entries = (entry for entry in dist.entry_points if entry.group.startswith(PREFIX))
        offers += [Offer(e.group.removeprefix(PREFIX), e.name, e.value, owner) for e in entries]
    return offers, list(distributions.values())


def has_metadata(dist: metadata.Distribution) -> bool:
    """Whether a folder is that of a distribution: an interrupted uninstall leaves folders without metadata."""
    return bool(dist.read_text("METADATA") or dist.read_text("PKG-INFO"))


@functools.cache
def first_party() -> Mapping[str, Mapping[str, str]]:
    """Distribution of every first-party component, installed or not: kind -> type -> distribution.

    `tools/first_party.py` writes the file, so that the core names plugins without knowing any.
    """
    return json.loads(Path(__file__).with_name("first_party.json").read_text(encoding="utf-8"))


def declared_entry_points(pyproject: Path) -> dict[str, dict[str, str]]:
    """Entry points by group that a source folder declares; empty if its pyproject.toml is not TOML."""
    try:
        return tomllib.loads(pyproject.read_text()).get("project", {}).get("entry-points", {})
    except tomllib.TOMLDecodeError:
        return {}


@functools.cache
def core_version() -> str:
    """Version of the running core."""
    return metadata.version(CORE)


def check_requirement(distribution: Distribution) -> None:
    """Compare a plugin's requirement on `forge-run` with the running core; installers check it only once.

    Raises:
        PluginError: they do not fit; the message says which side to upgrade.
    """
    if normalised(distribution.name) == CORE:
        return
    # Late: listing what is installed must stay fast, and most commands load few distributions.
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import Version

    version = core_version()
    for line in distribution.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            raise PluginError(f"{distribution} has a requirement that cannot be read: {line!r}: {error}") from error
        if normalised(requirement.name) != CORE or (requirement.marker and not requirement.marker.evaluate()):
            continue
        # Each bound by itself, so that the message says which side is too old. A release candidate of the core loads
        # the plugins of its version.
        broken = [spec for spec in requirement.specifier if not spec.contains(version, prereleases=True)]
        if broken:
            newer = any(Version(version) < Version(spec.version.removesuffix(".*")) for spec in broken)
            upgrade = f"pip install --upgrade {CORE if newer else distribution.name}"
            needs = f"{distribution} requires {CORE}{requirement.specifier}"
            raise PluginError(f"{needs}, but this is {CORE} {version}; {upgrade}")


def normalised(name: str) -> str:
    """The name of a distribution as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
