"""A trace of torch.profiler as what ran when, and on whose behalf."""

from __future__ import annotations

import gzip
import json
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, frozen

from forge_core.contracts.errors import JobError
from forge_plugin_profile.marks import BLOCK, PART, PHASE

FORGE = "forge"
"""Key of a trace under which the hook stores facts about the run."""
ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = "ProfilerStep#"
COMPUTING = "CompiledFunction"
"""Beginning of the names of compiled code, which have no `::`."""
NOT_COMPUTING = ("autograd::", "torch::autograd::", "c10d::", "_c10d_functional::", "c10d_functional::", "TorchDynamo")
"""The engine of autograd, whose self time is bookkeeping and waits; calls that only enqueue a collective; the look-up
of compiled code."""
COLLECTIVES = ("gloo:", "nccl", "rccl", "ucc:", "mpi:")
"""Beginnings of names of what communicates: kernels of a GPU, ranges of the threads of a backend of the CPU."""


@define
class Owner:
    """The part of the model on whose behalf something ran; filled in later for the backward pass."""

    block: str = ""
    part: str = ""
    backward: bool = False


@define
class HostEvent:
    """An operator, a range, or a launch, on a thread of the host. Times in µs."""

    name: str
    category: str
    thread: Any
    start: float
    end: float
    owner: Owner
    parent: HostEvent | None
    args: Mapping[str, Any]
    own: float
    """Time without the operators within."""
    is_leaf: bool = True
    counted: bool = False
    """Whether it, or an event around it, is an activity."""


@frozen
class Activity:
    """Something that computes, communicates or copies. Times in µs."""

    kind: str
    """`compute`, `communication`, `copy`."""
    name: str
    start: float
    end: float
    phase: str
    owner: Owner
    operator: str
    """The operator that launched it, or that it is; empty if none did."""


@frozen(kw_only=True)
class Trace:
    """See the fields. Times in µs."""

    facts: Mapping[str, Any]
    """What the hook knew of the run; empty for a trace of anybody else's."""
    rank: int
    on_gpu: bool
    steps: int
    window: tuple[float, float]
    """From the first activity of a GPU to its last; without one, from the beginning of the first step to the end."""
    phases: Sequence[tuple[float, float, str]]
    events: Sequence[HostEvent]
    activities: Sequence[Activity]
    allocated: float | None
    """Largest number of allocated bytes, on the GPU if there is one; None without `memory`."""


def read_trace(path: Path) -> Trace:
    """Read a trace, compressed or not.

    Raises:
        JobError: the file is no trace.
    """
    try:
        content = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise JobError(f"{path} cannot be read as a trace: {error}") from error
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise JobError(f"{path} is JSON, but no trace of torch.profiler: it has no traceEvents")
    return trace_of(content)


def trace_of(content: Mapping[str, Any]) -> Trace:
    """Returns the trace that a file's JSON holds."""
    spans = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    events = _host_events(event for event in spans if event.get("cat") in ON_HOST)
    facts, marks = content.get(FORGE, {}), [event for event in events if event.category == "user_annotation"]
    steps = sorted((event.start, event.end) for event in marks if event.name.startswith(STEP))
    steps = steps[: facts.get("recorded_steps")]  # one more begins before a run that ends early stops the recording
    phases = sorted((e.start, e.end, e.name.removeprefix(PHASE)) for e in marks if e.name.startswith(PHASE))
    kernels = [event for event in spans if event.get("cat") in ON_DEVICE]
    activities = _on_device(kernels, events, phases) if kernels else _on_host(events, phases)
    # On a GPU, kernels run later than the host marks the steps
    whole = steps if steps and not kernels else [(activity.start, activity.end) for activity in activities]
    return Trace(
        facts=facts,
        rank=content.get("distributedInfo", {}).get("rank", 0),
        on_gpu=bool(kernels),
        steps=max(len(steps), 1),
        window=(min((start for start, _ in whole), default=0.0), max((end for _, end in whole), default=0.0)),
        phases=phases,
        events=events,
        activities=activities,
        allocated=_allocated(content["traceEvents"], 1 if kernels else 0),
    )


def _host_events(spans: Iterable[Mapping[str, Any]]) -> list[HostEvent]:
    """The events of all threads, in the order of each, with what each is within and on whose behalf it ran."""
    threads = defaultdict(list)
    for span in spans:
        threads[span["pid"], span["tid"]].append(span)
    events: list[HostEvent] = []
    for own in threads.values():
        # Of two that begin at the same time, the longer one contains the other
        events += _nested(sorted(own, key=lambda span: (span["ts"], -span.get("dur", 0.0))))
    _own_backward(events)
    return events


