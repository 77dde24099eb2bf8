"""What the commands print for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from forge_kit.tools.tables import columns
from forge_plugin_datatrove.accounting import RANGES
from forge_plugin_datatrove.table import DOCUMENTS, INPUTS, STAGES, SUMMARY, Table


def text_of(summary: Mapping[str, Any], table: Table) -> str:
    """Returns the summary of a finished command."""
    return "\n\n".join(_statistics(summary, table) if "statistics" in summary else _counts(summary, table))


def _counts(summary: Mapping[str, Any], table: Table) -> Iterator[str]:
    rows = [["step", "documents", "removed", "changed", "reasons"]]
    # One more row where something could not be read
    if summary["unreadable"]:
        unreadable = sum(summary["unreadable"].values())
        whole = f"{summary['documents'] + unreadable:,}"
        rows.append(["read", whole, f"{unreadable:,}", "0", _reasons(summary["unreadable"])])
    for step in summary["steps"]:
        figures = [f"{step[name]:,}" for name in ("documents", "removed", "changed")]
        rows.append([step["step"], *figures, _reasons(step["reasons"])])
    yield columns(rows)
    kept, documents = summary["kept"], summary["documents"]
    share = f" ({100 * kept / documents:.1f} %)" if documents else ""
    characters = f"{summary['kept_characters']:,} of {summary['characters']:,} characters"
    folder = table.folder(summary["stage"])
    yield f"kept {kept:,} of {documents:,} documents{share}, {characters}, in {folder / DOCUMENTS}"
    if "tasks" in summary:
        head = ["task", "items", "too short", "n-grams", "documents", "n-grams found"]
        tasks = [[task, *(f"{count:,}" for count in figures.values())] for task, figures in summary["tasks"].items()]
        yield columns([head, *tasks])
    if "found" in summary:
        chances = ", ".join(f"{similarity}: {100 * chance:.1f} %" for similarity, chance in summary["found"].items())
        yield f"pairs that are found, by similarity: {chances}"
    if needs := {phase: size for phase, size in summary.get("memory", {}).items() if size}:
        yield "estimated memory: " + ", ".join(f"{phase} {size / 1e6:.3g} MB" for phase, size in needs.items())
    yield f"next: {_next(table, summary['stage'])}"


def _next(table: Table, stage: str) -> str:
    later = table.stages()[table.stages().index(stage) + 1 :]  # type: ignore[arg-type]
    if later:
        return f"forge-run data {later[0]} {table.path}"
    return f"forge-run data prepare {table.folder(stage) / DOCUMENTS} --out DIR --tokenizer TYPE"


def _reasons(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())


def _statistics(summary: Mapping[str, Any], table: Table) -> Iterator[str]:
    """Yields means of all sources that were counted, next to each other."""
    del summary  # its own file is among them
    # Sources that were not counted have no column
    found = {}
    for source in (INPUTS, *STAGES):
        path = table.folder("stats") / source / SUMMARY
        if path.is_file():
            found[source] = json.loads(path.read_text())
    names = list(dict.fromkeys(name for each in found.values() for name in each["statistics"]))
    rows = [["mean", *found], ["documents", *(f"{each['documents']:,}" for each in found.values())]]
    for name in names:
        cells = [each["statistics"].get(name) for each in found.values()]
        rows.append([name, *("" if cell is None else f"{cell['mean']:.4g}" for cell in cells)])
    yield columns(rows)


def text_of_fate(fate: Mapping[str, Any]) -> str:
    """Returns what became of a document."""
    lines = [_change(record) for record in fate.get("changed", ())]
    lines += [_removal(record) for record in fate.get("removed", ())]
    if kept := fate.get("kept"):
        lines.append(f"kept: {kept['file']}:{kept['line']}, read from {_origin(kept['origin'])}")
    return "\n".join(lines)


def _change(record: Mapping[str, Any]) -> str:
    ranges = ", ".join(f"{begin} to {end}" for begin, end in record[RANGES])
    return f"changed by {record['stage']}, {record['step']}: without characters {ranges}"


def _removal(record: Mapping[str, Any]) -> str:
    known = {"id", "stage", "step", "reason", "origin"}
    more = "".join(f"; {key} {value}" for key, value in record.items() if key not in known)
    by = f"removed by {record['stage']}, {record['step']}: {record['reason']}{more}"
    return f"{by}; read from {_origin(record['origin'])}"


def _origin(origin: Any) -> str:
    # A key of the user's own is left as it is
    if isinstance(origin, str):
        return origin
    if not isinstance(origin, dict) or "file" not in origin:
        return json.dumps(origin, ensure_ascii=False)
    places = [f"{key} {value}" for key, value in origin.items() if key != "file"]
    return " ".join([str(origin["file"]), *places])
