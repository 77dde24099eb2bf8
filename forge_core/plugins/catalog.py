"""The catalog: which components are installed, known from metadata alone, and imported one by one when named.

Entry points name components: group `forge.<kind>`, key the type, value the class. Group `forge.kind` names the kinds
themselves, value the base class. One scan of the installed distributions reads them all; nothing is imported until a
job names it.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import attrs
from attrs import field, frozen

from forge_core.contracts.components import Component
from forge_core.contracts.errors import PluginError

CORE = "forge-run"
PREFIX = "forge."
LOCAL = "forge_local_"
"""Prefix of the names of modules made from local files."""


@frozen
class Distribution:
    """An installed distribution, as far as Forge needs it."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    direct_url: str = ""
    """PEP 610 `direct_url.json`, as text."""

    @classmethod
    def of(cls, dist: metadata.Distribution) -> Distribution:
        name, version = dist.metadata["Name"], dist.version
        return cls(name, version, tuple(dist.requires or ()), dist.read_text("direct_url.json") or "")

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
    """The class itself, for catalogs made in memory."""

    @property
    def qualified(self) -> str:
        return f"{self.distribution.name}/{self.type}"

    def load(self) -> Any:
        return self.target if self.target is not None else metadata.EntryPoint(self.type, self.value, "").load()


class UnknownTypeError(PluginError):
    """No installed component of that type. `distribution` is what to install, as far as it can be told: empty where the
    type looks misspelt, or belongs to a distribution that is installed."""

    def __init__(self, message: str, distribution: str) -> None:
        super().__init__(message)
        self.distribution = distribution


