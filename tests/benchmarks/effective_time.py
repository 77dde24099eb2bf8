"""Share of time in steps that count on 512 to 65,536 GPUs, by design of saves and restarts: formula and simulation.

python tests/benchmarks/effective_time.py                                   # costs as in docs/benchmarks.md
python tests/benchmarks/effective_time.py --save 45 --restart 600           # measured costs of your cluster
python tests/benchmarks/effective_time.py --run runs/big                    # those that a run with [hooks.goodput] had

The model. Each GPU fails once in `--gpu-years`, independently: a run on N GPUs has M = years / N between failures. It
trains for tau seconds, then a save keeps it waiting for d; a failure at any moment of either loses all since the
last save that was complete. Then R passes until training goes on: the time until the failure is noticed and that of the
restart. A share of failures (`--silent`) is noticed only by a limit for hangs or heartbeats, others at once. None comes
during a restart. Lost are only these three: no evaluation, no wait for data, no queue. A save in the background counts
from its begin, since it is there long before the next one.

With failures at a constant rate the share is exactly tau / ((e^((tau + d) / M) - 1) (M + R)). The simulation draws each
failure and each time until it is noticed; it is repeated with Weibull times of the same mean and shape 0.7 (failures in
bunches: Schroeder and Gibson 2010 have 0.7 to 0.8), for which there is no such formula. In designs that choose,
tau is sqrt(2 d (M + R)), between 10 d and an hour, as `[hooks.interval]` has it. With copies in memory of other nodes
failures of both nodes of a pair at once are left out.

`torchft`: replica groups train on while one is away. A failure costs all groups a stall and a step, and the group that
failed `--rejoin` seconds of its share.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from attrs import evolve, frozen

from forge_plugin_resilience.goodput.failure_rate import GPU_YEARS, YEAR, best_interval, effective_time
from forge_plugin_resilience.goodput.words import duration

GPUS = (512, 4096, 16384, 65536)
SHAPE = 0.7


@frozen(kw_only=True)
class Costs:
    """Seconds, unless their options say otherwise."""

    step: float = 10.0
    save: float = 60.0
    background: float = 3.0
    restart: float = 900.0
    in_job: float = 240.0
    copy: float = 0.2
    copy_steps: float = 10.0
    from_copy: float = 180.0
    in_process: float = 60.0
    silent: float = 0.25
    hang: float = 1800.0
    heartbeat: float = 15.0
    interval_steps: float = 1000.0
    stall: float = 20.0
    rejoin: float = 300.0
    groups: float = 8.0
    gpu_years: float = GPU_YEARS


HELP = {
    "step": "seconds of a step",
    "save": "seconds that a save keeps training waiting",
    "background": "the same of a save in the background",
    "restart": "seconds from a failure that is noticed until training goes on",
    "in_job": "the same with a restart in the job, on spare nodes",
    "copy": "seconds of a copy to other nodes' memory",
    "copy_steps": "steps between such copies",
    "from_copy": "seconds of a restart in the job from such a copy",
    "in_process": "seconds of a restart without a new process",
    "silent": "share of failures that no process reports",
    "hang": "seconds until a silent one is noticed by the limit for hangs",
    "heartbeat": "the same by heartbeats",
    "interval_steps": "steps between saves where nothing chooses",
    "stall": "seconds for which all groups wait when one fails",
    "rejoin": "seconds until it is back",
    "groups": "replica groups",
    "gpu_years": "years of one GPU between failures",
}


@frozen(kw_only=True)
class Design:
    """A way to save and to restart."""

    name: str
    blocked: float
    restart: float
    noticed: float
    """Seconds until a silent failure is noticed."""
    interval: float | None = None
    """Seconds between saves; None: chosen."""

    def tau(self, mtbf: float, silent: float) -> float:
        """Returns the seconds of training between saves."""
        return self.interval or best_interval(self.blocked, mtbf, self.restart + silent * self.noticed)


def designs(costs: Costs) -> Iterator[Design]:
    """Yields what each row of the table adds to the one before."""
    step, fixed = costs.step, costs.interval_steps * costs.step
    plain = Design(name="", blocked=costs.save, restart=costs.restart, noticed=costs.hang)
    yield evolve(plain, name=f"a save every {costs.interval_steps:,.0f} steps", interval=fixed)
    yield (chosen := evolve(plain, name="interval chosen"))
    yield (background := evolve(chosen, name="+ saves in the background", blocked=costs.background))
    yield (heard := evolve(background, name="+ silent ranks found by heartbeats", noticed=costs.heartbeat))
    yield evolve(heard, name="+ restart in the job, spare nodes", restart=costs.in_job)
    copies = f"+ copies in peers' memory every {costs.copy_steps:,.0f} steps"
    yield evolve(heard, name=copies, blocked=costs.copy, restart=costs.from_copy, interval=costs.copy_steps * step)
    every = "restart in the process, copies every step"
    yield evolve(heard, name=every, blocked=costs.copy, restart=costs.in_process, interval=step)


def simulated(
    design: Design, mtbf: float, silent: float, lifetime: Callable[[random.Random], float], failures: int
) -> float:
    """Returns the share of useful time over so many failures; `lifetime` draws a time to the next one, of mean 1."""
    draw, total, useful = random.Random(1), 0.0, 0.0
    tau = design.tau(mtbf, silent)
    for _ in range(failures):
        lived = mtbf * lifetime(draw)
        useful += tau * math.floor(lived / (tau + design.blocked))
        total += lived + design.restart + (design.noticed if draw.random() < silent else 0.0)
    return useful / total


def weibull(draw: random.Random) -> float:
    """Draws a Weibull time of mean 1."""
    return draw.weibullvariate(1 / math.gamma(1 + 1 / SHAPE), SHAPE)


def with_groups(costs: Costs, mtbf: float) -> float:
    """Returns the share of useful time of replica groups."""
    return 1 / (1 + (costs.stall + costs.step + costs.rejoin / costs.groups) / mtbf)


def measured(folder: Path, costs: Costs) -> Costs:
    """Replaces costs by those that a run had, as far as it had any."""
    from forge_plugin_resilience.goodput.run_account import read_run

    account = read_run(folder).account
    if account is None:
        raise SystemExit(f"{folder} has no events.jsonl: add [hooks.goodput]")
    blocked = account.blocked_s or costs.save
    in_background = any(save.write_s is not None for save in account.saves)
    saves = {"background": blocked} if in_background else {"save": blocked}
    return evolve(costs, step=account.step_s or costs.step, restart=account.restart_s or costs.restart, **saves)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name, words in HELP.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=float, help=f"{words} ({getattr(Costs(), name):g})")
    parser.add_argument("--run", type=Path, help="take step, save and restart from this run")
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--failures", type=int, default=200_000, help="failures to simulate")
    options = parser.parse_args()
    costs = measured(options.run, Costs()) if options.run else Costs()
    costs = evolve(costs, **{name: getattr(options, name) for name in HELP if getattr(options, name) is not None})
    print(", ".join(f"{name} {getattr(costs, name):g}" for name in HELP))
    print("per cent: formula (simulation; with bunches), and the interval\n")
    mtbfs = [costs.gpu_years * YEAR / gpus for gpus in options.gpus]
    heads = [f"{gpus:,} GPUs (M {duration(mtbf)})" for gpus, mtbf in zip(options.gpus, mtbfs, strict=True)]
    print("| design | " + " | ".join(heads) + " |\n|---|" + "---|" * len(heads))
    worst = 0.0
    for design in designs(costs):
        cells = []
        for mtbf in mtbfs:
            tau, restart = design.tau(mtbf, costs.silent), design.restart + costs.silent * design.noticed
            exact = effective_time(tau, design.blocked, restart, mtbf)
            drawn = [
                simulated(design, mtbf, costs.silent, lifetime, options.failures)
                for lifetime in (lambda draw: draw.expovariate(1.0), weibull)
            ]
            worst = max(worst, abs(exact - drawn[0]))
            cells.append(f"{100 * exact:.1f} ({100 * drawn[0]:.1f}; {100 * drawn[1]:.1f}) {duration(tau)}")
        print(f"| {design.name} | " + " | ".join(cells) + " |")
    shares = " | ".join(f"{100 * with_groups(costs, mtbf):.1f}" for mtbf in mtbfs)
    print(f"| torchft, {costs.groups:g} groups | {shares} |")
    print(f"\nformula and simulation differ by {100 * worst:.2f} points at most")


if __name__ == "__main__":
    main()
