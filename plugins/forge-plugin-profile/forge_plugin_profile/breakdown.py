"""Where the time of a step went: the figures of a trace, as plain types. Seconds, and a mean step where not said."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from forge_core.contracts.phase import Phase
from forge_plugin_profile.intervals import Intervals, contains, difference, intersection, length, union
from forge_plugin_profile.operator_flops import operator_flops
from forge_plugin_profile.trace import Activity, HostEvent, Owner, Trace

OUTSIDE = "outside the layers"
OPERATORS, WITH_MOST_FLOPS = 20, 5
"""Number of operators to list: with the longest self time, and with the most FLOPs among the others."""
US = 1e-6
MEMBERS = ("compute", "communication", "copy")


def breakdown(trace: Trace) -> dict[str, Any]:
    """Returns the figures of a rank's trace."""
    window = [trace.window]
    busy = {kind: intersection(_of_kind(trace.activities, kind), window) for kind in MEMBERS}
    # From µs over all steps to seconds of a mean step
    scale = US / trace.steps
    # Communication while nothing computes, so that the step waits for it
    exposed = difference(busy["communication"], busy["compute"])
    everything = union([*busy["compute"], *busy["communication"], *busy["copy"]])
    facts = trace.facts
    return {
        "rank": trace.rank,
        "on_gpu": trace.on_gpu,
        "steps": trace.steps,
        **{name: facts.get(name) for name in ("first_step", "layout", "world_size", "device", "precision", "tokens")},
        "step_s": scale * length(window),
        "idle": 1 - length(everything) / max(length(window), 1e-9),
        "busy_s": {kind: scale * length(times) for kind, times in busy.items()},
        "exposed_s": scale * length(exposed),
        "phases": _phases(trace, scale),
        "collectives": _collectives(trace, busy["compute"], scale),
        "layers": _layers(trace, scale),
        "parts": _parts(trace, scale),
        "flops": facts.get("flops"),
        "peak_flops": facts.get("peak_flops"),
        "operators": _operators(trace, scale),
        "peak_memory_gb": facts.get("peak_memory_gb"),
        "allocated_gb": None if trace.allocated is None else trace.allocated / 1e9,
    }


def _time_of(activities: Iterable[Activity]) -> Intervals:
    return union((each.start, each.end) for each in activities)


def _of_kind(activities: Iterable[Activity], kind: str) -> Intervals:
    return _time_of(each for each in activities if each.kind == kind)


# --- phases ------------------------------------------------------------------------------------------------------


def _phases(trace: Trace, scale: float) -> list[dict[str, Any]]:
    """Each phase: how long the host was in it, and what ran that was launched there."""
    spans: dict[str, Intervals] = defaultdict(list)
    for start, end, name in trace.phases:
        spans[name].append((start, end))
    # The engine marks both passes as one phase; nodes of autograd show where the backward pass is
    if Phase.FORWARD_BACKWARD in spans:
        both = union(spans.pop(Phase.FORWARD_BACKWARD))
        backward = intersection(_backward(trace.events), both)
        spans |= {"forward": difference(both, backward), "backward": backward}
    sorted_activities, phase_of = defaultdict(list), _phases_of_activities(trace)
    for each in trace.activities:
        sorted_activities[phase_of(each)].append(each)
    compute = _of_kind(trace.activities, "compute")
    rows = []
    for name in [*spans, *(name for name in sorted_activities if name not in spans)]:
        own = sorted_activities[name]
        communication = _of_kind(own, "communication")
        rows.append(
            {
                "name": name or "not marked",
                "host_s": scale * length(union(spans.get(name, []))),
                "compute_s": scale * length(_of_kind(own, "compute")),
                "communication_s": scale * length(communication),
                "exposed_s": scale * length(difference(communication, compute)),
            }
        )
    # The larger of both: the host may leave a phase long before a GPU has run its kernels
    return sorted(rows, key=lambda row: -max(row["host_s"], row["compute_s"]))


def _phases_of_activities(trace: Trace) -> Callable[[Activity], str]:
    """Returns a function from an activity to its phase, with the forward and the backward pass distinguished."""
    backward = _backward(trace.events)

    def phase_of(activity: Activity) -> str:
        if activity.phase != Phase.FORWARD_BACKWARD:
            return activity.phase
        # No launch links a thread of a backend to its caller, so the start time decides.
        by_time = activity.kind == "communication" and not trace.on_gpu
        is_backward = contains(backward, activity.start) if by_time else activity.owner.backward
        return "backward" if is_backward else "forward"

    return phase_of


def _backward(events: Sequence[HostEvent]) -> Intervals:
    """When autograd's engine ran, with the gaps between its nodes in which the host did nothing else."""
    nodes = union((e.start, e.end) for e in events if e.name.startswith("autograd::engine::evaluate_function"))
    if not nodes:
        return []
    # Where an operator outside of the backward pass begins between two nodes, the pass was interrupted
    others = sorted(e.start for e in events if not e.owner.backward and e.category == "cpu_op" and _is_outermost(e))
    merged, place = [nodes[0]], 0
    for start, end in nodes[1:]:
        while place < len(others) and others[place] < merged[-1][1]:
            place += 1
        if place < len(others) and others[place] < start:
            merged.append((start, end))
        else:
            merged[-1] = (merged[-1][0], end)
    return merged


def _is_outermost(event: HostEvent) -> bool:
    return event.parent is None or event.parent.category != "cpu_op"


# --- communication -----------------------------------------------------------------------------------------------


