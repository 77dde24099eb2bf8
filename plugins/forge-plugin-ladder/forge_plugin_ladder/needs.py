"""Memory and time of planned runs, by the simulated steps of `forge-run plan`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from forge_core.config.load import load_job
from forge_core.contracts.errors import ForgeError, JobError, Problem
from forge_core.parallel.initialise import DTYPES
from forge_core.plugins.catalog import Catalog, install_line
from forge_plugin_ladder.planned import STEPS, Planned, overrides

if TYPE_CHECKING:
    from forge_core.job import Job
    from forge_plugin_plan.gpus import GPU
    from forge_plugin_plan.machine import Machine
    from forge_plugin_plan.measurements import Measurements


@frozen(kw_only=True)
class Hardware:
    """What each run is given."""

    ranks: int = 1
    gpu: str = ""
    """Name of a data sheet; empty: none."""
    network: float = 0.0
    """Gbit/s that each GPU has to other nodes; 0: the usual ones."""
    calibration: Path | None = None
    """Measurements of a run, in place of the data sheet's figures."""


def with_needs(runs: Sequence[Planned], base: Path, catalog: Catalog, hardware: Hardware) -> list[Planned]:
    """Returns the runs with peak memory of the fullest rank, hours, and which does not fit.

    Args:
        runs: of a ladder.
        base: its base job.
        catalog: the installed components.
        hardware: what each run is given. Hours are a lower bound, and known with a GPU or a calibration only.

    Raises:
        JobError: forge-plugin-plan is not installed, or does not know the GPU.
    """
    try:
        import forge_plugin_plan.estimate  # noqa: F401
    except ImportError:
        raise JobError(
            [
                Problem("", "memory and hours are estimated by forge-plugin-plan, which is not installed"),
                *install_line({"forge-plugin-plan"}),
            ]
        ) from None
    found: dict[tuple[tuple[str, str], ...], _Step] = {}
    machines = _Machines.read(hardware)
    # A simulated step takes seconds, and budgets of one size mostly share it
    for run in runs:
        shape = _shape(run)
        if shape not in found:
            found[shape] = _step(run, base, catalog, hardware.ranks, machines)
    return [_with_step(run, found[_shape(run)]) for run in runs]


@frozen(kw_only=True)
class _Step:
    """A step of a run."""

    memory: int | None = None
    seconds: float | None = None
    remark: str = ""


def _shape(run: Planned) -> tuple[tuple[str, str], ...]:
    """The settings on which memory and time of a step depend: runs with the same ones are simulated once."""
    return tuple(
        (key, value)
        for key, value in run.settings.items()
        # A rate or a decay that is another number changes no tensor; a fraction in the model may
        if key.startswith("model.")
        or not (key == STEPS or key.startswith("scheduler.") or isinstance(tomllib.loads(f"x = {value}")["x"], float))
    )


@frozen(kw_only=True)
class _Machines:
    """The machine of a job, which depends on its dtype."""

    gpu: GPU | None
    measured: Measurements | None
    network: float
    """Bytes a second."""

    @classmethod
    def read(cls, hardware: Hardware) -> _Machines:
        from forge_plugin_plan.gpus import NETWORK_GBITS, find_gpu
        from forge_plugin_plan.measurements import Measurements

        # Before a job is simulated, which takes seconds: a name may be wrong
        return cls(
            gpu=find_gpu(hardware.gpu) if hardware.gpu else None,
            measured=Measurements.read(hardware.calibration) if hardware.calibration else None,
            network=(hardware.network or NETWORK_GBITS) * 1e9 / 8,
        )

    def of(self, job: Job) -> Machine | None:
        from forge_plugin_plan.machine import Machine

        if self.measured is not None:
            dtype = str(DTYPES[job.train.precision]).removeprefix("torch.")
            return Machine.calibrated(self.measured, self.gpu, self.network, dtype)
        return Machine.of_data_sheet(self.gpu, self.network) if self.gpu else None


def _step(run: Planned, base: Path, catalog: Catalog, ranks: int, machines: _Machines) -> _Step:
    """The step of a run, simulated on as many ranks."""
    from forge_plugin_plan.bounds import bounds
    from forge_plugin_plan.estimate import make_plan

    try:
        # Without data, which need not be on the machine that plans
        job = load_job(base, overrides=overrides(run.settings), catalog=catalog, world_size=ranks, with_data=False)
        machine, plan = machines.of(job), make_plan(job, catalog, ranks)
    # A wrong job is the user's mistake; what cannot be simulated may train all the same, and is noted
    except JobError:
        raise
    except ForgeError as error:
        return _Step(remark=str(error).splitlines()[0])
    memory = plan.fullest.memory
    if memory is None:
        return _Step(remark=f"its step cannot be simulated: {plan.fullest.failure}")
    seconds = None
    if machine is not None:
        # Of each rank the resource that takes longest, as all may overlap; of the ranks the slowest
        played = [rank for rank in plan.ranks if rank.traffic is not None]
        seconds = max(bound.seconds for rank in played for bound in bounds(rank, machine))
        if memory.peak > machine.memory:
            size = f"{memory.peak / 1e9:,.1f} GB of {machine.memory / 1e9:,.0f} GB ({machine.name})"
            return _Step(memory=memory.peak, seconds=seconds, remark=f"does not fit: {size}")
    return _Step(memory=memory.peak, seconds=seconds)


def _with_step(run: Planned, step: _Step) -> Planned:
    # A branch makes the steps after its trunk's alone
    hours = None if step.seconds is None else step.seconds * run.steps * run.trained / 3600
    return evolve(run, memory=step.memory, hours=hours, remark=step.remark)
