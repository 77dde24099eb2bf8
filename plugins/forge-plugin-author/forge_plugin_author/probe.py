"""Loads one entry point and reports the outcome as a line of JSON: run by `forge-run plugins --check`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from attrs import asdict, frozen

from forge_core.contracts.errors import PluginError
from forge_core.plugins.catalog import Catalog
from forge_testing.catalogs import load_target


@frozen
class Probe:
    """Outcome of loading an entry point."""

    error: str = ""
    """Why it cannot be loaded."""
    seconds: float = 0.0
    torch: bool = False
    """Whether loading it imported torch, which makes checking a job slow."""
    problems: Sequence[str] = ()
    """Problems of the loaded object, each with its fix, as `forge_testing.check_distribution` reports them."""

    @property
    def verdict(self) -> str:
        if self.error:
            return "error"
        return f"{self.seconds:.2f} s{' (imports torch)' if self.torch else ''}"


def probe(kind: str, qualified: str) -> Probe:
    """Load the component `qualified` as a job would, and check it."""
    catalog = Catalog.installed()
    [offer] = (offer for offer in catalog.offers(kind) if offer.qualified == qualified)
    start = time.perf_counter()
    try:
        target = load_target(offer, catalog)
    except PluginError as error:
        return Probe(str(error))
    seconds, torch = round(time.perf_counter() - start, 3), "torch" in sys.modules
    from forge_testing.inspection import target_problems  # late: its imports must not count as the component's

    return Probe("", seconds, torch, list(target_problems(offer, target, torch, catalog, None)))


if __name__ == "__main__":
    # On a separate line, as the component may have printed something without a line break
    print("\n" + json.dumps(asdict(probe(*sys.argv[1:3]))))
