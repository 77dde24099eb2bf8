"""One picture of the watched runs, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from forge_plugin_runs.facts import number
from forge_plugin_runs.watch.braille import curve
from forge_plugin_runs.words import age_text, count_text

if TYPE_CHECKING:
    from forge_plugin_runs.watch.run_state import WatchedRun

STYLES = {"alive": "green", "late": "yellow", "silent": "bold red", "finished": "green", "died": "red"}
LEAST, MOST = 3, 8
"""Lines of a curve."""
OTHER_LINES = 7
"""Lines of a run's panel other than its curves."""
LOGS = 3
"""Ranks whose last words are shown: those that wrote last."""


def frame(runs: Sequence[WatchedRun], curves: Sequence[str], width: int, height: int | None) -> Group:
    """Returns a panel for each run.

    Args:
        runs: the runs.
        curves: names of numbers, each drawn below the other.
        width: columns of the terminal.
        height: its lines; None where it does not matter.
    """
    # Panels share the height of the terminal, and curves their panel
    lines = MOST if height is None else (height // len(runs) - OTHER_LINES) // len(curves) - 1
    return Group(*(_panel(run, curves, width, max(LEAST, min(MOST, lines))) for run in runs))


def _panel(run: WatchedRun, curves: Sequence[str], width: int, height: int) -> Panel:
    parts: list[Text] = [_headline(run), _numbers(run)]
    for name in curves:
        # The border and the padding of the panel take two columns on each side
        parts += _curve(run, name, width - 4, height)
    parts += _last_words(run)
    if run.ending:
        parts.append(Text(run.ending, "yellow"))
    if run.problem:
        parts.append(Text(run.problem, "red"))
    title = Text(f" {run.name} ", "bold")
    border = STYLES[run.pulse.life] if run.pulse else ""
    return Panel(Group(*parts), title=title, title_align="left", border_style=border)


def _headline(run: WatchedRun) -> Text:
    pulse = run.pulse
    text = Text(f"step {run.step:,}")
    if run.total:
        text.append(f" of {run.total:,} ({run.step / run.total:.0%})")
    if pulse is not None and run.left_s is not None and pulse.step_s is not None:
        text.append(f"  about {age_text(run.left_s)} left")
    if pulse is None:
        text.append(f"  {run.state}", STYLES.get(run.state, "yellow"))
    else:
        text.append(f"  {pulse}", STYLES[pulse.life])
    return text


def _numbers(run: WatchedRun) -> Text:
    last, words = run.last, list[str]()
    for name, label, form in (("loss", "loss", ".4f"), ("grad_norm", "grad norm", ".3g"), ("lr", "lr", ".3g")):
        if (value := number(last.get(name))) is not None:
            words.append(f"{label} {value:{form}}")
    if (speed := number(last.get("tokens_per_second"))) is not None:
        words.append(f"{speed:,.0f} tokens/s")
    if tokens := last.get("tokens"):
        words.append(f"{count_text(tokens)} tokens")
    if run.evaluations:
        step, evaluation = next(reversed(run.evaluations.items()))
        named = [name for name in evaluation if name.endswith("loss")]
        name = "eval/loss" if "eval/loss" in named else next(iter(named), "")
        if name:
            words.append(f"{name} {number(evaluation[name]):.4f} at step {step:,}")
    if (slowest := last.get("slowest_rank")) is not None:
        words.append(f"slowest rank {slowest:.0f}, waits {number(last.get('wait_share')) or 0:.0%}")
    return Text("  ".join(words), "dim" if not words else "")


def _curve(run: WatchedRun, name: str, width: int, height: int) -> Iterator[Text]:
    x, y = run.series(name)
    if not x:
        yield Text(f"{name}: no line has it yet", "dim")
        return
    margin = 10
    lines, (low, high) = curve(x, y, max(10, width - margin), height)
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    for row, line in enumerate(lines):
        yield Text.assemble((f"{labels.get(row, ''):>{margin - 2}} ", "dim"), ("│", "dim"), (line, "cyan"))
    left, right = f"{x[0]:,.0f}", f"{x[-1]:,.0f}"
    inner = max(10, width - margin)
    middle = name.center(max(0, inner - len(left) - len(right)))
    yield Text(" " * margin + left + middle + right, "dim")


def _last_words(run: WatchedRun) -> Iterator[Text]:
    """Yields what ranks wrote last, of this start: warnings, and who is late or silent."""
    newest = sorted(run.logs.items(), key=lambda log: -log[1][0])
    for name, (written, text) in newest[:LOGS]:
        # Each start of a rank writes a heading into its log, which is no message
        is_heading = text.startswith("--- ")
        if text and not is_heading and (run.started is None or written >= run.started):
            words = f"{name}, {age_text(run.now - written)} ago: {text}"
            yield Text(words, "yellow", no_wrap=True, overflow="ellipsis")
