"""`forge-run check`: is this job right?"""

from __future__ import annotations

import argparse

from forge_core.cli.arguments import parse_job_arguments
from forge_core.cli.tables import columns
from forge_core.config.load import load_job
from forge_core.config.walk import walk_components
from forge_core.contracts.errors import ExitCode
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog


def command(argv: list[str]) -> int:
    """Check a job and print what it is made of; nothing is run or written."""
    parser = argparse.ArgumentParser("forge-run check", description=command.__doc__)
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks that the job is to run on (1)")
    options, files, overrides = parse_job_arguments(parser, argv)
    catalog = Catalog.installed()
    job = load_job(*files, overrides=overrides, catalog=catalog, world_size=options.world_size)
    print(f"ok: {' + '.join(files)}\n")
    print(summary(job, catalog))
    return ExitCode.FINISHED


def summary(job: Job, catalog: Catalog) -> str:
    """The components of a checked job, the distributions they come from, and the layout."""
    types = {path: catalog.type_of(type(component)) for path, component in walk_components(job)}
    used = ", ".join(str(distribution) for _, distribution in sorted(catalog.used.items()))
    assert job.checked is not None, "load_job checks every job"
    return f"{columns([*types.items()])}\n\nlayout: {job.checked.layout}\nfrom: {used or 'no distribution'}"