def _nested(spans: Iterable[Mapping[str, Any]]) -> Iterable[HostEvent]:
    around: list[HostEvent] = []
    for span in spans:
        start, duration, name = float(span["ts"]), float(span.get("dur", 0.0)), str(span["name"])
        while around and around[-1].end <= start:
            around.pop()
        parent, args = around[-1] if around else None, span.get("args", {})
        owner = _owner(name, args, parent)
        thread = (span["pid"], span["tid"])
        event = HostEvent(name, span["cat"], thread, start, start + duration, owner, parent, args, duration)
        # Launches are not subtracted: their time belongs to the operator
        if parent is not None and event.category in ("cpu_op", "user_annotation"):
            parent.own -= duration
            parent.is_leaf = False
        around.append(event)
        yield event


def _owner(name: str, args: Mapping[str, Any], parent: HostEvent | None) -> Owner:
    owner = parent.owner if parent is not None else Owner()
    if name.startswith(BLOCK):
        return Owner(name.removeprefix(BLOCK), "", owner.backward)  # within a backward pass: computed again
    if name.startswith(PART) and owner.block:
        return Owner(owner.block, name.rpartition(".")[2], owner.backward)
    # Not 0 only for operators of a backward pass
    if args.get("Fwd thread id") and not (owner.backward and owner.block):
        return Owner(backward=True)
    return owner


def _own_backward(events: Sequence[HostEvent]) -> None:
    """Find the owners of the backward pass: an operator there has the sequence number of one of the forward pass."""
    # Operators that record no node have the number of the next one, so the latest with a number is the node's own.
    # Each thread counts separately: only the thread of the steps runs the forward pass.
    stepping = {event.thread for event in events if event.name.startswith(STEP)}
    forward: dict[int, HostEvent] = {}
    for event in events:
        number = event.args.get("Sequence number")
        if number is None or event.args.get("Fwd thread id") or event.owner.backward:
            continue
        if stepping and event.thread not in stepping:
            continue
        if number not in forward or event.start > forward[number].start:
            forward[number] = event
    for event in events:
        if event.owner.backward and not event.owner.block and event.args.get("Fwd thread id"):
            source = forward.get(event.args.get("Sequence number", -1))
            if source is not None:
                event.owner.block, event.owner.part = source.owner.block, source.owner.part


def _on_host(events: Iterable[HostEvent], phases: Sequence[tuple[float, float, str]]) -> list[Activity]:
    """Operators that compute, without those within them, and the work of the threads of a backend."""
    activities = []
    for event in events:
        if event.parent is not None and event.parent.counted:
            event.counted = True
        elif kind := _kind_on_host(event):
            event.counted = True
            phase = phase_at(phases, event.start)
            activities.append(Activity(kind, event.name, event.start, event.end, phase, event.owner, event.name))
    return activities


def _kind_on_host(event: HostEvent) -> str:
    if event.name.startswith(COLLECTIVES):
        return "communication"
    if event.category != "cpu_op" or event.name.startswith(NOT_COMPUTING) or event.name == "record_param_comms":
        return ""
    return "compute" if "::" in event.name or event.is_leaf or event.name.startswith(COMPUTING) else ""


def _on_device(
    spans: Iterable[Mapping[str, Any]], events: Iterable[HostEvent], phases: Sequence[tuple[float, float, str]]
) -> list[Activity]:
    """Kernels and copies, each of the operator that launched it."""
    launches = {e.args["correlation"]: e for e in events if e.category.startswith("cuda_") and "correlation" in e.args}
    # For kernels whose launch was not recorded: no owner, and a time outside of all phases
    unknown = HostEvent("", "", None, -1.0, -1.0, Owner(), None, {}, 0.0)
    activities = []
    for span in spans:
        args, name, start = span.get("args", {}), str(span["name"]), float(span["ts"])
        kind = "compute" if span["cat"] == "kernel" else "copy"
        if name.lower().startswith(COLLECTIVES):
            kind = "communication"
        launch = launches.get(args.get("correlation"), unknown)
        end, phase = start + float(span.get("dur", 0.0)), phase_at(phases, launch.start)
        activities.append(Activity(kind, name, start, end, phase, launch.owner, _operator(launch)))
    return activities


def _operator(event: HostEvent | None) -> str:
    while event is not None and event.category != "cpu_op":
        event = event.parent
    return event.name if event is not None else ""


def phase_at(phases: Sequence[tuple[float, float, str]], time: float) -> str:
    """Returns the phase of the run at a time; empty where none is marked."""
    place = bisect_right(phases, time, key=lambda phase: phase[0]) - 1
    return phases[place][2] if place >= 0 and time < phases[place][1] else ""


def _allocated(events: Iterable[Mapping[str, Any]], device_type: int) -> float | None:
    args = (event["args"] for event in events if event.get("name") == "[memory]")
    totals = [each.get("Total Allocated", 0) for each in args if each.get("Device Type") == device_type]
    return max(totals, default=None)
