"""Finds the problems that `forge-run plugins --check` reports, loading each entry point in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forge_core.plugins.catalog import CORE, Catalog, Distribution, Offer
from forge_plugin_author.probe import Probe
from forge_testing.inspection import bound_problems
from forge_testing.stale import stale_entries

WORKERS = 4
"""Entry points that are loaded at the same time."""
TIMEOUT_S = 120
"""Seconds after which loading an entry point is a failure."""


def probes(offers: Sequence[Offer]) -> list[Probe]:
    """Load each offer in a separate process, so that neither its failures nor its imports affect another offer."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(_probe, offers))


def distribution_problems(distribution: Distribution, catalog: Catalog) -> Iterator[str]:
    """Yields problems of an installed distribution: its requirement on the core, and stale entry points."""
    if distribution.name != CORE:
        yield from (f"problem: {distribution}: {problem}" for problem in bound_problems(distribution))
    yield from (f"stale: {line}" for line in stale_entries([distribution], catalog))


def _probe(offer: Offer) -> Probe:
    action = f"loading {offer.kind} {offer.qualified}"
    # -P: a file in the current directory must not hide an installed module
    command = [sys.executable, "-P", "-m", "forge_plugin_author.probe", offer.kind, offer.qualified]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Probe(f"{action} takes more than {TIMEOUT_S} s; see what its module does when it is imported")
    try:
        # The last line, as modules may print while they are imported
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Probe(f"{action} ended the process: {last}")
    return Probe(**answer)
