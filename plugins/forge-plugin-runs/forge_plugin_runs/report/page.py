"""The HTML page: one file that loads nothing, and in which nothing runs but its own script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from forge_kit.tools.outputs import MARK
from forge_kit.tools.report_sections import ReportRun
from forge_plugin_runs.report.chart_svg import color_classes
from forge_plugin_runs.report.collect import Section
from forge_plugin_runs.report.html_blocks import html_of, run_html

ASSETS = Path(__file__).parent
KNOTS = 160
"""Largest number of points of a run at which the script receives tokens and time; it interpolates between them."""


def page_html(title: str, made: str, runs: Sequence[ReportRun], sections: Sequence[Section]) -> str:
    """Returns the page.

    Args:
        title: title of the page.
        made: a sentence on when and by what it was made.
        runs: the runs, in the order of their colours.
        sections: sections with their blocks.
    """
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    script = (ASSETS / "page.js").read_text(encoding="utf-8")
    # By their digests and not `unsafe-inline`: what a run's name or samples might smuggle in would not run
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    legend = "".join(f"<li>{run_html(run)}</li>" for run in runs)
    links = "".join(f'<li><a href="#{escape(each.name)}">{escape(each.title)}</a></li>' for each in sections)
    axes = escape(json.dumps([_axes_of(run) for run in runs], separators=(",", ":")))
    body = "".join(
        f'<section id="{escape(each.name)}"><h2>{escape(each.title)}</h2>{html_of(each.blocks)}</section>'
        for each in sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        f'<meta name="generator" content="{MARK}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f'<body data-axes="{axes}"><header><h1>{escape(title)}</h1></header>'
        f'<div class="bar-top"><ul class="runs">{legend}</ul><nav><ul>{links}</ul></nav></div>'
        f"<main>{body}</main><footer>{escape(made)}</footer>"
        f"<script>{script}</script></body></html>\n"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _axes_of(run: ReportRun) -> dict[str, Any]:
    """Tokens and seconds in steps by step, at some points; empty where the lines do not have them."""
    look = color_classes(run.number)
    (timed, times), (counted, counts) = run.metrics.column("step_seconds"), run.metrics.column("tokens")
    steps, of_times, of_counts = np.intersect1d(timed, counted, assume_unique=True, return_indices=True)
    if not len(steps):
        return {"name": run.name, "look": look, "step": [], "tokens": [], "seconds": []}
    # With step 0, before which nothing was read and no time had passed
    steps, tokens = np.append(0, steps), np.append(0, counts[of_counts])
    seconds = np.cumsum(np.append(0.0, times[of_times]))
    # Both ends included; rounding may give the same index twice
    kept = np.unique(np.linspace(0, len(steps) - 1, min(KNOTS, len(steps))).astype(int))
    return {
        "name": run.name,
        "look": look,
        "step": steps[kept].astype(int).tolist(),
        "tokens": tokens[kept].astype(int).tolist(),
        "seconds": [round(float(value), 3) for value in seconds[kept]],
    }
