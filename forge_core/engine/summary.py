"""The summary of a run that is printed before it starts, and kept in its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from forge_core.checkpoint.run_folder import save_tokenizer, write_record
from forge_core.config.dump import dump_job
from forge_core.config.mixture import first_step, source_names
from forge_core.config.walk import walk_components
from forge_core.contracts.data import HasDescription
from forge_core.contracts.parameters import NamedParameters
from forge_core.data.mixture import expected_draws, limits, phase_shares, sizes_of
from forge_core.engine.build import Run
from forge_core.metrics.flops import peak_flops
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import global_rank

if TYPE_CHECKING:
    from forge_core.contracts.runtime import ParallelStage
    from forge_core.engine.step import Stepper
    from forge_core.parallel.stages import OrderedStage


def announce(run: Run, stepper: Stepper, provenance: Mapping[str, Any], echo: Callable[[str], object]) -> None:
    """On rank 0: print what the run is about to do, and keep it in the run folder, with the resolved job, the
    provenance and the tokenizer."""
    folder, tokenizer = run.context.folder, run.context.tokenizer
    if global_rank() != 0:
        return
    assert folder is not None
    summary = describe_run(run, stepper, provenance)
    if tokenizer is not None:
        save_tokenizer(folder, tokenizer)
    write_record(folder, dump_job(run.job, run.context.plugins.catalog), provenance, summary)
    echo(summary)


def describe_run(run: Run, stepper: Stepper, provenance: Mapping[str, Any]) -> str:
    """One line each: distributions, layout, stages with reasons, hooks in order, sizes, backends, waits."""
    rows = list(_rows(run, stepper, provenance))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _rows(run: Run, stepper: Stepper, provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    job, context = run.job, run.context
    yield "run", f"{job.job.name} in {context.folder}"
    versions = [f"{name} {dist['version']}" for name, dist in provenance["distributions"].items()]
    yield "plugins", ", ".join(versions)
    yield "device", f"{_device_name(context.device)}, {context.layout}, {job.train.precision}"
    yield "model", _model(run)
    yield "batch", _batch(run)
    yield from _data(run)
    for stage, built in zip(run.stages, run.built_stages, strict=True):
        yield f"stage {stage.name}", _stage(stage, built)
    for number, name in enumerate(run.hooks.hooks, 1):
        yield f"hook {number}", name
    for what, choice, why in _choices(run):
        yield what, f"{choice} ({why})"
    yield "memory", _memory(run.parameters)
    yield "waits", f"{stepper.waits()} a step"


def _stage(stage: OrderedStage, built: ParallelStage) -> str:
    """The reasons for its place, and what it did."""
    return "; ".join(filter(None, [*stage.reasons, built.describe()])) or "no relation to another stage"


def _choices(run: Run) -> Iterator[tuple[str, str, str]]:
    """Backends: the model's, chosen when it was built, and those of other components."""
    yield from run.outline.backend_choices
    for _, component in walk_components(run.job):
        yield from component.choices(run.context)


def _model(run: Run) -> str:
    roles: dict[str, int] = {}
    for name, size in run.outline.sizes.items():
        role = run.outline.roles[name]
        roles[role] = roles.get(role, 0) + size
    total = sum(roles.values())
    return f"{total:,} parameters (" + ", ".join(f"{role} {count:,}" for role, count in roles.items()) + ")"


def _batch(run: Run) -> str:
    train = run.job.train
    count, size = micro_batches(run.job, run.context.layout)
    tokens = train.global_batch_size * train.seq_len
    flops, peak = run.outline.flops, peak_flops(run.job, run.context.device)
    cost = f", {flops * tokens:.3g} FLOPs" if flops else ""
    known = f" (peak {peak / 1e12:,.0f} TFLOP/s a device)" if peak else ""
    ranks = f" on {run.context.layout.data_parallel} ranks" if run.context.layout.data_parallel > 1 else ""
    return f"{tokens:,} tokens a step: {count} x {size} sequences of {train.seq_len}{ranks}{cost}{known}"


def _data(run: Run) -> Iterator[tuple[str, str]]:
    """Each source with its share, what is in it and how often the run passes over it; then the phases."""
    job, names, sizes = run.job, source_names(run.job), sizes_of(run.datasets)
    (_, shares), *phases = phase_shares(job)
    amounts = [_amount(*row) for row in zip(sizes, expected_draws(job, sizes), limits(job, sizes), strict=True)]
    held_out = f"{len(run.held_out):,} held out" if run.held_out is not None else "none held out"
    yield "data", f"{amounts[0] if len(names) == 1 else f'{len(names)} sources'}; {held_out}"
    for name, share, amount in zip(names, _parts(shares), amounts, strict=True):
        if len(names) > 1:
            yield f"source {name}", f"share {share}, {amount}"
    for name, dataset in zip(names, run.datasets, strict=True):
        if isinstance(dataset, HasDescription):
            yield f"packing {name}" if len(names) > 1 else "packing", dataset.describe()
    for number, (phase, (_, shares)) in enumerate(zip(job.data.phases, phases, strict=True)):
        mixed = ", ".join(f"{name} {share}" for name, share in zip(names, _parts(shares), strict=True))
        yield f"phase {number}", f"from step {first_step(phase, job) + 1:,}: {mixed}; rate x {phase.lr_factor:g}"


def _amount(size: int | None, drawn: float, limit: int | None) -> str:
    """Size of a source, and how much of it this run draws."""
    if size is None:
        return f"a stream, {drawn:,.0f} sequences of it"
    at_limit = ", its limit" if limit is not None and round(drawn) >= limit else ""
    return f"{size:,} sequences, {drawn / size if size else 0:.3g} passes{at_limit}"


def _parts(shares: Sequence[int]) -> list[str]:
    return [f"{share / sum(shares):.3g}" for share in shares]


def _memory(parameters: NamedParameters) -> str:
    weights = sum(item.parameter.numel() * item.parameter.element_size() for item in parameters)
    trained = sum(p.parameter.numel() * p.parameter.element_size() for p in parameters if p.parameter.requires_grad)
    return (
        f"weights {weights / 1e6:,.0f} MB, gradients {trained / 1e6:,.0f} MB, besides optimizer state and activations"
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"
