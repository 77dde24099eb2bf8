"""What `forge-run ladder` prints and writes for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import asdict

from forge_kit.tools.outputs import MARK
from forge_kit.tools.tables import columns
from forge_plugin_ladder.accuracy import NAMES, SOURCE
from forge_plugin_ladder.intervals import LEVEL, Resampled
from forge_plugin_ladder.parabolas import IsoFlops
from forge_plugin_ladder.planned import STEPS, Planned
from forge_plugin_ladder.points import Point
from forge_plugin_ladder.prediction import HeldOut, Prediction
from forge_plugin_ladder.tuning import OptimumLaw, Tuned


def plan_table(runs: Sequence[Planned], is_branching: bool) -> str:
    """Returns the runs as a table, with what rules warn of."""
    keys = list(
        dict.fromkeys(key for run in runs for key in run.settings if not key.startswith("model.") and key != STEPS)
    )
    head = ["run", "parameters", "with embedding", "tokens", "steps", "FLOPs", *keys]
    rows = [
        [
            run.name,
            number(run.parameters),
            number(run.parameters_total),
            number(run.tokens),
            f"{run.steps:,}",
            f"{run.flops:.3g}",
            *(_short(run.settings.get(key, "")) for key in keys),
        ]
        for run in runs
    ]
    # A column that no run has a value in would only widen the table
    if is_branching:
        head.append("branches from")
        for row, run in zip(rows, runs, strict=True):
            row.append(f"{run.trunk} at {run.branch_step:,}" if run.trunk else "")
    for name, title, form in (("memory", "memory", _bytes), ("hours", "time at least", _duration)):
        values = [getattr(run, name) for run in runs]
        if any(value is not None for value in values):
            head.append(title)
            for row, value in zip(rows, values, strict=True):
                row.append("" if value is None else form(value))
    warnings = dict.fromkeys(text for run in runs for text in run.warnings)
    lines = [columns([head, *rows]), "", *_totals(runs, is_branching)]
    lines += [f"{run.name}: {run.remark}" for run in runs if run.remark]
    return "\n".join([*lines, *(f"warning: {text}" for text in warnings)])


def _bytes(size: float) -> str:
    return f"{size / 1e9:,.3g} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB"


def _duration(hours: float) -> str:
    for factor, unit in ((1, "h"), (60, "min")):
        if hours * factor >= 1:
            return f"{hours * factor:,.3g} {unit}"
    return f"{hours * 3600:,.3g} s"


def _totals(runs: Sequence[Planned], is_branching: bool) -> Iterator[str]:
    tokens, flops = (sum(getattr(run, name) for run in runs) for name in ("tokens", "flops"))
    yield f"{len(runs)} runs, {number(tokens)} tokens, {flops:.3g} FLOPs"
    own = sum(run.flops * run.trained for run in runs)
    if is_branching:
        yield f"{own:.3g} FLOPs with trunks that are trained once"
    elif own < flops:
        yield f"runs of one size begin alike: with `trunk = true` they take {own:.3g} FLOPs, with the same results"
    if all(run.hours is not None for run in runs):
        yield f"{_duration(sum(run.hours or 0 for run in runs))} at least, one run after another"


def _short(value: str) -> str:
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return value


def fit_facts(
    resampled: Resampled,
    points: Sequence[Point],
    curves: IsoFlops,
    tried: HeldOut | None,
    count: str,
    tuned: Mapping[str, Tuned],
) -> dict[str, Any]:
    """Returns a fit as JSON has it."""
    law, values, fit = resampled.fit.law, resampled.fit.values(), resampled.fit
    samples = {name: resampled.coefficients[:, i] for i, name in enumerate(law.coefficients)}
    samples |= {name: resampled.exponents[:, i] for i, name in enumerate(law.exponents)}
    facts: dict[str, Any] = {
        "law": (type(law).__doc__ or type(law).__name__).splitlines()[0],
        "source": law.source,
        "count": count,
        "points": sum(point.usable for point in points),
        "losses": "held-out" if all(point.held_out for point in points if point.usable) else "training",
        "left_out": {point.run: point.failed or "no loss" for point in points if not point.usable},
        "values": values,
        "intervals": {name: resampled.interval(values[name], each) for name, each in samples.items()},
        "resamples": len(resampled.exponents),
        "spread": float(abs(resampled.residuals).mean()),
        "threshold": fit.threshold,
        "held_out": asdict(tried) if tried else None,
        "accuracy": None
        if (curve := resampled.curve) is None
        else {"values": dict(zip(NAMES, map(float, curve.values), strict=True)), "spread": curve.spread},
        "iso_flops": {"exponent": curves.exponent, "warnings": list(curves.warnings), "curves": len(curves.parabolas)},
        "tuned": {
            key: {"law": None if each.law is None else _law_facts(each.law), "warnings": list(each.warnings)}
            for key, each in tuned.items()
        },
    }
    if {"alpha", "beta"} <= set(law.exponents):
        # Of N against C = k N D, where the law is the additive one
        alpha, beta = samples["alpha"], samples["beta"]
        exponent = values["beta"] / (values["alpha"] + values["beta"])
        facts["best_size_exponent"] = exponent
        facts["best_size_interval"] = resampled.interval(exponent, beta / (alpha + beta))
    return facts


def _law_facts(law: OptimumLaw) -> dict[str, Any]:
    return {
        "optima": [asdict(each) for each in law.optima],
        "spread": law.spread,
        # The keys of the rule `power`
        "rule": {
            "at_reference": law.at_reference,
            "parameters": law.parameters,
            "tokens": law.tokens,
            "by_parameters": law.by_parameters,
            "by_tokens": law.by_tokens,
        },
        "intervals": {name: law.exponent_interval(name, LEVEL) for name in ("by_parameters", "by_tokens")},
    }


def fit_text(facts: Mapping[str, Any]) -> str:
    """Returns a fit as a command prints it."""
    # More digits would promise more than an interval holds
    rows = [["", "value", "90 % interval"]]
    rows += [[name, f"{value:.5g}", between(facts["intervals"][name])] for name, value in facts["values"].items()]
    if "best_size_exponent" in facts:
        rows.append(["N ~ C^", f"{facts['best_size_exponent']:.4f}", between(facts["best_size_interval"])])
    lines = [f"{facts['law']}  ({facts['source']})", "", columns(rows), ""]
    lines.append(
        f"{facts['points']} points, {facts['losses']} losses, N = {facts['count']}; "
        f"mean deviation {100 * facts['spread']:.2g} %"
    )
    lines += [f"left out: {name}, {reason}" for name, reason in facts["left_out"].items()]
    if tried := facts["held_out"]:
        lines.append(
            f"largest budget ({tried['flops']:.3g} FLOPs) predicted from the others: {tried['inside']} of "
            f"{tried['points']} losses within their interval, largest error {100 * tried['largest_error']:.2g} %"
        )
    else:
        lines.append("largest budget: too few other points to predict it from")
    if second := facts["accuracy"]:
        values = ", ".join(f"{name} {value:.4g}" for name, value in second["values"].items())
        lines.append(f"accuracy = low + (high - low) / (1 + exp(k (L - middle))): {values}  ({SOURCE})")
        lines.append(f"mean deviation of accuracies {100 * second['spread']:.2g} points")
    curves = facts["iso_flops"]
    if math.isfinite(curves["exponent"]):
        lines.append(f"by {curves['curves']} IsoFLOP parabolas N ~ C^{curves['exponent']:.4f}")
    for key, each in facts["tuned"].items():
        lines += _tuned_lines(key, each["law"]) if each["law"] else []
    texts = [*curves["warnings"], *(text for each in facts["tuned"].values() for text in each["warnings"])]
    return "\n".join([*lines, *(f"warning: {text}" for text in texts)])


def _tuned_lines(key: str, law: Mapping[str, Any]) -> Iterator[str]:
    """The law of a key as a rule that can be put into a ladder's file."""
    yield ""
    intervals = ", ".join(f"{name} {between(law['intervals'][name])}" for name in law["intervals"])
    spread = f"mean deviation {100 * law['spread']:.2g} %"
    yield f"best {key} of {len(law['optima'])} sizes and budgets, {spread}; {intervals}"
    yield f'[rules."{key}"]'
    yield 'type = "power"'
    yield from (f"{name} = {value:.6g}" for name, value in law["rule"].items())


