"""Check of the job that the command was given."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.config.load import load_job
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.job import Job
from forge_plugin_plan.doctor.results import Result, Surroundings, failed, not_run, ok


def check_job(surroundings: Surroundings) -> Iterator[Result]:
    """Check whether the job is valid on this machine, including data and tokenizer, as `forge-run check` does."""
    if not surroundings.files:
        yield not_run("job", "none was given: forge-run doctor job.toml checks its data and its output folder too")
        return
    try:
        job = load_job(*surroundings.files, overrides=surroundings.overrides, world_size=surroundings.world_size)
    except JobError as error:
        seen = "; ".join(str(problem) for problem in error.problems)
        yield failed("job", seen, f"correct it, and see `forge-run check {' '.join(surroundings.files)}`")
        return
    assert job.checked is not None, "load_job checks every job"
    yield ok("job", f"{' + '.join(surroundings.files)} is right; {job.checked.layout}")


def read_output(files: list[str], overrides: list[str], world_size: int) -> str | None:
    """Returns `job.output`; None if the job cannot be read, which `check_job` then reports."""
    try:
        job: Job = load_job(*files, overrides=overrides, world_size=world_size, with_data=False)
    except ForgeError:
        return None
    return job.job.output
