"""`forge-run check`: is this job right?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.config.keys import walk_components
from forge_core.config.load import load_job
from forge_core.contracts.errors import ExitCode, JobError, Problem
from forge_core.plugins.catalog import Catalog
from forge_kit.data.budgets import Budgets, check_budgets, measured_sources, report
from forge_kit.data.damage import Damage, decode_sources, default_workers
from forge_kit.tools.commands import count
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import ANYTHING, COUNT, FLAG, TEXT, Schema, array, by_name, keyed, maybe, with_keys
from forge_kit.tools.tables import columns

if TYPE_CHECKING:
    from forge_core.job import Job

EXAMPLES = (
    "forge-run check job.toml",
    "forge-run check job.toml --data",
    "forge-run check job.toml --data --decode --workers 8",
    "forge-run check job.toml --world-size 8 --parallel.tp.degree=2",
)


HEADING = "start"


def command(argv: list[str]) -> int:
    """Check a job, and print what it consists of; nothing is trained.

    Only `--data` writes anything: what it measures, into caches.
    """
    parser = argparse.ArgumentParser("forge-run check", description=command.__doc__)
    parser.add_argument("--world-size", type=positive, default=1, metavar="N", help="ranks of the run (1)")
    add_json(parser, ", problems too")
    data = "measure the documents, in the cache or by the headers of images, and say how many exceed a sequence's room"
    parser.add_argument("--data", action="store_true", help=data)
    decode = "decode every image and clip of the sources, all frames, and name what cannot be read; implies --data"
    parser.add_argument("--decode", action="store_true", help=decode)
    workers = "processes that decode (the cores that it may use); 0: none, all is decoded in this one"
    parser.add_argument("--workers", type=count, metavar="N", help=workers)
    with_examples(parser, *EXAMPLES)
    options, files, overrides = parse_job_arguments(parser, argv)
    catalog, measured, decoded = Catalog.installed(), dict[str, Budgets | None](), Decoded()
    try:
        job = load_job(*files, overrides=overrides, catalog=catalog, world_size=options.world_size)
        if options.decode:
            decoded.run(job, catalog, options.workers, is_shown=not options.json)
        if options.data or options.decode:
            measured |= measured_sources(job, catalog)
            if not options.json:
                print("\n".join(line for name, budgets in measured.items() for line in report(name, budgets)) + "\n")
            check_budgets([*measured.values()])
    except JobError as error:
        # With --json, problems are part of the output
        if not options.json:
            raise
        facts = {
            "ok": False,
            "files": files,
            "problems": [*map(_facts, error.problems)],
            **_data(measured),
            **decoded.facts(),
        }
        print_json(facts)
        return error.exit_code
    if options.json:
        facts = {"ok": True, "files": files, "problems": [], **_parts(job, catalog), **_data(measured)}
        print_json(facts | decoded.facts())
        return ExitCode.FINISHED
    parts = _parts(job, catalog)
    print(f"ok: {' + '.join(files)}\n\n{columns([*parts['components'].items()])}")
    used = ", ".join(f"{name} {version}" for name, version in parts["distributions"].items())
    print(f"\nlayout: {parts['layout']}\nfrom: {used or 'no distribution'}")
    return ExitCode.FINISHED


@define
class Decoded:
    """What `--decode` has decoded and found."""

    _damage: dict[str, Damage | None] = field(factory=dict)
    """Of each source; None: a stream."""
    _messages: dict[str, list[str]] = field(factory=dict)

    def run(self, job: Job, catalog: Catalog, workers: int | None, *, is_shown: bool) -> None:
        """Decode the sources of a job; raises `JobError` for those that training would refuse."""

        def name_damage(source: str, message: str) -> None:
            if is_shown:
                print(message, flush=True)
            else:
                self._messages.setdefault(source, []).append(message)

        def progress(line: str) -> None:
            # To stderr, as stdout may be a single JSON document
            print(line, file=sys.stderr, flush=True)

        processes = default_workers() if workers is None else workers
        for name, damage in decode_sources(job, catalog, processes, name_damage=name_damage, progress=progress):
            self._damage[name] = damage
            if is_shown:
                outcome = "a stream: nothing is decoded before training"
                if damage is not None:
                    outcome = f"{damage.documents:,} documents decoded, {damage.damaged:,} cannot be read"
                print(f"source {name}: {outcome}\n")

    def facts(self) -> dict[str, Any]:
        """Entry `decoded`, where it was asked for: None for streams."""
        entries = {
            name: damage and {**asdict(damage), "messages": self._messages.get(name, [])}
            for name, damage in self._damage.items()
        }
        return {"decoded": entries} if entries else {}


def _parts(job: Job, catalog: Catalog) -> dict[str, Any]:
    """What a job is made of."""
    assert job.checked is not None, "load_job checks every job"
    types = {path: catalog.type_of(type(component)) for path, component in walk_components(job)}
    # The type of a component in the user's own code has a colon, and is of no distribution
    owners = sorted({type_.partition("/")[0] for type_ in types.values() if ":" not in type_})
    used = [distribution for distribution in map(catalog.distribution, owners) if distribution is not None]
    versions = {distribution.name: distribution.version for distribution in used}
    return {"layout": str(job.checked.layout), "components": types, "distributions": versions}


def _data(measured: Mapping[str, Budgets | None]) -> dict[str, Any]:
    """Entry `data`, where it was requested: the budgets of each source, None for sources that cannot be measured."""
    return {"data": {name: budgets and asdict(budgets) for name, budgets in measured.items()}} if measured else {}


def _facts(problem: Problem) -> dict[str, Any]:
    """A problem for editors and scripts; `line` is None for a flag, or without a single place."""
    place, _, line = problem.origin.rpartition(":")
    file, number = (place, int(line)) if line.isdecimal() else (problem.origin, None)
    facts = {"file": file, "line": number, "key": problem.path, "message": problem.message}
    return facts | {"id": problem.id, "suggestion": problem.suggestion}


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    problem = keyed(file=TEXT, line=maybe(COUNT), key=TEXT, message=TEXT, id=TEXT, suggestion=maybe(TEXT))
    # Unknown keys are left out: the first three of a job with problems, the others without their options
    known = {"layout": TEXT, "components": by_name(TEXT), "distributions": by_name(TEXT)}
    checked = with_keys(
        keyed(ok=FLAG, files=array(TEXT), problems=array(problem)),
        **known,
        data=by_name(ANYTHING),
        decoded=by_name(ANYTHING),
    )
    is_right = {"if": {"properties": {"ok": {"const": True}}}, "then": {"required": [*known]}}
    return {"": checked | is_right}
