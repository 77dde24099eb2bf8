"""`forge-run profile goodput`: where the time of a run went."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import Schema, array, one_of
from forge_kit.tools.outputs import output_file
from forge_plugin_resilience.goodput.report import describe, facts_of
from forge_plugin_resilience.goodput.run_account import RunAccount, read_run

FORMATS = (".png", ".pdf", ".svg")


HEADING = "watch"


def command(argv: list[str]) -> int:
    """Show where the time of a run went, over all its starts.

    The command also shows what failures and saves cost.
    """
    parser = argparse.ArgumentParser("forge-run profile goodput", description=command.__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, also of a run that is running")
    add_json(parser, ": an object, or an array of several runs")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the run's time into a PNG, PDF or SVG file")
    with_examples(
        parser, "forge-run profile goodput runs/big", "forge-run profile goodput runs/big --picture goodput.png"
    )
    options = parser.parse_args(argv)
    # Before the runs are read, which may take long
    if options.picture is not None:
        options.picture = output_file(options.picture, "--picture", FORMATS)
    runs = [read_run(folder) for folder in options.runs]
    if options.picture is not None:
        if len(runs) > 1:
            raise JobError("--picture draws one run: name one")
        if runs[0].account is None:
            raise JobError(f"--picture needs events.jsonl, which {runs[0].folder} has not: add [hooks.goodput]")
        _draw(runs[0], options.picture)
    facts = [facts_of(run) for run in runs]
    if options.json:
        print_json(facts[0] if len(facts) == 1 else facts)
    else:
        print("\n\n".join(describe(each) for each in facts))
    return ExitCode.FINISHED


def _draw(run: RunAccount, path: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise JobError("--picture needs matplotlib: pip install 'forge-plugin-resilience[picture]'") from error
    from forge_plugin_resilience.goodput.picture import draw

    assert run.account is not None
    try:
        draw(run.account, path, run.folder.name)
    except OSError as error:
        raise JobError(f"--picture {path}: {error.strerror}") from error


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    from forge_plugin_resilience.goodput.schema import ACCOUNT

    return {"": one_of(ACCOUNT, array(ACCOUNT))}
