"""A sample as a page that needs no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from html import escape

from PIL import Image
from rich.cells import cell_len

from forge_kit.tools.outputs import MARK
from forge_plugin_plan.data_view.look_pictures import colour_of, panels_of, title_of
from forge_plugin_plan.data_view.look_png import colours_of
from forge_plugin_plan.data_view.row_text import Line, Piece, Wrapping
from forge_plugin_plan.data_view.sheet import Sheet
from forge_plugin_plan.data_view.visuals import Visual

WIDTH = 110
"""Columns of letters in a line."""
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #1f2328; margin: 24px; max-width: 1280px }
h1 { font-size: 18px } h2 { font-size: 14px; margin: 20px 0 4px }
.facts, figcaption, .number, .rule { color: #6e7781 } .fault { color: #b42318 }
.panels { display: flex; flex-wrap: wrap; gap: 14px; margin-top: 14px } .clip { width: 100% }
figure { margin: 0 } figcaption { font-size: 12px }
table { border-collapse: collapse; font: 13px/1.5 ui-monospace, monospace; margin-top: 8px }
td, th { padding: 0 12px 0 0; text-align: right; font-weight: normal; vertical-align: top }
td:last-child { text-align: left; white-space: pre } .rule { border-bottom: 1px solid #d0d7de; text-align: left }
.special { text-decoration: underline }
"""


def html_of(sheet: Sheet) -> bytes:
    """Returns a sample as an HTML page with its pictures inside."""
    return ("\n".join(_page(sheet)) + "\n").encode()


def _page(sheet: Sheet) -> Iterator[str]:
    yield f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(sheet.title)}</title>'
    # By the mark, a later command may replace the file
    yield f'<meta name="generator" content="{MARK}">'
    yield f"<style>{STYLE}</style>\n<h1>{escape(sheet.title)}</h1>"
    for name, value in sheet.facts:
        yield f'<div class="facts">{escape(name)}: {escape(value)}</div>'
    for fault in sheet.faults:
        yield f'<div class="fault">! {escape(fault)}</div>'
    yield '<div class="panels">'
    for visual in sheet.visuals:
        yield from _visual(visual, sheet)
    yield "</div>"
    yield "<h2>The row</h2>"
    for words, style in (("learned", "learned"), ("not learned", "ignored")):
        # The legend has the markup of tokens; position -1: it is no token of the row
        yield _piece(Piece(words, style, -1, 0, -1), sheet)  # type: ignore[arg-type]
    yield "a token is learned as the label of the position before it; the numbers are of a line's first token"
    yield from _table(sheet)
    if sheet.left_out:
        yield f'<p class="facts">… {sheet.left_out:,} more tokens; --tokens 0 shows all</p>'


def _visual(visual: Visual, sheet: Sheet) -> Iterator[str]:
    """Yields the panels of an image or a clip, and for a clip what it is before them."""
    if visual.is_clip:
        title = escape("; ".join(title_of(visual)))
        yield f'<h2 class="clip" style="color: {colour_of(visual.number)}">{title}</h2>'
    for panel in panels_of(visual, sheet.position_ids):
        title, caption = ("<br>".join(map(escape, lines)) for lines in (panel.title, panel.caption))
        yield f'<figure><figcaption style="color: {panel.colour}">{title}</figcaption>'
        yield f'<img src="{_data_url(panel.picture)}" alt=""><figcaption>{caption}</figcaption></figure>'


def _data_url(picture: Image.Image) -> str:
    data = io.BytesIO()
    picture.save(data, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _table(sheet: Sheet) -> Iterator[str]:
    names = "".join(f"<th>{escape(each.name)}</th>" for each in sheet.position_ids)
    yield f'<table>\n<tr class="number">{names}<th></th></tr>'
    # In cells of a terminal: wide characters, as of Chinese, count as two
    for line in Wrapping(WIDTH, cell_len).lines(sheet.pieces):
        if line.starts_document:
            columns = len(sheet.position_ids) + 1
            yield f'<tr><td class="rule" colspan="{columns}">document {line.pieces[0].document + 1}</td></tr>'
        yield _line(line, sheet)
    yield "</table>"


def _line(line: Line, sheet: Sheet) -> str:
    numbers = "".join(f'<td class="number">{each.at(line.position)}</td>' for each in sheet.position_ids)
    return f"<tr>{numbers}<td>{''.join(_piece(piece, sheet) for piece in line.pieces)}</td></tr>"


def _piece(piece: Piece, sheet: Sheet) -> str:
    ink, paper = colours_of(piece)
    where = [f"{each.name} {each.at(piece.position)}" for each in sheet.position_ids if piece.position >= 0]
    notes = escape(", ".join([*where, "learned" if piece.style == "learned" else "not learned"]), quote=True)
    special = ' class="special"' if piece.is_special else ""
    return f'<span{special} style="color: {ink}; background: {paper}" title="{notes}">{escape(piece.text)}</span>'
