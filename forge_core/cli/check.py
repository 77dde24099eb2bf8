"""`forge-run check`: is this job right?"""

from __future__ import annotations

import argparse

from forge_core.cli.command_line import columns, parse_job_arguments
from forge_core.config.keys import walk_components
from forge_core.config.load import load_job
from forge_core.contracts.errors import ExitCode
from forge_core.plugins.catalog import Catalog


def command(argv: list[str]) -> int:
    """Check a job and print what it is made of; nothing is run or written."""
    parser = argparse.ArgumentParser("forge-run check", description=command.__doc__)
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks that the job is to run on (1)")
    options, files, overrides = parse_job_arguments(parser, argv)
    catalog = Catalog.installed()
    job = load_job(*files, overrides=overrides, catalog=catalog, world_size=options.world_size)
    assert job.checked is not None, "load_job checks every job"
    # First the types: asking for one notes its distribution as used.
    types = {path: catalog.type_of(type(component)) for path, component in walk_components(job)}
    used = ", ".join(str(distribution) for _, distribution in sorted(catalog.used.items()))
    print(f"ok: {' + '.join(files)}\n\n{columns([*types.items()])}")
    print(f"\nlayout: {job.checked.layout}\nfrom: {used or 'no distribution'}")
    return ExitCode.FINISHED