class Catalog:
    """All offers, and what has been loaded from them. Make one with `Catalog.installed()`."""

    def __init__(self, offers: Iterable[Offer], distributions: Iterable[Distribution] = ()) -> None:
        self._offers: dict[str, dict[str, list[Offer]]] = {}
        for offer in offers:
            self._offers.setdefault(offer.kind, {}).setdefault(offer.type, []).append(offer)
        self._distributions = {_normalise(d.name): d for d in distributions}
        self._types: dict[type, str] = {}
        self.used: dict[str, Distribution] = {}
        """Distributions of which something was loaded, by name."""
        self.files: dict[str, str] = {}
        """Local component files that were loaded, with their SHA-256."""

    @classmethod
    def installed(cls) -> Catalog:
        """Everything installed in this environment: one scan of the metadata, no imports."""
        offers: list[Offer] = []
        distributions: dict[str, Distribution] = {}
        for dist in metadata.distributions():
            if PREFIX not in (dist.read_text("entry_points.txt") or "") or not has_metadata(dist):
                continue
            found = Distribution.of(dist)
            if _normalise(found.name) in distributions:  # an older copy further down sys.path
                continue
            distributions[_normalise(found.name)] = found
            entries = (entry for entry in dist.entry_points if entry.group.startswith(PREFIX))
            offers += [Offer(e.group.removeprefix(PREFIX), e.name, e.value, found) for e in entries]
        return cls(offers, distributions.values())

    def with_components(self, components: Mapping[str, Mapping[str, type]], name: str = "in-memory") -> Catalog:
        """This catalog with further components, `{kind: {type: class}}`, as if distribution `name` offered them."""
        dist = Distribution(name, "0")
        extra = [
            Offer(kind, type_, f"{cls.__module__}:{cls.__qualname__}", dist, cls)
            for kind, classes in components.items()
            for type_, cls in classes.items()
        ]
        return Catalog([*self.all_offers(), *extra], [*self._distributions.values(), dist])

    def all_offers(self) -> Iterator[Offer]:
        """Every offer, in the order of kind, type and distribution."""
        for _, types in sorted(self._offers.items()):
            for _, offers in sorted(types.items()):
                yield from sorted(offers, key=lambda offer: offer.distribution.name)

    def kinds(self) -> list[str]:
        """Kinds that some distribution declares."""
        return sorted(self._offers.get("kind", {}))

    def types(self, kind: str) -> list[str]:
        """Installed types of a kind."""
        return sorted(self._offers.get(kind, {}))

    def kind_base(self, kind: str) -> type[Component]:
        """The base class of a kind.

        Raises:
            PluginError: no distribution declares it, or two do.
        """
        owners = self._offers.get("kind", {}).get(kind, [])
        if not owners:
            known = ", ".join(self.kinds())
            raise PluginError(f"no installed distribution declares the kind {kind!r}; there are {known}")
        if len(owners) > 1:
            names = " and ".join(sorted(str(owner.distribution) for owner in owners))
            raise PluginError(f"kind {kind!r} is declared by {names}; uninstall one of them")
        base = self._load_offer(owners[0])
        if not (isinstance(base, type) and issubclass(base, Component) and getattr(base, "kind", None) == kind):
            raise PluginError(f"{owners[0].value} of {owners[0].distribution} is not a base class with kind = {kind!r}")
        return base

    def check_kind(self, cls: type[Component]) -> None:
        """Refuse a kind that two distributions declare."""
        if len(self._offers.get("kind", {}).get(cls.kind, [])) > 1:
            self.kind_base(cls.kind)

    def load(self, kind: str, type_: str, base: type[Component] | None = None) -> type[Component]:
        """The component class that a job calls `type_`.

        Args:
            type_: an installed type (`muon`), a qualified one (`forge-plugin-muon/muon`), a dotted path
                (`package.module:Class`) or a file (`./file.py:Class`, relative to the working directory).
            base: class that it must derive from; by default the kind's base class.

        Raises:
            UnknownTypeError: nothing installed has that type.
            PluginError: two distributions claim it, it cannot be imported, or it is not a component of this kind.
        """
        if ":" in type_:
            cls, spelling, where = self._load_path(kind, type_)
        else:
            offer = self._select(kind, type_)
            cls, spelling, where = self._load_offer(offer), offer.qualified, str(offer.distribution)
        base = base or self.kind_base(kind)
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise PluginError(f"{kind} {type_!r} from {where} is not a subclass of {base.__name__}")
        if not _is_attrs(cls):
            fix = "decorate it with @attrs.frozen(kw_only=True)"
            raise PluginError(f"{kind} {type_!r} from {where} is not an attrs class; {fix}")
        self._types[cls] = spelling
        return cls

    def load_offer(self, offer: Offer) -> Any:
        """What an entry point names, whatever its group.

        Raises:
            PluginError: it cannot be imported; names distribution, version, entry point and cause.
        """
        return self._load_offer(offer)

    def load_target(self, offer: Offer) -> Any:
        """What an entry point names, seen to be what its group asks for: a base class, a component, or any object.

        Raises:
            PluginError: it cannot be imported, or is something else.
        """
        if offer.kind == "kind":
            return self.kind_base(offer.type)
        return self.load_offer(offer) if offer.kind == "command" else self.load(offer.kind, offer.qualified)

    def type_of(self, cls: type) -> str:
        """How the resolved job spells a class: `distribution/type`, or the path it was loaded from."""
        if cls in self._types:
            return self._types[cls]
        kind = getattr(cls, "kind", None)
        for offer in self.offers(kind) if kind else ():
            if self._is_offer_of(offer, cls):
                self.used.setdefault(offer.distribution.name, offer.distribution)
                return offer.qualified
        if cls.__module__.startswith(LOCAL):
            path = str(sys.modules[cls.__module__].__file__)
            self.files.setdefault(path, _digest(Path(path)))
            return f"{path}:{cls.__qualname__}"
        return f"{cls.__module__}:{cls.__qualname__}"

    def _is_offer_of(self, offer: Offer, cls: type) -> bool:
        """Whether an entry point names a class that was imported without the catalog; it may name a re-export."""
        module, _, attribute = offer.value.partition(":")
        package, name = cls.__module__.partition(".")[0], cls.__qualname__
        if offer.target is not None or attribute != name or module.partition(".")[0] != package:
            return offer.target is cls
        return getattr(sys.modules.get(module), name, None) is cls

    def offers(self, kind: str) -> list[Offer]:
        """Offers of one kind or group."""
        return [offer for offer in self.all_offers() if offer.kind == kind]

    def distribution(self, name: str) -> Distribution | None:
        """An installed distribution that offers something, by name."""
        return self._distributions.get(_normalise(name))

    # --- selecting -----------------------------------------------------------------------------------------------

    def _select(self, kind: str, type_: str) -> Offer:
        owner, _, name = type_.rpartition("/")
        offers = self._offers.get(kind, {}).get(name, [])
        if owner:
            offers = [offer for offer in offers if _normalise(offer.distribution.name) == _normalise(owner)]
        if not offers:
            raise self._unknown(kind, type_)
        if len(offers) > 1:
            names = " and ".join(sorted(str(offer.distribution) for offer in offers))
            choices = " or ".join(f'type = "{offer.qualified}"' for offer in sorted(offers, key=lambda o: o.qualified))
            raise PluginError(f"{kind} {type_!r} is offered by {names}; choose with {choices}")
        return offers[0]

    def _unknown(self, kind: str, type_: str) -> UnknownTypeError:
        owner, _, name = type_.rpartition("/")
        stale = self._stale(kind, name)
        if stale:
            return UnknownTypeError(f"no {kind} {type_!r}: {stale}", "")
        installed = self.types(kind)
        close = difflib.get_close_matches(name, installed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        absent = owner and not self.distribution(owner)
        missing = f"{owner} is not installed" if absent else f"no {kind} {type_!r} is installed"
        guess = owner if absent else "" if owner or close else f"forge-plugin-{name.replace('_', '-')}"
        return UnknownTypeError(f"{missing}{hint or '.'} Installed: {', '.join(installed) or 'none'}", guess)

    def _stale(self, kind: str, name: str) -> str:
        """Why a type is missing if an editable install has gained it since it was installed."""
        for dist in self._distributions.values():
            pyproject = dist.editable_path / "pyproject.toml" if dist.editable_path else None
            if pyproject is None or not pyproject.is_file():
                continue
            if name in declared_entry_points(pyproject).get(PREFIX + kind, {}):
                refresh = f"pip install --no-deps -e {dist.editable_path}"
                changed = f"the pyproject.toml of {dist} offers it, but changed since it was installed"
                return f"{changed}; refresh with: {refresh}"
        return ""

    # --- loading -------------------------------------------------------------------------------------------------

    def _load_offer(self, offer: Offer) -> Any:
        check_requirement(offer.distribution)
        try:
            target = offer.load()
        except Exception as error:
            what = f"cannot load {offer.kind} {offer.type!r} from {offer.distribution} ({offer.value})"
            raise PluginError(f"{what}: {type(error).__name__}: {error}") from error
        self.used.setdefault(offer.distribution.name, offer.distribution)
        return target

    def _load_path(self, kind: str, spec: str) -> tuple[Any, str, str]:
        location, _, attribute = spec.rpartition(":")
        try:
            if location.endswith(".py"):
                module, spelling = self._load_file(Path(location)), f"{Path(location).resolve()}:{attribute}"
            else:
                module, spelling = importlib.import_module(location), spec
            target: Any = module
            for part in attribute.split("."):
                target = getattr(target, part)
        except Exception as error:
            raise PluginError(f"cannot load {kind} from {spec!r}: {type(error).__name__}: {error}") from error
        return target, spelling, location

    def _load_file(self, path: Path) -> ModuleType:
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        path = path.resolve()
        digest = _digest(path)
        self.files[str(path)] = digest
        name = f"{LOCAL}{path.stem}_{digest[:12]}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None, path
            assert spec.loader is not None, path
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]


