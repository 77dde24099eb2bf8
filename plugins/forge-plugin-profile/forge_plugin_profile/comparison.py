"""Two breakdowns side by side: what became slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from forge_plugin_profile.gap import computing
from forge_plugin_profile.report import Facts, ms, percent, table

SHOWN = 12
"""Rows of a table: those that changed most."""


def compare(first: Facts, second: Facts, names: tuple[str, str]) -> str:
    """Returns Markdown: phases, layers and operators of two ranks' breakdowns, what became slower most first."""
    step = _row("step", first["step_s"], second["step_s"])
    figures = [
        step,
        _row("idle", first["step_s"] * first["idle"], second["step_s"] * second["idle"]),
        *(_row(kind, first["busy_s"][kind], second["busy_s"][kind]) for kind in first["busy_s"]),
        _row("communication not hidden", first["exposed_s"], second["exposed_s"]),
    ]
    blocks = [f"# {names[0]} and {names[1]}", _words(first, second, names), table([_heading("", names), *figures])]
    for title, key, time in SECTIONS:
        if rows := [*_rows(first[key], second[key], time)]:
            blocks += [f"## {title}", table([_heading(title.lower(), names), *rows])]
    if rows := [*_call_rows(first["operators"], second["operators"])]:
        heading = ["operators", *names, "difference", "calls per step"]
        blocks += ["## Calls", table([heading, *rows])]
    return "\n\n".join(blocks) + "\n"


def changes(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], time: Callable[[Mapping[str, Any]], float]
) -> list[tuple[str, float, float]]:
    """Returns (name, seconds before, seconds after) of all rows of either, those that grew most first."""
    before, after = ({row["name"]: time(row) for row in rows} for rows in (first, second))
    # Not a set of names, so that rows with equal changes keep their order
    rows = [(name, before.get(name, 0.0), after.get(name, 0.0)) for name in {**before, **after}]
    return sorted(rows, key=lambda row: row[1] - row[2])


def _words(first: Facts, second: Facts, names: tuple[str, str]) -> str:
    change = second["step_s"] - first["step_s"]
    word = "slower" if change > 0 else "faster"
    text = f"A step of {names[1]} is {ms(abs(change))} {word} ({percent(abs(change) / (first['step_s'] or 1.0))})."
    for what, key, time in (("phase", "phases", _host), ("layer", "layers", computing)):
        rows = changes(first[key], second[key], time)
        if rows and rows[0][2] > rows[0][1]:
            text += f" Slower most, by {what}: **{rows[0][0]}**, {ms(rows[0][1])} and {ms(rows[0][2])}."
    return text


def _rows(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], time: Callable[[Mapping[str, Any]], float]
) -> Iterator[list[str]]:
    for name, before, after in sorted(changes(first, second, time), key=lambda row: -abs(row[2] - row[1]))[:SHOWN]:
        yield _row(name, before, after)


def _call_rows(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Operators that are called more or less often in a step, the largest differences first."""
    rows = sorted(changes(first, second, _calls), key=lambda row: -abs(row[2] - row[1]))
    for name, before, after in [row for row in rows if row[1] != row[2]][:SHOWN]:
        yield [name, f"{before:g}", f"{after:g}", f"{after - before:+g}", "" if before else "new"]


def _heading(what: str, names: tuple[str, str]) -> list[str]:
    return [what, *names, "difference", ""]


def _row(name: str, before: float, after: float) -> list[str]:
    sign = "+" if after >= before else "-"
    ratio = f"{100 * (after / before - 1):+.1f} %" if before else "new"
    return [name, ms(before), ms(after), f"{sign}{ms(abs(after - before))}", ratio]


def _host(row: Mapping[str, Any]) -> float:
    return row["host_s"]


def _calls(row: Mapping[str, Any]) -> float:
    return row["calls"]


def _own(row: Mapping[str, Any]) -> float:
    return row["own_s"]


SECTIONS: Sequence[tuple[str, str, Callable[[Mapping[str, Any]], float]]] = (
    ("Phases", "phases", _host),
    ("Layers", "layers", computing),
    ("Operators", "operators", _own),
)