def _collectives(trace: Trace, compute: Intervals, scale: float) -> list[dict[str, Any]]:
    """Communication by what it is and on whose behalf, the least hidden first."""
    groups: dict[tuple[str, str, str], Intervals] = defaultdict(list)
    phase_of = _phases_of_activities(trace)
    for each in trace.activities:
        if each.kind == "communication":
            groups[collective_name(each.name), phase_of(each), each.owner.block].append((each.start, each.end))
    rows = [
        {
            "kind": kind,
            "phase": phase,
            "block": block,
            "times": len(spans) / trace.steps,
            "seconds": scale * length(union(spans)),
            "exposed_s": scale * length(difference(union(spans), compute)),
        }
        for (kind, phase, block), spans in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["exposed_s"])


def collective_name(name: str) -> str:
    """Returns the kind of a collective by the name of its kernel or range: `all-gather`."""
    # Kernels have names like `ncclDevKernel_AllGather_RING_LL`, ranges like `gloo:all_reduce`
    kernel = re.match(r"[nr]ccl\w*?Kernel_([A-Za-z]+)", name)
    words = kernel[1] if kernel else name.rpartition(":")[2]
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", "-", words).lower()


# --- the model ---------------------------------------------------------------------------------------------------


def _layers(trace: Trace, scale: float) -> list[dict[str, Any]]:
    """Each block of the model, and what the forward and backward passes do outside of them."""
    stated: Mapping[str, float] = trace.facts.get("layer_flops", {})
    whole, peak = trace.facts.get("flops"), trace.facts.get("peak_flops")
    rest = whole - sum(stated.values()) if whole is not None and stated else None
    if not trace.facts and not any(each.owner.block for each in trace.activities):
        return []  # of another program, which marks no blocks
    counted = _counted_flops(trace, lambda owner: owner.block)
    rows = []
    for name, own in _grouped(trace, lambda owner: owner.block).items():
        # FLOPs that the model counts beyond its layers, such as the head, are computed outside of them
        flops = stated.get(name) if name else rest
        measured = _times(own, scale)
        bound = flops / peak if flops is not None and peak else None
        rows.append(
            {
                "name": name or OUTSIDE,
                **measured,
                "flops": flops,
                "counted_flops": counted.get(name, 0.0) / trace.steps,
                "bound_s": bound,
            }
        )
    return sorted(rows, key=lambda row: (row["name"] == OUTSIDE, _natural(row["name"])))


def _parts(trace: Trace, scale: float) -> list[dict[str, Any]]:
    """The parts of blocks, such as `attention`, over all blocks."""
    counted = _counted_flops(trace, lambda owner: owner.part)
    groups = _grouped(trace, lambda owner: owner.part)
    # Activities in no part are already in the table of layers
    groups.pop("", None)
    rows = [
        {"name": name, **_times(own, scale), "counted_flops": counted.get(name, 0.0) / trace.steps}
        for name, own in groups.items()
    ]
    return sorted(rows, key=lambda row: -(row["forward_s"] + row["backward_s"]))


def _grouped(trace: Trace, key: Callable[[Owner], str]) -> dict[str, list[Activity]]:
    groups: dict[str, list[Activity]] = defaultdict(list)
    for each in trace.activities:
        # A trace of another program has no phases
        if each.phase == Phase.FORWARD_BACKWARD or (not trace.phases and key(each.owner)):
            groups[key(each.owner)].append(each)
    return groups


def _times(activities: Sequence[Activity], scale: float) -> dict[str, float]:
    working = [each for each in activities if each.kind != "communication"]
    times = {
        "forward_s": _time_of(each for each in working if not each.owner.backward),
        "backward_s": _time_of(each for each in working if each.owner.backward),
        "communication_s": _of_kind(activities, "communication"),
    }
    return {name: scale * length(spans) for name, spans in times.items()}


def _counted_flops(trace: Trace, key: Callable[[Owner], str]) -> dict[str, float]:
    flops: dict[str, float] = defaultdict(float)
    for event in trace.events:
        if "Input Dims" in event.args:
            flops[key(event.owner)] += operator_flops(event.name, event.args["Input Dims"])
    return flops


def _natural(name: str) -> list[Any]:
    # So that layers.10 comes after layers.9
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", name)]


# --- operators ---------------------------------------------------------------------------------------------------


def _operators(trace: Trace, scale: float) -> list[dict[str, Any]]:
    """Operators by self time: on a GPU, the time of the kernels they launched; else without nested operators."""
    rows: dict[str, dict[str, Any]] = {}
    for event in trace.events:
        if event.category == "cpu_op":
            row = rows.setdefault(event.name, {"name": event.name, "calls": 0.0, "own_s": 0.0, "flops": 0.0})
            row["calls"] += 1 / trace.steps
            row["own_s"] += 0.0 if trace.on_gpu else scale * event.own
            row["flops"] += operator_flops(event.name, event.args.get("Input Dims", ())) / trace.steps
    for each in trace.activities if trace.on_gpu else ():
        name = each.operator or each.name
        row = rows.setdefault(name, {"name": name, "calls": 0.0, "own_s": 0.0, "flops": 0.0})
        row["own_s"] += scale * (each.end - each.start)
    by_time = sorted(rows.values(), key=lambda row: -row["own_s"])
    # Beyond the slowest ones, so that those which use the hardware well are shown, too
    by_flops = sorted((row for row in by_time[OPERATORS:] if row["flops"]), key=lambda row: -row["flops"])
    return by_time[:OPERATORS] + by_flops[:WITH_MOST_FLOPS]