def has_metadata(dist: metadata.Distribution) -> bool:
    """Whether a folder is that of a distribution: an uninstall that was interrupted leaves others."""
    return bool(dist.read_text("METADATA") or dist.read_text("PKG-INFO"))


def check_requirement(distribution: Distribution) -> None:
    """Compare what a plugin requires of `forge-run` with the running core; installers check this only once.

    Raises:
        PluginError: they do not fit; the message says which side to upgrade.
    """
    if _normalise(distribution.name) == CORE:
        return
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import Version

    version = core_version()
    for line in distribution.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            raise PluginError(f"{distribution} has a requirement that cannot be read: {line!r}: {error}") from error
        if _normalise(requirement.name) != CORE or (requirement.marker and not requirement.marker.evaluate()):
            continue
        broken = [spec for spec in requirement.specifier if not spec.contains(version, prereleases=True)]
        if broken:
            newer = any(Version(version) < Version(spec.version.removesuffix(".*")) for spec in broken)
            side = f"pip install --upgrade {CORE if newer else distribution.name}"
            needs = f"{distribution} requires {CORE}{requirement.specifier}"
            raise PluginError(f"{needs}, but this is {CORE} {version}; {side}")


def declared_entry_points(pyproject: Path) -> dict[str, dict[str, str]]:
    """Entry points by group that a source folder declares; none if its pyproject.toml is not TOML."""
    try:
        return tomllib.loads(pyproject.read_text()).get("project", {}).get("entry-points", {})
    except tomllib.TOMLDecodeError:
        return {}


@functools.cache
def core_version() -> str:
    """Version of the running core."""
    return metadata.version(CORE)


def _is_attrs(cls: type) -> bool:
    """Whether a class is decorated itself: annotations of an undecorated subclass would not become fields."""
    return attrs.has(cls) and ("__attrs_attrs__" in vars(cls) or not inspect.get_annotations(cls))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
