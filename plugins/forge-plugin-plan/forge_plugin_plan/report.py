"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.parallel.layout import micro_batches
from forge_plugin_plan import units
from forge_plugin_plan.bounds import Bound, bounds, sent_along
from forge_plugin_plan.estimate import Plan
from forge_plugin_plan.fake_world import NODE
from forge_plugin_plan.gpus import GPU
from forge_plugin_plan.simulate import RankPlan
from forge_plugin_plan.storages import Memory, Purpose

SPARE = 0.1
"""Fraction of the memory that should stay free for uncounted memory."""


def report(plan: Plan, gpu: GPU | None, network: float) -> str:
    """Returns paragraphs: the job, memory, computation, communication, and with a GPU the bounds on a step's time.

    Args:
        plan: the estimates.
        gpu: the GPU by which to bound the time, if any.
        network: bytes a second and direction from each GPU to other nodes.
    """
    parts = [_heading(plan), _memory(plan, gpu), _pipeline(plan), _computation(plan), _communication(plan)]
    if gpu is not None:
        parts.append(_time(plan, gpu, network))
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part)


# --- the job -----------------------------------------------------------------------------------------------------


def _heading(plan: Plan) -> Iterator[str]:
    train, (count, rows) = plan.job.train, micro_batches(plan.job, plan.layout)
    tokens = train.global_batch_size * train.seq_len
    yield f"ranks      {plan.layout.world_size:,}: {plan.layout}"
    trained = "" if plan.trained == plan.parameters else f", {plan.trained:,} of them trained"
    yield f"model      {plan.parameters:,} parameters{trained}, {train.precision}"
    yield f"batch      {tokens:,} tokens a step; each rank {count} x {rows} sequences of {train.seq_len:,}"
    for title, text in plan.lines:
        yield f"{title:<11}{text}"
    for number, text in enumerate(_assumed(plan)):
        yield f"{'' if number else 'assumed':<11}{text}"


def _assumed(plan: Plan) -> Iterator[str]:
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


def _memory(plan: Plan, gpu: GPU | None) -> Iterator[str]:
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
    yield f"  {'together':<34}{'':>12}{units.size(rank.memory.peak):>14}{_verdict(rank.memory, gpu)}"


def _verdict(memory: Memory, gpu: GPU | None) -> str:
    if gpu is None:
        return ""
    of = f"   of {units.size(gpu.memory)} ({gpu.name}): "
    if memory.peak > gpu.memory:
        return f"{of}DOES NOT FIT, {units.size(memory.peak - gpu.memory)} too much"
    free = gpu.memory - memory.peak
    tight = "" if free >= SPARE * gpu.memory else ", little left for uncounted memory"
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


def _time(plan: Plan, gpu: GPU, network: float) -> Iterator[str]:
    played = [rank for rank in plan.ranks if rank.traffic is not None]
    yield f"a step takes at least ({gpu.name}, {network * 8 / 1e9:,.0f} Gbit/s of network a GPU)"
    if not played:
        yield f"  unknown: the step cannot be played: {plan.ranks[0].failure}"
        return
    # Of each resource the rank that needs most time, since the others wait for it
    worst: dict[str, Bound] = {}
    for rank in played:
        for bound in bounds(rank, gpu, network):
            if bound.what not in worst or bound.seconds > worst[bound.what].seconds:
                worst[bound.what] = bound
    for bound in worst.values():
        yield f"  {bound.what:<30}{units.seconds(bound.seconds):>12}   {bound.how}"
    longest = max(bound.seconds for bound in worst.values())
    yield f"  {'if all overlaps':<30}{units.seconds(longest):>12}   {_speed(plan, gpu, longest)}"


def _speed(plan: Plan, gpu: GPU, seconds: float) -> str:
    tokens = plan.job.train.global_batch_size * plan.job.train.seq_len
    rate = f"at most {tokens / seconds / plan.layout.world_size:,.0f} tokens/s a GPU"
    per_token = plan.ranks[0].outline.flops
    if not per_token or plan.trained < plan.parameters:
        return rate
    return f"{rate}, model FLOPs at {per_token * tokens / seconds / plan.layout.world_size / gpu.flops:.0%} of the peak"
