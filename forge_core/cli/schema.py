"""`forge-run schema`: a JSON Schema of the job file, for editors."""

from __future__ import annotations

import argparse
import json
import sys

from forge_core.config.schema import job_schema
from forge_core.contracts.errors import ExitCode
from forge_core.plugins.catalog import Catalog


def command(argv: list[str]) -> int:
    """Print a JSON Schema of the job file with everything installed, for completion and checks in editors."""
    argparse.ArgumentParser("forge-run schema", description=command.__doc__).parse_args(argv)
    schema, left_out = job_schema(Catalog.installed())
    print(json.dumps(schema, indent=2, ensure_ascii=False))
    # Apart from the schema, so that standard output can go into a file.
    for message in left_out:
        print(f"left out: {message}", file=sys.stderr)
    return ExitCode.FINISHED
