"""Loads one entry point and tells how it went, as a line of JSON: run by `forge-run plugins --check`."""

from __future__ import annotations

import json
import sys
import time

from attrs import asdict, frozen

from forge_core.errors import PluginError
from forge_core.plugins.catalog import Catalog


@frozen
class Probe:
    """What loading an entry point showed."""

    error: str = ""
    seconds: float = 0.0
    torch: bool = False
    """Whether loading it imported torch, which makes checking a job slow."""

    @property
    def verdict(self) -> str:
        if self.error:
            return "error"
        return f"{self.seconds:.2f} s{' (imports torch)' if self.torch else ''}"


def probe(kind: str, qualified: str) -> Probe:
    """Load what `qualified` names, as a job that names it would."""
    catalog = Catalog.installed()
    start = time.perf_counter()
    try:
        if kind in ("kind", "command"):
            [offer] = (offer for offer in catalog.offers(kind) if offer.qualified == qualified)
            catalog.kind_base(offer.type) if kind == "kind" else catalog.load_offer(offer)
        else:
            catalog.load(kind, qualified)
    except PluginError as error:
        return Probe(str(error))
    return Probe("", round(time.perf_counter() - start, 3), "torch" in sys.modules)


if __name__ == "__main__":
    print(json.dumps(asdict(probe(*sys.argv[1:3]))))
