"""The catalog: which components are installed, known from metadata alone, and imported one by one when named.

Entry points name components: group `forge.<kind>`, key the type, value the class. Group `forge.kind` names the kinds
themselves, value the base class. One scan of the installed distributions reads them all; nothing is imported until a
job names it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import attrs

from forge_core.contracts.components import Component, Unavailable, call_refusal
from forge_core.contracts.errors import SURE, PluginError, Problem, closest

CORE = "forge-run"
PREFIX = "forge."
"""Entry points of group `forge.KIND` name components of that kind."""
REPLACES = "forge_replaces"
"""Group of entry points whose keys are distributions that became part of this one, or single types that moved here
(`distribution/type`): jobs may qualify types by their old distributions."""
LOCAL = "forge_local_"
"""Prefix of the names of modules made from local files."""


@attrs.frozen
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
        info = json.loads(self.direct_url or "{}")
        editable = info.get("dir_info", {}).get("editable")
        return Path(unquote(info["url"].removeprefix("file://"))) if editable else None

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@attrs.frozen
class Offer:
    """One entry point: `type` of `kind`, found at `value` in `distribution`."""

    kind: str
    type: str
    value: str
    distribution: Distribution
    target: Any = attrs.field(default=None, eq=False, repr=False)
    """The class itself, in catalogs made in memory."""

    @property
    def qualified(self) -> str:
        return f"{self.distribution.name}/{self.type}"


class UnknownTypeError(PluginError):
    """No installed distribution offers the type; `distribution` is the one to install, empty if none is known.

    `likely` is an installed type that is spelt alike, or None.
    """

    def __init__(self, message: str, distribution: str = "", likely: str | None = None) -> None:
        super().__init__([Problem("", message), *install_line([distribution])])
        self.message = message  # without the line that installs it: a job has one such line for all that is missing
        self.distribution = distribution
        self.likely = likely


def install_line(names: Collection[str]) -> list[Problem]:
    """One line that installs distributions, as the last problem of an error; empty without any."""
    line = f"pip install {' '.join(dict.fromkeys(filter(None, names)))}"
    return [Problem("", f"to install what is missing: {line}", "", None, "not-installed", line)] * any(names)


class Catalog:
    """All offers, and what has been loaded from them. Make one with `Catalog.installed()`."""

    def __init__(self, offers: Iterable[Offer], replaced: Mapping[str, str] = {}) -> None:
        self._replaced = replaced
        """Normalised distributions, and `distribution/type`, that are part of another distribution now; its name."""
        self._offers = sorted(offers, key=lambda offer: (offer.kind, offer.type, offer.distribution.name))
        self._distributions = {normalised(offer.distribution.name): offer.distribution for offer in self._offers}
        self._types: dict[type, str] = {}
        self.files: dict[str, str] = {}
        """Local component files that were loaded, with their SHA-256."""

    @classmethod
    def installed(cls) -> Catalog:
        """Everything installed in this environment: one scan of the metadata, no imports."""
        offers: list[Offer] = []
        names: set[str] = set()
        # Of Forge's own from the index: jobs and runs by an old name get the line that installs what has the type now.
        replaced = {normalised(old): new for old, new in first_party()[REPLACES].items()}
        for dist in metadata.distributions():
            # Most distributions have nothing to do with Forge, and their entry points need not be parsed.
            if PREFIX not in (dist.read_text("entry_points.txt") or "") or not has_metadata(dist):
                continue
            about, url = dist.metadata, dist.read_text("direct_url.json") or ""  # parses it, each time
            if normalised(name := about["Name"]) in names:  # a copy that Python does not import
                continue
            names.add(normalised(name))
            owner = Distribution(name, about["Version"], tuple(about.get_all("Requires-Dist") or ()), url)
            for entry in dist.entry_points:
                if entry.group.startswith(PREFIX):
                    offers.append(Offer(entry.group.removeprefix(PREFIX), entry.name, entry.value, owner))
                elif entry.group == REPLACES:
                    replaced[normalised(entry.name)] = name
        return cls(offers, replaced)

    def offers(self, kind: str | None = None) -> list[Offer]:
        """Offers of one kind, or all, in the order of kind, type and distribution."""
        return [offer for offer in self._offers if kind in (None, offer.kind)]

    def matching(self, kind: str, name: str) -> list[Offer]:
        """Offers that `type`, or `distribution/type`, may mean; more than one if distributions compete for the type."""
        owner, _, type_ = self.as_spelled_now(name).rpartition("/")
        offers = [offer for offer in self._offers if offer.type == type_ and offer.kind == kind]
        return [offer for offer in offers if not owner or normalised(offer.distribution.name) == normalised(owner)]

    def as_spelled_now(self, name: str) -> str:
        """A distribution, or a type qualified by one, by the name of the distribution that has replaced it."""
        owner, slash, type_ = name.partition("/")
        owner = self._replaced.get(normalised(owner), owner)
        # The distribution first: a type may have moved on from the one that its distribution became part of.
        return f"{self._replaced.get(normalised(f'{owner}/{type_}'), owner)}{slash}{type_}"

    def types(self, kind: str) -> list[str]:
        """Installed types of a kind; of `kind`, the kinds that some distribution declares."""
        return sorted({offer.type for offer in self.offers(kind)})

    def distribution(self, name: str) -> Distribution | None:
        """An installed distribution that offers something, by name."""
        return self._distributions.get(normalised(name))

    def kind_base(self, kind: str) -> type[Component]:
        """The base class of a kind; raises a `PluginError` if no distribution declares it, or if two do."""
        owners = self.matching("kind", kind)
        if not owners:
            message = f"no installed distribution declares the kind {kind!r}; there are {', '.join(self.types('kind'))}"
            raise UnknownTypeError(message, first_party()["kind"].get(kind, ""))
        if len(owners) > 1:
            names = " and ".join(str(owner.distribution) for owner in owners)
            raise PluginError(f"kind {kind!r} is declared by {names}; uninstall one of them")
        base = self.load_offer(owners[0])
        if not (isinstance(base, type) and issubclass(base, Component) and getattr(base, "kind", None) == kind):
            raise PluginError(f"{owners[0].value} of {owners[0].distribution} is not a base class with kind = {kind!r}")
        return base

    def load(self, kind: str, type_: str, base: type[Component] | None = None) -> type[Component]:
        """The component class that a job calls `type_`.

        Args:
            kind: the family in which the type is looked up.
            type_: an installed type (`muon`), a qualified one (`forge-plugin-muon/muon`), a dotted path
                (`package.module:Class`) or a file (`./file.py:Class`, relative to the working directory).
            base: class that it must derive from; by default the kind's base class.

        Raises:
            UnknownTypeError: no installed distribution offers the type.
            PluginError: two distributions claim the type or the kind, the class cannot be imported, or it is not a
                component of this kind.
        """
        if len(self.matching("kind", kind)) > 1:
            self.kind_base(kind)  # raises, also where `base` is one of the two: types of both would be mixed
        if ":" in type_:
            cls, spelling, source = self._load_path(kind, type_)
        else:
            offer = self._select(kind, type_)
            cls, spelling, source = self.load_offer(offer), offer.qualified, str(offer.distribution)
        base = base or self.kind_base(kind)
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise PluginError(f"{kind} {type_!r} from {source} is not a subclass of {base.__name__}")
        # Decorated itself: annotations of an undecorated subclass would not become fields.
        decorated = "__attrs_attrs__" in vars(cls) or (attrs.has(cls) and not inspect.get_annotations(cls))
        if not decorated:
            hint = "decorate it with @attrs.frozen(kw_only=True)"
            raise PluginError(f"{kind} {type_!r} from {source} is not an attrs class; {hint}")
        # Here and not when it is built, which may be an hour into a queue: `check` reports a wrong signature.
        own: Any = getattr(cls, "build", None)
        asked: Any = getattr(base, "build", None)
        if own is not asked and inspect.isfunction(own) and (refusal := call_refusal(own, asked)):
            raise PluginError(f"{kind} {type_!r} from {source}: {refusal}")
        self._types[cls] = spelling
        return cls

    def load_offer(self, offer: Offer) -> Any:
        """Import what an entry point names; a `PluginError` names distribution, version, entry point and cause."""
        check_requirement(offer.distribution)
        try:
            return metadata.EntryPoint(offer.type, offer.value, "").load() if offer.target is None else offer.target
        except Exception as error:
            entry = f"{offer.kind} {offer.type!r} from {offer.distribution} ({offer.value})"
            raise PluginError(f"cannot load {entry}: {type(error).__name__}: {error}") from error

    def load_object(self, spec: str) -> Any:
        """See `BuildContext.load_object`."""
        return self._load_path("object", spec)[0]

    def type_of(self, cls: type) -> str:
        """The spelling of a class in resolved jobs: `distribution/type`, or the path it was loaded from."""
        if known := self._types.get(cls) or (issubclass(cls, Unavailable) and cls.table["type"]):
            return known
        # A job made in Python has classes that this catalog never loaded; most are what an entry point names.
        kind = getattr(cls, "kind", None)
        for offer in self.offers(kind) if kind else ():
            if _is_offer_of(offer, cls):
                return offer.qualified
        if cls.__module__.startswith(LOCAL):
            path = str(sys.modules[cls.__module__].__file__)
            self.files.setdefault(path, _digest(Path(path)))
            return f"{path}:{cls.__qualname__}"
        return f"{cls.__module__}:{cls.__qualname__}"

    def _load_path(self, kind: str, spec: str) -> tuple[Any, str, str]:
        """The class at `module:Class` or `file.py:Class`, how a resolved job spells the latter, and its source."""
        location, _, attribute = spec.rpartition(":")
        try:
            if location.endswith(".py"):
                digest, path = _digest(Path(location)), Path(location).resolve()
                self.files[str(path)] = digest
                target, spelling = _module_of_file(path, digest), f"{path}:{attribute}"
            else:
                # `type_of` knows one spelling of a class, wherever else it may be imported from
                target, spelling = importlib.import_module(location), ""
            for part in attribute.split("."):
                target = getattr(target, part)
        except Exception as error:
            raise PluginError(f"cannot load {kind} from {spec!r}: {type(error).__name__}: {error}") from error
        return target, spelling, location

    def _select(self, kind: str, type_: str) -> Offer:
        offers = self.matching(kind, type_)
        if not offers:
            raise self._unknown(kind, type_)
        if len(offers) > 1:
            names = " and ".join(sorted(str(offer.distribution) for offer in offers))
            choices = " or ".join(sorted(f'type = "{offer.qualified}"' for offer in offers))
            raise PluginError(f"{kind} {type_!r} is offered by {names}; choose with {choices}")
        return offers[0]

    def _unknown(self, kind: str, type_: str) -> UnknownTypeError:
        owner, _, name = self.as_spelled_now(type_).rpartition("/")
        if stale := self._stale(kind, owner, name):
            return UnknownTypeError(f"no {kind} {type_!r}: {stale}")
        missing, distribution, installed = f"no {kind} {type_!r} is installed", "", self.types(kind)
        # Only distributions that exist are suggested: one that the job itself names, or one of Forge's own.
        known = {} if owner else first_party().get(kind, {})
        likely = None if name in known else closest(name, {*installed, *known})
        if owner and not self.distribution(owner):
            missing, distribution = f"{owner} is not installed", owner
        elif likely not in installed:
            distribution = known.get(closest(name, known, SURE) or "", "")
        hint = f"; did you mean {likely!r}?" if likely else "."
        return UnknownTypeError(f"{missing}{hint} Installed: {', '.join(installed) or 'none'}", distribution, likely)

    def _stale(self, kind: str, owner: str, name: str) -> str:
        """Why a type is missing that an editable install (that of `owner`, if given) gained after it was installed."""
        for dist in self._distributions.values():
            if owner in ("", dist.name) and name in declared_entry_points(dist).get(PREFIX + kind, {}):
                changed = f"the pyproject.toml of {dist} offers it, but changed since it was installed; refresh with: "
                return f"{changed}pip install --no-deps -e {dist.editable_path}"
        return ""


def _is_offer_of(offer: Offer, cls: type) -> bool:
    """Whether an entry point names a class that was imported without the catalog; it may name a re-export."""
    module, _, attribute = offer.value.partition(":")
    package, name = cls.__module__.partition(".")[0], cls.__qualname__
    if offer.target is not None or attribute != name or module.partition(".")[0] != package:
        return offer.target is cls
    return getattr(sys.modules.get(module), name, None) is cls


def _module_of_file(path: Path, digest: str) -> ModuleType:
    """The module of a local file. Its name carries the digest, so that an edited file is another module."""
    name = f"{LOCAL}{path.stem}_{digest[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        # Before it runs, since attrs looks the module of its classes up there. Removed if the file raises: the next
        # attempt would find half a module.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _digest(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def has_metadata(dist: metadata.Distribution) -> bool:
    """Whether a folder belongs to a distribution: an interrupted uninstall leaves folders without metadata."""
    return bool(dist.read_text("METADATA") or dist.read_text("PKG-INFO"))


@functools.cache
def first_party() -> Mapping[str, Mapping[str, str]]:
    """Distribution of every first-party component, installed or not: kind -> type -> distribution.

    `forge_replaces` has old distributions, and types that have moved, with the distribution that has them now.
    The file is made when the core is built, so that it names plugins without knowing any. Sources that were not
    installed have none, and then nothing is first-party.
    """
    made = Path(__file__).with_name("first_party.json")
    return defaultdict(dict, json.loads(made.read_text(encoding="utf-8")) if made.exists() else {})


def declared_entry_points(distribution: Distribution) -> dict[str, dict[str, str]]:
    """Entry points by group in the sources of an editable install; empty without a pyproject.toml that can be read."""
    pyproject = distribution.editable_path / "pyproject.toml" if distribution.editable_path else None
    if pyproject is None or not pyproject.is_file():
        return {}
    try:
        return tomllib.loads(pyproject.read_text()).get("project", {}).get("entry-points", {})
    except tomllib.TOMLDecodeError:
        return {}


@functools.cache
def core_version() -> str:
    """Version of the running core."""
    return metadata.version(CORE)


@functools.cache
def check_requirement(distribution: Distribution) -> None:
    """Compare a plugin's requirement on `forge-run` with the running core; installers check it only once.

    Raises:
        PluginError: they do not fit; the message names the side to upgrade.
    """
    if normalised(distribution.name) == CORE:
        return
    # Late: listing installed components must stay fast, and most commands load few distributions.
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
        # Each bound separately, so that the message names the outdated side. A release candidate of the core loads
        # the plugins of its version.
        if broken := [spec for spec in requirement.specifier if not spec.contains(version, prereleases=True)]:
            newer = any(Version(version) < Version(spec.version.removesuffix(".*")) for spec in broken)
            upgrade = f"pip install --upgrade {CORE if newer else distribution.name}"
            needs = f"{distribution} requires {CORE}{requirement.specifier}"
            raise PluginError(f"{needs}, but this is {CORE} {version}; {upgrade}")


def normalised(name: str) -> str:
    """The name of a distribution as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