def prediction_table(found: Sequence[Prediction], level: float) -> str:
    """Returns predictions as a table."""
    head = [
        "FLOPs",
        "parameters",
        "",
        "tokens",
        "",
        "loss",
        f"{100 * level:g} % of the law",
        f"{100 * level:g} % of a run",
    ]
    if any(each.accuracy is not None for each in found):
        head += ["accuracy", ""]
    for key in found[0].tuned:
        head += [key, ""]
    return columns([head, *map(_cells, found)])


def _cells(each: Prediction) -> list[str]:
    return [
        f"{each.flops:.3g}",
        number(each.parameters),
        f"[{', '.join(map(number, each.parameters_interval))}]",
        number(each.tokens),
        f"[{', '.join(map(number, each.tokens_interval))}]",
        f"{each.loss:.4f}",
        between(each.loss_interval, ".4f"),
        between(each.run_interval, ".4f"),
        *([] if each.accuracy is None else [f"{each.accuracy:.3f}", between(each.accuracy_interval or (), ".3f")]),
        *(text for value, interval in each.tuned.values() for text in (f"{value:.4g}", between(interval))),
    ]


def report_text(
    facts: Mapping[str, Any], points: Sequence[Point], frontier: Sequence[Prediction], level: float, picture: str
) -> str:
    """Returns the report as Markdown: each number with its run."""
    head = ["run", "parameters", "tokens", "FLOPs", "loss", "remark"]
    rows = [
        [
            point.run,
            number(point.parameters),
            number(point.tokens),
            f"{point.flops:.4g}",
            f"{point.loss:.6g}" if point.usable else "",
            point.failed,
        ]
        for point in points
    ]
    parts = ["# Ladder", f"![IsoFLOP curves, residuals, frontier]({picture})", "```\n" + fit_text(facts) + "\n```"]
    parts += [
        "## Frontier",
        "```\n" + prediction_table(frontier, level) + "\n```",
        "## Points",
        _markdown([head, *rows]),
    ]
    return "\n\n".join([*parts, f"<!-- {MARK} -->\n"])


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])


def number(value: float) -> str:
    """`1,234` up to five digits, else `12.3M`, `4.56B`, `7.89T`."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.3g}{letter}"
    return f"{value:,.0f}"


def between(interval: Sequence[float], form: str = ".4g") -> str:
    """`[low, high]`."""
    return f"[{', '.join(format(each, form) for each in interval)}]"
