"""Breakdowns as Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from forge_plugin_profile.gap import computing, gaps

SHOWN = 12
"""Layers that a table has; the rest are summed up."""
UNEVEN = 1.1
"""Ratio of the compute of two ranks from which the report names them: in a collective, one waits for the other."""
Facts = Mapping[str, Any]


def report(ranks: Sequence[Facts]) -> str:
    """Returns the breakdowns of the ranks of a window, the first of them in full."""
    blocks = [*_of_rank(ranks[0])]
    if len(ranks) > 1:
        blocks.append("## Ranks\n\n" + table([*_rank_rows(ranks)]) + _rank_note(ranks))
    return "\n\n".join(blocks) + "\n"


def _of_rank(facts: Facts) -> Iterator[str]:
    yield f"# {_title(facts)}"
    yield "\n".join(f"- {sentence}" for sentence in _sentences(facts))
    yield "## By phase\n\n" + table([*_phase_rows(facts)]) + _phase_note(facts)
    if facts["layers"]:
        yield "## By layer\n\n" + table([*_layer_rows(facts)]) + _layer_note(facts)
    if facts["parts"]:
        yield "## By part, over all layers\n\n" + table([*_part_rows(facts)])
    if facts["collectives"]:
        yield "## Communication\n\n" + table([*_collective_rows(facts)])
    if facts["operators"]:
        yield "## Operators\n\n" + table([*_operator_rows(facts)])


def _title(facts: Facts) -> str:
    first, steps = facts["first_step"], facts["steps"]
    which = f"Step {first}" if steps == 1 else f"Steps {first} to {first + steps - 1}" if first else f"{steps} steps"
    where = ", ".join(filter(None, [facts["device"], facts["layout"], facts["precision"]]))
    return f"{which}, rank {facts['rank']}" + (f" ({where})" if where else "")


# --- the findings in words ---------------------------------------------------------------------------------------


def _sentences(facts: Facts) -> Iterator[str]:
    step, busy = facts["step_s"], facts["busy_s"]
    idle = percent(facts["idle"])
    of_host = f"for **{idle}** of it no operator runs, but Python, or a thread waits."
    yield f"A step takes **{ms(step)}**; " + (f"the GPU is idle for **{idle}** of it." if facts["on_gpu"] else of_host)
    if busy["communication"]:
        hidden = busy["communication"] - facts["exposed_s"]
        share = percent(facts["exposed_s"] / step if step else 0.0)
        yield (
            f"Communication takes {ms(busy['communication'])}, of which {ms(hidden)} are hidden behind compute and "
            f"**{ms(facts['exposed_s'])}** are not: {share} of the step."
        )
        yield f"Least hidden: {_collective_words(_collectives(facts)[0])}."
    if facts["flops"] and facts["peak_flops"] and step:
        used = facts["flops"] / step / facts["peak_flops"]
        yield f"Model FLOPs: {si(facts['flops'])} a step on this rank, {percent(used)} of the peak (MFU in the window)."
    yield from _gap_words(facts)
    if facts["peak_memory_gb"] is not None:
        which = "tensors on the GPU" if facts["on_gpu"] else "the process"
        yield f"Peak memory of {which}: {facts['peak_memory_gb']:.2f} GB."
    if facts["allocated_gb"] is not None:
        yield f"Largest number of allocated bytes, by the trace: {facts['allocated_gb']:.3f} GB."


def _gap_words(facts: Facts) -> Iterator[str]:
    found = gaps(facts["layers"])
    if not found or found[0].seconds <= 0:
        return
    gap, times = found[0], f"{found[0].measured / found[0].expected:.1f} times" if found[0].expected else "more than"
    if gap.by_peak:
        what = f"{times} its bound of {ms(gap.expected)}, its FLOPs at the peak of the device"
    else:
        what = f"{times} its share of the layers' FLOPs, {ms(gap.expected)}"
    yield f"Largest gap: **{gap.layer}** takes {ms(gap.measured)}, {what}."


def _collectives(facts: Facts) -> list[dict[str, Any]]:
    """The collectives of all layers together, by kind and phase, the least hidden first."""
    groups: dict[tuple[str, str], list[Facts]] = defaultdict(list)
    for row in facts["collectives"]:  # of each layer, the least hidden first
        groups[row["kind"], row["phase"]].append(row)
    rows = [
        {
            "kind": kind,
            "phase": phase,
            "block": own[0]["block"],
            **{name: sum(row[name] for row in own) for name in ("times", "seconds", "exposed_s")},
        }
        for (kind, phase), own in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["exposed_s"])


def _collective_words(row: Facts) -> str:
    where = f", most of it in {row['block']}" if row["block"] else ""
    return f"{row['kind']} in {row['phase'] or 'no phase'}, {ms(row['exposed_s'])} of {ms(row['seconds'])}{where}"


# --- tables ------------------------------------------------------------------------------------------------------


def _phase_rows(facts: Facts) -> Iterator[list[str]]:
    yield ["phase", "host", "share", "computes", "communicates", "not hidden"]
    whole = sum(row["host_s"] for row in facts["phases"])
    for row in facts["phases"]:
        busy = [ms(row[name]) for name in ("compute_s", "communication_s", "exposed_s")]
        yield [row["name"], ms(row["host_s"]), percent(row["host_s"] / whole if whole else 0.0), *busy]


def _phase_note(facts: Facts) -> str:
    what = "kernels count for the phase that launched them" if facts["on_gpu"] else "all threads together"
    return f"\n\nA mean step. *host*: wall time of the main thread; the rest: {what}."


def _layer_rows(facts: Facts) -> Iterator[list[str]]:
    yield ["layer", "forward", "backward", "communicates", "model FLOPs", "FLOP/s", "bound", "time / bound"]
    rows = facts["layers"]
    layers = [row for row in rows if row["flops"] is not None and row["name"].startswith("layers.")]
    slow = {row["name"] for row in sorted(layers, key=computing)[-SHOWN:]} if len(layers) > SHOWN else None
    for row in rows:
        if slow is None or row["name"] in slow or row not in layers:
            yield _layer_row(row["name"], row)
    if slow is not None:
        others = [row for row in layers if row["name"] not in slow]
        names = ("forward_s", "backward_s", "communication_s", "flops", "bound_s")
        total = {name: sum(row[name] or 0.0 for row in others) for name in names}
        # A sum that lacks some bounds would be too low
        if any(row["bound_s"] is None for row in others):
            total["bound_s"] = None  # type: ignore[assignment]
        yield _layer_row(f"{len(others)} faster layers", total)


def _layer_row(name: str, row: Facts) -> list[str]:
    time, flops, bound = computing(row), row["flops"], row["bound_s"]
    cells = [ms(row["forward_s"]), ms(row["backward_s"]), ms(row["communication_s"])]
    cells += [si(flops), si(flops / time) if flops is not None and time else "-"]
    return [name, *cells, ms(bound), f"{time / bound:.1f}" if bound else "-"]


def _layer_note(facts: Facts) -> str:
    note = "\n\nModel FLOPs come from `Model.layer_flops` and exclude recomputation."
    if not facts["peak_flops"]:
        return note + " The bound needs the peak of the device: set `metrics.peak_tflops`."
    return f"{note} The bound is computed as in `forge-run plan`: FLOPs at {si(facts['peak_flops'])}FLOP/s."


def _part_rows(facts: Facts) -> Iterator[list[str]]:
    yield ["part", "forward", "backward", "communicates", "counted FLOPs", "FLOP/s"]
    for row in facts["parts"]:
        times = [ms(row[name]) for name in ("forward_s", "backward_s", "communication_s")]
        yield [row["name"], *times, *_rate(row["counted_flops"], computing(row))]


def _collective_rows(facts: Facts) -> Iterator[list[str]]:
    yield ["collective", "phase", "times", "takes", "not hidden", "least hidden in"]
    for row in _collectives(facts):
        times = [f"{row['times']:.4g}", ms(row["seconds"]), ms(row["exposed_s"])]
        yield [row["kind"], row["phase"] or "-", *times, row["block"] or "-"]


def _operator_rows(facts: Facts) -> Iterator[list[str]]:
    yield ["operator", "calls", "own time", "share", "FLOPs", "FLOP/s"]
    for row in facts["operators"]:
        share = percent(row["own_s"] / facts["step_s"] if facts["step_s"] else 0.0)
        # A bar in a name would end the cell of the table
        name = f"`{row['name']}`".replace("|", "/")
        yield [name, f"{row['calls']:.4g}", ms(row["own_s"]), share, *_rate(row["flops"], row["own_s"])]


def _rank_rows(ranks: Sequence[Facts]) -> Iterator[list[str]]:
    yield ["rank", "step", "idle", "computes", "communicates", "not hidden", "peak memory"]
    for facts in ranks:
        busy = facts["busy_s"]
        memory = "-" if facts["peak_memory_gb"] is None else f"{facts['peak_memory_gb']:.2f} GB"
        times = [ms(busy["compute"]), ms(busy["communication"]), ms(facts["exposed_s"])]
        yield [str(facts["rank"]), ms(facts["step_s"]), percent(facts["idle"]), *times, memory]


def _rank_note(ranks: Sequence[Facts]) -> str:
    slow, fast = (choose(ranks, key=lambda facts: facts["busy_s"]["compute"]) for choose in (max, min))
    most, least = slow["busy_s"]["compute"], fast["busy_s"]["compute"]
    if most < UNEVEN * least:
        return ""
    return f"\n\nRank {slow['rank']} computes longest, {ms(most)}, and rank {fast['rank']} shortest, {ms(least)}."


def _rate(flops: float, seconds: float) -> list[str]:
    return [si(flops), si(flops / seconds)] if flops and seconds else ["-", "-"]


# --- cells -------------------------------------------------------------------------------------------------------


def table(rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; the first row is its heading, and all columns but the first are numbers."""
    heading, *body = rows
    widths = [max(len(row[i]) for row in (heading, *body)) for i in range(len(heading))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [heading, rule, *body]
    return "\n".join(
        f"| {row[0]:<{widths[0]}} | "
        + " | ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        + " |"
        for row in lines
    )


def ms(seconds: float | None) -> str:
    """Returns a duration in milliseconds, with three digits."""
    if seconds is None:
        return "-"
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms" if value >= 0.001 else "0 ms"


def percent(share: float) -> str:
    """Returns a share in percent."""
    return f"{100 * share:.1f} %"


def si(value: float | None) -> str:
    """Returns a number with a prefix: `1.25 T`."""
    if value is None:
        return "-"
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}"
    return f"{value:.3g} "
