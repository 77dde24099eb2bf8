"""What `forge-run data mix` prints and writes for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_kit.tools.outputs import MARK
from forge_kit.tools.tables import columns
from forge_plugin_ladder.mix.mixture import Parts
from forge_plugin_ladder.mix.proposal import LEVEL, Proposal
from forge_plugin_ladder.mix.proxies import Proxies
from forge_plugin_ladder.mix.regression import MixFit
from forge_plugin_ladder.screen import between, number
from forge_plugin_ladder.values import Values

if TYPE_CHECKING:
    from forge_core.job import Job


def plan_table(names: Sequence[str], shares: Values, parts: Parts, job: Job) -> str:
    """Returns the mixtures of the proxies as a table, with the tokens that they take together."""
    train = job.train
    tokens = train.sample_after(train.steps) * train.seq_len
    rows = [["run", *parts.names]]
    rows += [[name, *(f"{share:.3f}" for share in own)] for name, own in zip(names, shares, strict=True)]
    return f"{columns(rows)}\n\n{len(names)} runs of {number(tokens)} tokens"


def facts_of(found: Proxies, fit: MixFit, proposal: Proposal, parts: Parts, tokens: float) -> dict[str, Any]:
    """Returns a fit and its mixture as JSON has it."""
    natural = parts.weights(parts.natural)
    return {
        "law": "metric = c + exp(a w), for shares w (Ye et al. 2024, arXiv:2403.16952)",
        "runs": len(found.usable()),
        "left_out": {each.run: each.failed for each in found.proxies if each.failed},
        "metrics": dict(zip(fit.metrics, map(float, fit.weights), strict=True)),
        "laws": {
            name: {"c": law.floor, "a": dict(zip(parts.names, map(float, law.slopes), strict=True))}
            for name, law in zip(fit.metrics, fit.laws, strict=True)
        },
        "spread": fit.spread,
        "resamples": len(fit.resamples),
        "parts": {
            name: {"natural": float(old), "share": float(new), "interval": interval}
            for name, old, new, interval in zip(
                parts.names, parts.natural, proposal.shares, proposal.intervals, strict=True
            )
        },
        "weights": dict(proposal.weights),
        "epochs": {
            name: tokens * weight / found.sizes[name]
            for name, weight in proposal.weights.items()
            if tokens and math.isfinite(found.sizes[name])
        },
        "natural_weights": natural,
        "natural": proposal.natural,
        "objective": proposal.objective,
        "gain": proposal.gain,
        "gain_interval": proposal.gain_interval,
    }


def text_of(facts: Mapping[str, Any]) -> str:
    """Returns a fit as the command prints it."""
    level = f"{100 * LEVEL:g} %"
    rows = [["", "natural", "best", f"{level} interval"]]
    rows += [
        [name, f"{part['natural']:.3f}", f"{part['share']:.3f}", between(part["interval"], ".3f")]
        for name, part in facts["parts"].items()
    ]
    metrics = ", ".join(facts["metrics"])
    lines = [
        facts["law"],
        "",
        columns(rows),
        "",
        f"{metrics}: {facts['natural']:.4f} with the natural mixture, {facts['objective']:.4f} with the best, "
        f"gain {facts['gain']:.4f} {between(facts['gain_interval'], '.4f')}",
        f"{facts['runs']} proxies; mean deviation {100 * facts['spread']:.2g} %; each predicted from the others, rank "
        f"correlation {facts['rank_correlation']:.2f}",
    ]
    lines += [f"{name}: {passes:.2f} passes" for name, passes in facts["epochs"].items()]
    lines += [f"left out: {name}, {reason}" for name, reason in facts["left_out"].items()]
    if facts["gain_interval"][0] <= 0:
        lines.append("warning: the gain may be none; `write` is refused")
    return "\n".join(lines)


def comment_of(facts: Mapping[str, Any]) -> str:
    """Returns lines for the top of a job that has these weights."""
    metrics = ", ".join(facts["metrics"])
    text = (
        f"{MARK}\nWeights of the best mixture by {facts['runs']} proxies: {metrics} is smaller by {facts['gain']:.4f} "
        f"{between(facts['gain_interval'], '.4f')} than with the natural one."
    )
    return "".join(f"# {line}\n" for line in text.splitlines()) + "\n"
