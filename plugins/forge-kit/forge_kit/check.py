"""`forge-run check`: is this job right?"""

from __future__ import annotations

import argparse
import json
from typing import Any

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.config.keys import walk_components
from forge_core.config.load import load_job
from forge_core.contracts.errors import ExitCode, JobError, Problem
from forge_core.plugins.catalog import Catalog
from forge_kit.tables import columns


def command(argv: list[str]) -> int:
    """Check a job and print what it is made of; nothing is run or written."""
    parser = argparse.ArgumentParser("forge-run check", description=command.__doc__)
    parser.add_argument("--world-size", type=positive, default=1, metavar="N", help="ranks of the run (1)")
    parser.add_argument("--json", action="store_true", help="print JSON, problems too")
    with_examples(parser, "forge-run check job.toml", "forge-run check job.toml --world-size 8 --parallel.tp.degree=2")
    options, files, overrides = parse_job_arguments(parser, argv)
    catalog = Catalog.installed()
    try:
        job = load_job(*files, overrides=overrides, catalog=catalog, world_size=options.world_size)
    except JobError as error:
        if not options.json:
            raise
        print(json.dumps({"ok": False, "files": files, "problems": [*map(_facts, error.problems)]}, indent=2))
        return error.exit_code
    assert job.checked is not None, "load_job checks every job"
    types = {path: catalog.type_of(type(component)) for path, component in walk_components(job)}
    owners = sorted({type_.partition("/")[0] for type_ in types.values() if ":" not in type_})
    used = [distribution for distribution in map(catalog.distribution, owners) if distribution is not None]
    if options.json:
        versions = {distribution.name: distribution.version for distribution in used}
        facts = {"layout": str(job.checked.layout), "components": types, "distributions": versions}
        print(json.dumps({"ok": True, "files": files, "problems": [], **facts}, indent=2))
        return ExitCode.FINISHED
    print(f"ok: {' + '.join(files)}\n\n{columns([*types.items()])}")
    print(f"\nlayout: {job.checked.layout}\nfrom: {', '.join(map(str, used)) or 'no distribution'}")
    return ExitCode.FINISHED


def _facts(problem: Problem) -> dict[str, Any]:
    """A problem for editors and scripts: file, line (None: a flag, or no single place), key and message."""
    place, _, line = problem.origin.rpartition(":")
    file, number = (place, int(line)) if line.isdecimal() else (problem.origin, None)
    return {"file": file, "line": number, "key": problem.path, "message": problem.message}
