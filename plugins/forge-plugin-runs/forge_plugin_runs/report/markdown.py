"""The report as Markdown (GitHub's): for a repository, an issue, or a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import singledispatch
from itertools import groupby

from forge_kit.tools.outputs import MARK
from forge_kit.tools.report_sections import (
    Bars,
    Block,
    Cell,
    Chart,
    HeatMap,
    Line,
    Paragraph,
    Preformatted,
    ReportRun,
    Table,
)
from forge_plugin_runs.report.collect import Section
from forge_plugin_runs.report.heat_map_png import extremes_of
from forge_plugin_runs.report.scales import number_text, spark

MARKUP = re.compile(r"([\\`*_\[\]<>|#~])")
"""Characters that mean something in Markdown within a line."""


def page_markdown(title: str, made: str, sections: Sequence[Section]) -> str:
    """Returns the report; the arguments are the same as for `page_html`, which also has a legend of the runs."""
    parts = [f"# {escaped(title)}"]
    for section in sections:
        parts.append(f"## {escaped(section.title)}")
        for kind, group in groupby(section.blocks, key=type):
            blocks = list(group)
            # Charts that follow each other share one table
            parts += _charts(blocks) if kind is Chart else map(block_markdown, blocks)
    return "\n\n".join([*parts, f"*{escaped(made)}*", f"<!-- {MARK} -->"]) + "\n"


def escaped(text: str) -> str:
    """Returns text that stays what it is in a line of Markdown."""
    # On one line, as a line break would end a heading or a row of a table
    return MARKUP.sub(r"\\\1", " ".join(text.split()))


@singledispatch
def block_markdown(block: Block) -> str:
    """Returns a block as Markdown."""
    raise TypeError(f"a section made a {type(block).__name__}; blocks must come from forge_kit.tools.report_sections")


@block_markdown.register
def _(block: Paragraph) -> str:
    return escaped(block.text)


@block_markdown.register
def _(block: Preformatted) -> str:
    longest = max((len(ticks) for ticks in re.findall("`+", block.text)), default=0)
    # Longer than any backticks in the text, which would end the block
    fence = "`" * max(3, longest + 1)
    return _titled(block.title, f"{fence}text\n{block.text}\n{fence}")


@block_markdown.register
def _(block: Table) -> str:
    return _titled(block.title, table_markdown(block.head, block.rows))


@block_markdown.register
def _(block: HeatMap) -> str:
    low, high = extremes_of(block.values)
    across = max((len(row) for row in block.values), default=0)
    rows = [
        # Values that are no numbers too: a column is at the same place in all rows
        [name, spark(row, across)]
        for name, row in zip(block.rows, block.values, strict=True)
    ]
    facts = f"Least {number_text(low)}, largest {number_text(high)}."
    return _titled(block.title, table_markdown([block.row, block.column], rows) + f"\n\n{facts}")


@block_markdown.register
def _(block: Bars) -> str:
    rows = []
    for label, sizes in block.rows:
        # A row of zeros has no shares, and must not divide by zero
        total = sum(sizes) or 1.0
        rows.append([label, *(f"{100 * size / total:.1f} %" if size else None for size in sizes)])
    return _titled(block.title, table_markdown(["", *block.parts], rows))


def table_markdown(head: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """Returns a table."""
    lines = ["| " + " | ".join(map(_cell, head)) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows)])


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    text = cell.name if isinstance(cell, ReportRun) else cell if isinstance(cell, str) else number_text(float(cell))
    return escaped(text)


def _charts(charts: Sequence[Block]) -> Iterator[str]:
    rows: list[list[Cell]] = []
    for chart in charts:
        assert isinstance(chart, Chart)
        rows += [[chart.title, line.run, *_figures(line)] for line in chart.lines]
    yield table_markdown(["curve", "run", "first", "least", "largest", "last", ""], rows)


def _figures(line: Line) -> list[Cell]:
    values = [float(value) for value in line.y]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return [None, None, None, "not finite", None]
    return [values[0], min(finite), max(finite), values[-1], spark(values)]


def _titled(title: str, inner: str) -> str:
    return f"### {escaped(title)}\n\n{inner}" if title else inner
