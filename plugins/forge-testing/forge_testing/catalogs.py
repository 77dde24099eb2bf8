"""Catalogs and plugins for tests, independent of other installed distributions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from forge_core.contracts.components import Component, Plugin
from forge_core.contracts.errors import PluginError
from forge_core.plugins.catalog import CORE, Catalog, Distribution, Offer
from forge_core.plugins.manager import Plugins

Components = Mapping[str, Mapping[str, type[Component]]]
"""Kind -> type -> class."""


@functools.cache
def installed() -> Catalog:
    """Return the catalog of everything installed. It is read once per process, as that takes longer than a step."""
    return Catalog.installed()


def catalog_of(components: Components | None = None, name: str = "in-memory") -> Catalog:
    """Build a catalog of the core's own components and these, without anything else that is installed.

        catalog = catalog_of({"optimizer": {"lion": Lion}})
        job = load_job("job.toml", catalog=catalog)

    Args:
        components: component classes by kind and type. A kind of your own is declared like a component, by its base:
            `{"kind": {"ffn": FFNComponent}, "ffn": {"swiglu": SwiGLU}}`.
        name: name of the distribution that offers them.
    """
    installed = Catalog.installed()
    core = installed.distribution(CORE)
    assert core is not None, "the core is running, so it is installed"
    own = Catalog([offer for offer in installed.offers() if offer.distribution == core])
    return with_components(own, components, name) if components else own


def with_components(catalog: Catalog, components: Components, name: str = "in-memory") -> Catalog:
    """The catalog with further components, by kind and type, as if distribution `name` offered them."""
    dist = Distribution(name, "0")
    extra = [
        Offer(kind, type_, f"{cls.__module__}:{cls.__qualname__}", dist, cls)
        for kind, classes in components.items()
        for type_, cls in classes.items()
    ]
    return Catalog([*catalog.offers(), *extra])


def plugins_with(components: Components | None = None, **plugins: Plugin) -> Plugins:
    """Activate plugins, for calling their hooks: `plugins_with(ema=EMA(decay=0.9)).training_hooks(job)`.

    Args:
        components: components in addition to the core's own, as for `catalog_of`.
        plugins: the plugins of a job, by their names in the job.

    Raises:
        PluginError: a plugin's hooks do not fit their specifications.
    """
    return Plugins(plugins, catalog_of(components))


def load_target(offer: Offer, catalog: Catalog) -> Any:
    """Import the target of an entry point, and check it against its group: a base class, a component or a command.

    Raises:
        PluginError: it cannot be imported, or is something else.
    """
    if offer.kind == "kind":
        return catalog.kind_base(offer.type)
    if offer.kind != "command":
        return catalog.load(offer.kind, offer.qualified)
    command = catalog.load_offer(offer)
    if not callable(command):
        raise PluginError(f"command {offer.type!r} from {offer.distribution} is not a function of argv")
    return command
