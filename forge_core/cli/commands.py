"""The commands of `forge-run`: what is installed of kind `command` (`forge_core.contracts.components.Command`).

They are listed from metadata and imported when called.
"""

from __future__ import annotations

from forge_core.config.docs import function_summary
from forge_core.contracts.errors import JobError, did_you_mean
from forge_core.plugins.catalog import CORE, Catalog, Offer
from forge_core.plugins.offers import first_party


def find_command(catalog: Catalog, name: str) -> Offer:
    """The installed command `name`, or `distribution/name`.

    Raises:
        JobError: there is none, or several distributions offer it. A command that a first-party distribution has comes
            with the line that installs it.
    """
    owner, _, bare = name.rpartition("/")
    known = catalog.offers("command")
    offers = [offer for offer in known if offer.type == bare and owner in ("", offer.distribution.name)]
    if not offers:
        first_party_commands = first_party()["command"]
        if distribution := first_party_commands.get(name):
            raise JobError(f"forge-run: the command {name!r} is not installed: pip install {distribution}")
        names = sorted({offer.type for offer in known})
        hint = did_you_mean(name, [*names, *first_party_commands]) or f". Commands: {', '.join(names)}"
        raise JobError(f"forge-run: {name!r} is no command and no job file{hint}")
    if len(offers) > 1:
        choices = " or ".join(f"forge-run {offer.qualified}" for offer in offers)
        raise JobError(f"forge-run: several distributions offer the command {name!r}; choose with {choices}")
    return offers[0]


def help_rows(catalog: Catalog) -> list[tuple[str, str]]:
    """Name and help line of every installed command, those of the core first. Imports none of them."""
    offers = sorted(catalog.offers("command"), key=lambda offer: (offer.distribution.name != CORE, offer.type))
    return [(f"  {offer.type}", _help_line(offer)) for offer in offers]


def _help_line(offer: Offer) -> str:
    module, _, function = offer.value.partition(":")
    origin = "" if offer.distribution.name == CORE else f"(from {offer.distribution})"
    return " ".join(filter(None, (function_summary(module, function), origin)))
