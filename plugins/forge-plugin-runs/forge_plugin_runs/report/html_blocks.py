"""Blocks of sections as HTML. Everything that is not markup of this module goes through `escape`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import singledispatch
from html import escape
from itertools import groupby

from forge_kit.tools.report_sections import Bars, Block, Cell, Chart, HeatMap, Paragraph, Preformatted, ReportRun, Table
from forge_plugin_runs.report.chart_svg import caption, chart_svg, color_classes
from forge_plugin_runs.report.heat_map_png import extremes_of, image_of
from forge_plugin_runs.report.scales import number_text

JOINT = re.compile(r"(?<=\w)([./_])(?=[A-Za-z])")
NAMED = 12
"""Rows of a map up to which each is named."""
FEW_ROWS = 6
"""Rows of a map up to which it is half as high."""
BAR_WIDTH, BAR_HEIGHT = 1000, 22


def html_of(blocks: Iterable[Block]) -> str:
    """Returns blocks as HTML; charts, and heat maps, that follow each other share a grid."""
    parts = []
    for kind, group in groupby(blocks, key=type):
        inner = "".join(map(block_html, group))
        parts.append(f'<div class="grid {kind.__name__.lower()}s">{inner}</div>' if kind in (Chart, HeatMap) else inner)
    return "".join(parts)


@singledispatch
def block_html(block: Block) -> str:
    """Returns a block as HTML."""
    raise TypeError(f"a section made a {type(block).__name__}; blocks must come from forge_kit.tools.report_sections")


@block_html.register
def _(block: Paragraph) -> str:
    return f"<p>{escape(block.text)}</p>"


@block_html.register
def _(block: Preformatted) -> str:
    return _titled(block.title, f"<pre>{escape(block.text)}</pre>", block.folded)


@block_html.register
def _(block: Table) -> str:
    head = "".join(f"<th{_aligned(block, column)}>{cell_html(cell)}</th>" for column, cell in enumerate(block.head))
    rows = "".join(f"<tr>{''.join(_cells(block, row))}</tr>" for row in block.rows)
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return _titled(block.title, table, block.folded)


@block_html.register
def _(block: Chart) -> str:
    name = f" <code>{escape(block.name)}</code>" if block.name and block.name != block.title else ""
    note = f'<p class="note">{escape(caption(block))}</p>' if caption(block) else ""
    return f"<figure><figcaption>{escape(block.title)}{name}</figcaption>{chart_svg(block)}{note}</figure>"


@block_html.register
def _(block: HeatMap) -> str:
    rows, columns = len(block.values), max((len(row) for row in block.values), default=0)
    low, high = extremes_of(block.values)
    label = escape(f"{block.title}: {rows} rows ({block.row}) of {columns} ({block.column})")
    names = list(block.rows) if rows <= NAMED else [block.rows[0], block.rows[-1]]
    axis = "".join(f"<span>{escape(name)}</span>" for name in names)
    labels = f'<div class="{"each" if rows <= NAMED else "ends"}">{axis}</div>'
    facts = f"least {number_text(low)}, largest {number_text(high)}; no colour at {number_text(block.middle)}"
    return (
        f"<figure><figcaption>{escape(block.title)}</figcaption>"
        f'<div class="map"><div class="rows"><b>{escape(block.row)}</b>{labels}</div>'
        f'<img alt="{label}" src="{image_of(block)}" width="{columns}" height="{rows}"'
        f' class="{"few" if rows <= FEW_ROWS else "many"}" data-rows="{escape(chr(10).join(block.rows))}"'
        f' data-row="{escape(block.row)}" data-column="{escape(block.column)}"'
        f' data-middle="{block.middle!r}" data-reach="{block.reach!r}"></div>'
        f'<p class="note">{escape(block.column)} 0 to {columns - 1} from left to right; {facts}</p></figure>'
    )


@block_html.register
def _(block: Bars) -> str:
    bars = "".join(_bar(block, label, sizes) for label, sizes in block.rows)
    shown = [number for number in range(len(block.parts)) if any(sizes[number] for _, sizes in block.rows)]
    parts = list(block.parts.items())
    legend = "".join(f"<li>{_chip(parts[number][1])}{escape(parts[number][0])}</li>" for number in shown)
    return _titled(block.title, f'<div class="bars">{bars}</div><ul class="legend">{legend}</ul>', False)


def _bar(block: Bars, label: Cell, sizes: Sequence[float]) -> str:
    # A row of zeros has no rectangles, and must not divide by zero
    total, left, rects = sum(sizes) or 1.0, 0.0, []
    for (name, color), size in zip(block.parts.items(), sizes, strict=True):
        width = BAR_WIDTH * size / total
        if width > 0:
            words = escape(f"{name}: {100 * size / total:.1f} %")
            rects.append(
                f'<rect x="{left:.2f}" width="{width:.2f}" height="{BAR_HEIGHT}" fill="{escape(color)}">'
                f"<title>{words}</title></rect>"
            )
        left += width
    svg = f'<svg viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" preserveAspectRatio="none">{"".join(rects)}</svg>'
    return f'<div class="bar"><span>{cell_html(label)}</span>{svg}</div>'


def _chip(color: str) -> str:
    return f'<svg class="chip" viewBox="0 0 10 10"><rect width="10" height="10" rx="2" fill="{escape(color)}"/></svg>'


def run_html(run: ReportRun) -> str:
    """Returns the name of a run with its colour."""
    return f'<span class="run {color_classes(run.number)}"><i></i>{escape(run.name)}</span>'


def cell_html(cell: Cell) -> str:
    """Returns the content of a cell."""
    if cell is None:
        return ""
    if isinstance(cell, ReportRun):
        return run_html(cell)
    return breakable(cell) if isinstance(cell, str) else number_text(float(cell))


def breakable(text: str) -> str:
    """Returns escaped text that a narrow screen may break within a path: `model.ffn.` `router`."""
    return JOINT.sub(r"\1<wbr>", escape(text))


def _cells(table: Table, row: Sequence[Cell]) -> Iterator[str]:
    for column, cell in enumerate(row):
        # The cell shows few digits, and its tooltip all of them
        exact = f' title="{cell!r}"' if isinstance(cell, int | float) else ""
        yield f"<td{_aligned(table, column)}{exact}>{cell_html(cell)}</td>"


def _aligned(table: Table, column: int) -> str:
    """Numbers to the right, under a title that stands there too."""
    cells = [row[column] for row in table.rows if column < len(row) and row[column] is not None]
    return ' class="number"' if cells and all(isinstance(cell, int | float) for cell in cells) else ""


def _titled(title: str, inner: str, folded: bool) -> str:
    if folded:
        return f"<details><summary>{escape(title or 'more')}</summary>{inner}</details>"
    return (f"<h3>{escape(title)}</h3>" if title else "") + inner
