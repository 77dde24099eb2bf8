"""`forge-run data filter`, `data dedup`, `data decontaminate` and `data stats`: one table, one folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import (
    ANYTHING,
    COUNT,
    NUMBER,
    TEXT,
    Schema,
    array,
    by_name,
    keyed,
    one_of,
    with_keys,
)

if TYPE_CHECKING:
    from forge_plugin_datatrove.execution import Work
    from forge_plugin_datatrove.table import Table

HEADING = "start"


def filter_documents(argv: list[str]) -> int:
    """Remove documents by datatrove's filters, with a record of each.

    The steps are the tables [[filter]]. OUTPUT/filter/documents has the kept documents, which the next command
    reads, and data prepare; OUTPUT/filter/removed has the id, origin and reason of each removed one. A command that was
    killed continues when it is given again.
    """
    parser = _parser("filter", filter_documents)
    parser.add_argument("--why", metavar="TEXT", help="print what became of the document with this id, in all stages")
    with_examples(parser, "forge-run data filter clean.toml", "forge-run data filter clean.toml --why web/a.jsonl:1024")
    options = parser.parse_args(argv)
    table = _table(options)
    # Nothing is run for it, also where a stage is not finished
    if options.why is not None:
        return _print_fate(table, options)
    from forge_plugin_datatrove.filtering import counts, filter_work

    return _run(filter_work, table, options, counts)


def deduplicate(argv: list[str]) -> int:
    """Remove duplicate documents, sentences or passages.

    The method is the table [dedup]: minhash, exact, sentences, bloom or substrings. It reads what data filter has kept,
    if the file has filters, or else the inputs.
    The memory of phases that merge signatures, make clusters or sort passages is estimated before each starts, and
    compared with the machine's.
    """
    parser = _parser("dedup", deduplicate)
    with_examples(parser, "forge-run data dedup clean.toml", "forge-run data dedup clean.toml --json")
    options = parser.parse_args(argv)
    table = _table(options)
    from forge_plugin_datatrove.dedup import dedup_counts, dedup_work

    return _run(dedup_work, table, options, dedup_counts)


def decontaminate(argv: list[str]) -> int:
    """Remove documents with texts of the tasks that a job evaluates.

    The table [decontaminate] names the job, or tasks. A document is removed if it has an n-gram of an item: of its
    answer, or of question and answer. OUTPUT/decontaminate/overlap.json has the counts of each task, which the report
    of a run that trains on the documents shows.
    """
    parser = _parser("decontaminate", decontaminate)
    with_examples(parser, "forge-run data decontaminate clean.toml")
    options = parser.parse_args(argv)
    table = _table(options)
    from forge_plugin_datatrove.decontamination import decontaminate_work, decontamination_counts

    return _run(decontaminate_work, table, options, decontamination_counts)


def count_statistics(argv: list[str]) -> int:
    """Count lengths, lines and words of documents by datatrove.

    The statistics are the tables [[stats]]. Run it before and after other commands: columns of all sources that were
    counted stand next to each other.
    """
    parser = _parser("stats", count_statistics)
    sources = ("inputs", "filter", "dedup", "decontaminate")
    parser.add_argument("--of", choices=sources, default="inputs", help="which documents to count (inputs)")
    with_examples(parser, "forge-run data stats clean.toml", "forge-run data stats clean.toml --of filter")
    options = parser.parse_args(argv)
    table = _table(options)
    from forge_plugin_datatrove.filtering import merged_statistics, stats_work

    return _run(partial(stats_work, source=options.of), table, options, merged_statistics)


def _parser(name: str, function: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"forge-run data {name}", description=function.__doc__, allow_abbrev=False)
    parser.add_argument("table", type=Path, metavar="TABLE.toml", help="inputs, output, and the steps of each command")
    parser.add_argument("--again", action="store_true", help="with [slurm]: queue tasks again that are not complete")
    add_json(parser)
    return parser


def _table(options: argparse.Namespace) -> Table:
    # Imported after the options are parsed, so that help appears at once
    from forge_plugin_datatrove.table import Table

    table = Table.read(options.table)
    if options.again and not table.cleaning.slurm:
        raise JobError("--again: this table has no [slurm]; the same command continues without it")
    return table


def _run(
    make: Callable[[Table], Work],
    table: Table,
    options: argparse.Namespace,
    summary_of: Callable[[Work], Mapping[str, Any]],
) -> int:
    """Do the work, unless it is finished, and print its summary."""
    from forge_plugin_datatrove.execution import WORK, complete, finished, incomplete_tasks, run_locally, silence
    from forge_plugin_datatrove.screen import text_of

    # Steps of datatrove log when they are made
    with silence():
        work = make(table)
    summary: Mapping[str, Any] | None = finished(work)
    if summary is None:
        # Tasks on SLURM have ended when the command is given a second time
        if table.cleaning.slurm and incomplete_tasks(work):
            return _queue(work, table, options)
        # To standard error, as --json has nothing else on standard output
        files = f"{len(work.inputs):,} file{'s' * (len(work.inputs) != 1)}"
        print(f"{work.name}: {files}; logs in {work.folder / WORK}", file=sys.stderr, flush=True)
        run_locally(work, table)
        complete(work, summary_of(work))
        summary = finished(work) or {}
    if options.json:
        print_json(summary)
    else:
        print(text_of(summary, table))
    return ExitCode.FINISHED


def _queue(work: Work, table: Table, options: argparse.Namespace) -> int:
    from forge_plugin_datatrove.execution import silence
    from forge_plugin_datatrove.slurm import queue

    with silence():
        queued = queue(work, table, options.again)
    if options.json:
        print_json(queued)
        return ExitCode.FINISHED
    tasks = ", ".join(f"{phase} {count}" for phase, count in queued["queued"].items())
    print(f"queued as job {queued['job']}, tasks by phase: {tasks}")
    print(f"when they have ended, the same command completes {work.folder}")
    return ExitCode.FINISHED


def _print_fate(table: Table, options: argparse.Namespace) -> int:
    from forge_plugin_datatrove.removed import fate_of
    from forge_plugin_datatrove.screen import text_of_fate

    fate = fate_of(table, options.why)
    if options.json:
        print_json(fate)
    else:
        print(text_of_fate(fate))
    return ExitCode.FINISHED


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    begun = {"format": COUNT, "arguments": by_name(ANYTHING), "inputs": TEXT}
    reasons = by_name(COUNT)
    steps = keyed(step=TEXT, documents=COUNT, removed=COUNT, changed=COUNT, characters_removed=COUNT, reasons=reasons)
    filtered = keyed(
        **begun,
        stage=TEXT,
        documents=COUNT,
        characters=COUNT,
        unreadable=reasons,
        steps=array(steps),
        kept=COUNT,
        kept_characters=COUNT,
    )
    task = keyed(items=COUNT, short_items=COUNT, n_grams=COUNT, documents=COUNT, n_grams_found=COUNT)
    figures = dict.fromkeys(("total", "mean", "std", "min", "max"), NUMBER)
    counted = keyed(**begun, source=TEXT, documents=COUNT, unreadable=reasons, statistics=by_name(keyed(**figures)))
    # On SLURM, until all tasks are complete
    queued = keyed(queued=by_name(COUNT), job=TEXT)
    deduplicated = with_keys(keyed(**filtered["properties"], memory=by_name(COUNT)), found=by_name(NUMBER))
    decontaminated = keyed(**filtered["properties"], tasks=by_name(task))
    return {
        "filter": one_of(filtered, queued, *_fates()),
        "dedup": one_of(deduplicated, queued),
        "decontaminate": one_of(decontaminated, queued),
        "stats": one_of(counted, queued),
    }


def _fates() -> Iterator[Schema]:
    """What `--why` prints of a document that was removed, and of one that was kept; both may have been changed."""
    record = with_keys(
        keyed(id=TEXT, stage=TEXT, step=TEXT, origin=ANYTHING),
        reason=TEXT,
        characters=COUNT,
        detail=TEXT,
        minhash_cluster_id={"type": "integer"},
        contaminated_task=TEXT,
        contaminated_ngram=TEXT,
        removed_ranges=array(array(COUNT)),
    )
    yield with_keys(keyed(id=TEXT, removed=array(record)), changed=array(record))
    yield with_keys(keyed(id=TEXT, kept=keyed(file=TEXT, line=COUNT, origin=ANYTHING)), changed=array(record))
