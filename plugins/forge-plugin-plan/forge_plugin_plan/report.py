"""A plan as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from forge_core.parallel.layout import micro_batches
from forge_plugin_plan import units
from forge_plugin_plan.bounds import Bound, bounds, sent_along
from forge_plugin_plan.error import Error
from forge_plugin_plan.estimate import Plan
from forge_plugin_plan.fake_world import NODE
from forge_plugin_plan.machine import Machine
from forge_plugin_plan.simulate import RankPlan
from forge_plugin_plan.storages import Memory, Purpose

SPARE = 0.1
"""Fraction of the memory that should stay free for uncounted memory."""

LAUNCH_BOUND = "take larger micro-batches, or [parallel.compile]"


def report(plan: Plan, machine: Machine | None, error: Error | None = None) -> str:
    """Returns paragraphs: the job, memory, computation, communication, and with a GPU the bounds on a step's time.

    Args:
        plan: the estimates.
        machine: the GPU and network by which to bound the time, if any.
        error: the bound beside a measured step, if there is one.
    """
    parts = [_heading(plan), _memory(plan, machine), _pipeline(plan), _computation(plan), _communication(plan)]
    if machine is not None:
        parts.append(_time(plan, machine))
    if error is not None:
        parts.append(_error(error))
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part)


# --- the job -----------------------------------------------------------------------------------------------------


def _heading(plan: Plan) -> Iterator[str]:
    train, (count, rows) = plan.job.train, micro_batches(plan.job, plan.layout)
    tokens = train.global_batch_size * train.seq_len
    yield f"ranks      {plan.layout.world_size:,}: {plan.layout}"
    trained = "" if plan.trained == plan.parameters else f", {plan.trained:,} of them trained"
    yield f"model      {plan.parameters:,} parameters{trained}, {train.precision}"
    largest = " at most" if train.batch_schedule else ""
    yield f"batch      {tokens:,} tokens a step{largest}; each rank {count} x {rows} sequences of {train.seq_len:,}"
    for title, text in plan.lines:
        yield f"{title:<11}{text}"
    for number, text in enumerate(_assumed(plan)):
        yield f"{'' if number else 'assumed':<11}{text}"


def _assumed(plan: Plan) -> Iterator[str]:
    if plan.job.train.device not in ("auto", "cuda", "cpu"):
        yield f"kernels and memory of CUDA: those of {plan.job.train.device} are not known"
    if plan.device == "cuda":
        yield "attention by a fused kernel: no matrix of all pairs of positions is kept"
        if plan.layout.world_size > 1:
            yield f"nodes of {NODE} GPUs, ranks numbered node by node"
    else:
        for what, choice, _ in plan.ranks[0].outline.backend_choices:
            yield f"{what} on the CPU: {choice}"
    if plan.job.data.packing.needs_boundaries:
        yield "every sequence is one document: what keeps documents apart is not counted"
    if plan.ranks[0].compiled:
        yield "compiled blocks run as they are: compiled, they keep less"


# --- memory ------------------------------------------------------------------------------------------------------


def _memory(plan: Plan, machine: Machine | None) -> Iterator[str]:
    rank = plan.fullest
    which = f", pipeline rank {rank.pipeline_rank}" if plan.layout.pp > 1 else ""
    yield f"{'memory of a rank' + which:<36}{'at most':>12}{'at the peak':>14}"
    if rank.memory is None:
        for purpose, value in rank.training_state.items():
            yield f"  {purpose.value:<34}{units.size(value):>12}"
        yield f"  {'activations and all else':<34}{'unknown':>12}   the step cannot be played: {rank.failure}"
        return
    for purpose in Purpose:
        if rank.memory.most[purpose]:
            most, peak = rank.memory.most[purpose], rank.memory.at_peak[purpose]
            yield f"  {purpose.value:<34}{units.size(most):>12}{units.size(peak):>14}"
    verdict = _verdict(rank.memory, machine)
    yield f"  {'together':<34}{'':>12}{units.size(rank.memory.peak):>14}{verdict}"


def _verdict(memory: Memory, machine: Machine | None) -> str:
    if machine is None or math.isinf(machine.memory):
        return ""
    of = f"   of {units.size(machine.memory)} ({machine.name}): "
    if memory.peak > machine.memory:
        return f"{of}DOES NOT FIT, {units.size(memory.peak - machine.memory)} too much"
    free = machine.memory - memory.peak
    tight = "" if free >= SPARE * machine.memory else ", little left for uncounted memory"
    return f"{of}fits, {units.size(free)} free{tight}"


def _pipeline(plan: Plan) -> Iterator[str]:
    if plan.layout.pp == 1:
        return
    names = ("weights", "gradients", "optimizer", "activations", "logits", "peak")
    yield f"{'pipeline rank':>13}{''.join(f'{name:>13}' for name in names)}"
    for rank in plan.ranks:
        cells = [units.size(value) for value in rank.training_state.values()]
        if rank.memory is not None:
            most = rank.memory.most
            cells += map(units.size, (most[Purpose.ACTIVATIONS], most[Purpose.LOGITS], rank.memory.peak))
        else:
            cells += ["unknown" if rank.failure else "not played"] * 3
        yield f"{rank.pipeline_rank:>13}{''.join(f'{cell:>13}' for cell in cells)}"


# --- computation and communication -------------------------------------------------------------------------------


def _computation(plan: Plan) -> Iterator[str]:
    rank, train = plan.busiest, plan.job.train
    per_token, tokens = rank.outline.flops, train.global_batch_size * train.seq_len
    yield "FLOPs of a step"
    if per_token:
        whole = per_token * tokens
        each = f"{units.flops(whole / plan.layout.world_size)} a rank"
        # Frozen weights have no gradients, whose products are a third of all
        frozen = "" if plan.trained == plan.parameters else ", were all of it trained"
        yield f"  {'model':<12}{each:<24}{units.flops(whole)} in all, as the model states them{frozen}"
    if rank.traffic is not None:
        which = f"pipeline rank {rank.pipeline_rank}, " if plan.layout.pp > 1 else ""
        each = f"{units.flops(rank.traffic.flops)} a rank"
        yield f"  {'computed':<12}{each:<24}{which}products and attention, including recomputation"


def _communication(plan: Plan) -> Iterator[str]:
    rank = max(plan.ranks, key=_sent)
    if rank.traffic is None or not rank.traffic.transfers:
        return
    which = f", pipeline rank {rank.pipeline_rank}" if plan.layout.pp > 1 else ""
    yield f"{'sent by a rank in a step' + which:<48}{'times':>9}{'sent':>12}"
    traffic = rank.traffic
    for line in sorted(set(traffic.lines.values()), key=str):
        # A receive sends nothing, and is not listed
        own = [(t, times) for t, times in traffic.transfers.items() if traffic.lines[t.group] == line and t.sent]
        for kind in sorted({transfer.kind for transfer, _ in own}):
            same = [(transfer.sent, times) for transfer, times in own if transfer.kind == kind]
            what = f"{line}: {kind}"
            total = sum(sent * times for sent, times in same)
            yield f"  {what:<46}{sum(times for _, times in same):>9,}{units.size(total):>12}"


def _sent(rank: RankPlan) -> float:
    if rank.traffic is None:
        return 0
    return sum(sent_along(rank.traffic, line) for line in set(rank.traffic.lines.values()))


# --- time --------------------------------------------------------------------------------------------------------


def _time(plan: Plan, machine: Machine) -> Iterator[str]:
    played = [rank for rank in plan.ranks if rank.traffic is not None]
    yield f"a step takes at least ({machine.name}, {machine.network * 8 / 1e9:,.0f} Gbit/s of network a GPU)"
    if not played:
        yield f"  unknown: the step cannot be played: {plan.ranks[0].failure}"
        return
    # Of each resource the rank that needs most time, since the others wait for it
    worst: dict[str, Bound] = {}
    for rank in played:
        for bound in bounds(rank, machine):
            if bound.what not in worst or bound.seconds > worst[bound.what].seconds:
                worst[bound.what] = bound
    for bound in worst.values():
        yield f"  {bound.what:<30}{units.seconds(bound.seconds):>12}   {bound.how}"
    if "launches" not in worst:
        yield f"  {'launches':<30}{'unknown':>12}   compiled blocks launch fewer kernels than are played"
    longest = max(bound.seconds for bound in worst.values())
    yield f"  {'if all overlaps':<30}{units.seconds(longest):>12}   {_speed(plan, machine, longest)}"
    if "launches" in worst and worst["launches"].seconds > worst["compute"].seconds:
        yield f"launch-bound: starting kernels takes {_ratio(worst)} times as long as computing; {LAUNCH_BOUND}"


def _error(error: Error) -> Iterator[str]:
    yield f"measured   {error.file}: {error.device}"
    if error.measured is None or error.predicted is None:
        yield f"           no step to compare with: {error.why}"
        return
    found = f"{units.seconds(error.measured)} a step, the mean of {error.steps}"
    yield f"           {found}; the bound is {units.seconds(error.predicted)}, {abs(error.error or 0):.0%} {error.side}"


def _ratio(worst: Mapping[str, Bound]) -> str:
    compute = worst["compute"].seconds
    return f"{worst['launches'].seconds / compute:,.1f}" if compute else "many"


def _speed(plan: Plan, machine: Machine, seconds: float) -> str:
    tokens = plan.job.train.global_batch_size * plan.job.train.seq_len
    rate = f"at most {tokens / seconds / plan.layout.world_size:,.0f} tokens/s a GPU"
    per_token = plan.ranks[0].outline.flops
    if not per_token or plan.trained < plan.parameters or machine.peak is None:
        return rate
    utilisation = per_token * tokens / seconds / plan.layout.world_size / machine.peak
    return f"{rate}, model FLOPs at {utilisation:.0%} of the peak"
