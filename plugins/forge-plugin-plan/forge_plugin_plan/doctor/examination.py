"""All checks, one after the other, each with a time limit."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator, Sequence

from attrs import frozen

from forge_plugin_plan.doctor.file_system import check_cache, check_output
from forge_plugin_plan.doctor.job import check_job
from forge_plugin_plan.doctor.machine import check_bf16, check_cores, check_limits, check_memory
from forge_plugin_plan.doctor.network import check_adapters, check_host, check_ports
from forge_plugin_plan.doctor.packages import check_versions
from forge_plugin_plan.doctor.ranks import check_collectives, check_devices, check_torch
from forge_plugin_plan.doctor.results import Check, Result, State, Surroundings, failed
from forge_plugin_plan.doctor.scheduler import check_launcher, check_slurm

LIMIT_S = 20.0
"""Seconds of a check. A file system that hangs holds its thread forever."""

# Beyond the time limit of the ranks, so that their limit is the one that is reported
MARGIN_S = 5.0

# Those that need no torch first: meanwhile the ranks import it. Closed on purpose: what a plugin demands of a machine
# belongs to its `problems(job, layout)`, which `check_job` calls, and which hold before every run and not only here.
CHECKS: Sequence[tuple[str, Check]] = (
    ("packages", check_versions),
    ("machine", check_cores),
    ("machine", check_memory),
    ("machine", check_limits),
    ("file systems", check_output),
    ("file systems", check_cache),
    ("network", check_host),
    ("network", check_ports),
    ("network", check_adapters),
    ("scheduler", check_launcher),
    ("scheduler", check_slurm),
    ("job", check_job),
    ("torch and devices", check_torch),
    ("torch and devices", check_devices),
    ("torch and devices", check_bf16),
    ("ranks", check_collectives),
)


@frozen
class Examined:
    """A result with its group and the time that its check took."""

    group: str
    result: Result
    seconds: float


def examine(surroundings: Surroundings, checks: Sequence[tuple[str, Check]] = CHECKS) -> Iterator[Examined]:
    """Yields the results of all checks, in their order."""
    for group, check in checks:
        started = time.perf_counter()
        # The check of the collectives waits for processes that have a separate time limit.
        limit = max(LIMIT_S, surroundings.ranks.limit_s + MARGIN_S)
        results = _within(limit, check, surroundings)
        for result in results:
            yield Examined(group, result, time.perf_counter() - started)


def _within(limit_s: float, check: Check, surroundings: Surroundings) -> list[Result]:
    """Run a check in a thread: what it found until its time was over, and its own failure as a result."""
    results: list[Result] = []

    def run() -> None:
        try:
            results.extend(check(surroundings))  # one by one: what came before a failure is kept
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            seen = f"the check itself failed: {type(error).__name__}: {error} ({where.name}:{where.lineno})"
            results.append(failed(_name(check), seen, "report it, with the output of forge-run doctor --json"))

    # A daemon thread: a check that hangs in the kernel must not keep the command from ending
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if not thread.is_alive():
        return results
    mend = "look at the kernel's log and the mounts: a server may not answer"
    return [*results, failed(_name(check), f"no answer in {limit_s:g} s", mend)]


def _name(check: Check) -> str:
    return getattr(check, "__name__", "check").removeprefix("check_").replace("_", " ")


def counts(examined: Sequence[Examined]) -> dict[State, int]:
    """Returns how many results there are of each state."""
    return {state: sum(one.result.state == state for one in examined) for state in State}
