"""Reports of a run: the summary before it starts, and the lines of its steps and evaluations in the loggers."""

from __future__ import annotations

import resource
import shutil
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor

from forge_core.auxiliary import Count
from forge_core.checkpoint.run_folder import save_tokenizer, write_record
from forge_core.checkpoint.storage import Local
from forge_core.config.keys import walk_components
from forge_core.config.load import dump_job
from forge_core.config.mixture import first_step, source_names
from forge_core.contracts.contexts import StepContext
from forge_core.contracts.data import HasDescription
from forge_core.contracts.errors import ExitCode, JobError
from forge_core.contracts.runtime import Flushes, LearnsEnd, Logger, TakesArtifacts
from forge_core.data.order import expected_draws, limits, phase_shares, sizes_of
from forge_core.devices import home_of, query_device
from forge_core.engine.build import Run
from forge_core.engine.hooks import named
from forge_core.engine.step import ABSENT, SOURCE_LOSS, WAITED, Stepper, Sums, metrics
from forge_core.files import existing_part
from forge_core.metrics.flops import peak_flops
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import global_rank
from forge_core.plugins.catalog import CORE, core_version

MAX_LAG = 2
"""Steps that a line may stay behind: they bound the pinned memory, and how late the non-finite policy acts."""


def announce(run: Run, stepper: Stepper, provenance: Mapping[str, Any], echo: Callable[[str], object]) -> None:
    """On rank 0: print what the run is about to do, and keep it in the folder with job, provenance and tokenizer."""
    if global_rank() != 0:
        return
    _warn_of_untested_torch()
    folder, tokenizer, summary = run.context.folder, run.context.tokenizer, describe_run(run, stepper, provenance)
    assert folder is not None
    if tokenizer is not None:
        save_tokenizer(folder, tokenizer)
    write_record(folder, dump_job(run.job, run.context.plugins.catalog), provenance, summary)
    echo(summary)


def _warn_of_untested_torch() -> None:
    """Warn of a torch outside the requirement of `forge-run`, which installers compare only when they install."""
    from packaging.requirements import Requirement

    # Only up to torch's: parsing the requirements of all extras would take longer than the rest of the summary.
    tested = next(item.specifier for item in map(Requirement, metadata.requires(CORE) or ()) if item.name == "torch")
    if not tested.contains(torch.__version__, prereleases=True):
        warnings.warn(
            f"torch {torch.__version__}: {CORE} {core_version()} was tested with torch {tested} only; "
            f'pip install "torch{tested}"',
            stacklevel=2,
        )


def describe_run(run: Run, stepper: Stepper, provenance: Mapping[str, Any]) -> str:
    """One line each: distributions, layout, stages with reasons, hooks in order, sizes, backends, waits."""
    rows = list(_rows(run, stepper, provenance))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _rows(run: Run, stepper: Stepper, provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    job, context = run.job, run.context
    yield "run", f"{job.job.name} in {context.folder}"
    yield "plugins", ", ".join(f"{name} {dist['version']}" for name, dist in provenance["distributions"].items())
    device = query_device(context.device, "get_device_name") or f"{context.device} ({torch.get_num_threads()} threads)"
    yield "device", f"{device}, {context.layout}, {job.train.precision}"
    yield "model", _model(run)
    yield "batch", _batch(run)
    yield from _data(run)
    for stage, built in zip(run.stages, run.built_stages, strict=True):
        reasons = [*stage.reasons, built.describe()]  # for its place, and what it did
        yield f"stage {stage.name}", "; ".join(filter(None, reasons)) or "no relation to another stage"
    for number, name in enumerate(run.hooks.hooks, 1):
        yield f"hook {number}", name
    components = [component for _, component in walk_components(job)]
    for choices in (
        run.outline.backend_choices,
        *(component.choices(context) for component in components),
    ):  # the model chose when it was built
        for subject, choice, why in choices:
            yield subject, f"{choice} ({why})"
    yield "memory", _memory(run)
    if isinstance(job.checkpoint.storage, Local) and context.folder is not None:
        yield "checkpoints", _room(run, context.folder / job.checkpoint.storage.folder)
    yield (
        "waits",
        "; ".join(filter(None, [f"{stepper.waits()} a step", *(component.waits() for component in components)])),
    )


def _model(run: Run) -> str:
    roles: Counter[str] = Counter()
    for name, size in run.outline.sizes.items():
        roles[run.outline.roles[name]] += size
    return f"{roles.total():,} parameters ({', '.join(f'{role} {count:,}' for role, count in roles.items())})"


def _batch(run: Run) -> str:
    train, layout = run.job.train, run.context.layout
    count, size = micro_batches(run.job, layout)
    tokens = train.global_batch_size * train.seq_len
    flops, peak = run.outline.flops, peak_flops(run.job, run.context.device)
    cost = f", {flops * tokens:.3g} FLOPs" if flops else ""
    known = f" (peak {peak / 1e12:,.0f} TFLOP/s a device)" if peak else ""
    ranks = f" on {layout.data_parallel} ranks" if layout.data_parallel > 1 else ""
    return f"{tokens:,} tokens a step: {count} x {size} sequences of {train.seq_len}{ranks}{cost}{known}"


def _data(run: Run) -> Iterator[tuple[str, str]]:
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
    if size is None:
        return f"a stream, {drawn:,.0f} sequences of it"
    at_limit = ", its limit" if limit is not None and round(drawn) >= limit else ""
    return f"{size:,} sequences, {drawn / size if size else 0:.3g} passes{at_limit}"


def _parts(shares: Sequence[int]) -> list[str]:
    return [f"{share / sum(shares):.3g}" for share in shares]


def _memory(run: Run) -> str:
    parameters = [item.parameter for item in run.parameters]
    weights = sum(p.nbytes for p in parameters) / 1e6
    gradients = sum(p.nbytes for p in parameters if p.requires_grad) / 1e6
    return f"weights {weights:,.0f} MB, gradients {gradients:,.0f} MB, besides optimizer state and activations"


def _room(run: Run, folder: Path) -> str:
    """Whether checkpoints fit on their disk; a `JobError` if there is not even room for the weights of one."""
    size = sum(run.outline.sizes.values()) * next(iter(run.parameters)).parameter.element_size()
    free = shutil.disk_usage(existing_part(folder)).free
    text = f"weights of {size / 1e6:,.0f} MB each, besides optimizer state; {free / 1e9:,.1f} GB free in {folder}"
    if size > free:
        raise JobError.at("checkpoint", f"not one fits: {text}; free space, or name another disk in job.output")
    if 3 * size * (run.job.checkpoint.keep + 1) > free:  # two moments each, as of AdamW, and the next one
        warnings.warn(f"checkpoints may not fit: {text}; free space, or lower checkpoint.keep", stacklevel=2)
    return text


class Recorder:
    """Makes lines of steps and evaluations: for `on_line` on every rank, for the loggers on rank 0."""

    def __init__(self, run: Run, step: int, on_line: Callable[[Mapping[str, Any]], object], stack: ExitStack) -> None:
        self._summaries = run.context.auxiliary.summaries
        train, ranks = run.job.train, run.context.layout.world_size
        self._source_names = source_names(run.job)
        self._loggers: dict[str, Logger] = {}  # by name, for errors
        for key, component in run.job.loggers.items() if global_rank() == 0 else ():
            name = f"loggers.{key} ({run.context.type_of(component)})"
            with named(name):
                self._loggers[name] = run.context.build(component)
                self._loggers[name].start(step)
            stack.push(partial(self._close, name))
        self._on_line = on_line
        self._counts_interval, self._steps = run.job.metrics.counts_interval, train.steps
        self._tracker, self.clock = Tracker(self._deliver), Clock()
        self.flush = self._tracker.flush
        self._flops, self._peak = run.outline.flops, ranks * (peak_flops(run.job, run.context.device) or 0.0)
        self.last_loss: float | None = None
        self.ending = ExitCode.FINISHED, ""  # of a run without an error
        self._seconds, self._in_lines = run.hooks.beacon.seconds, run.hooks.beacon.seconds()
        self.last_evaluation: Mapping[str, float] = {}

    def step(
        self, context: StepContext, fed: int, tokens: int, rate: float, sums: Sums, skipped: Tensor | None
    ) -> None:
        """Queue the line of a step: tokens `fed` in it, `tokens` since the run began, `skipped` on the device."""
        assert context.grad_norm is not None
        scalars = metrics(sums, self._source_names)
        if not self._counts_interval or (context.step % self._counts_interval and context.step < self._steps):
            scalars = {name: value for name, value in scalars.items() if not isinstance(name, Count)}
        scalars.update(self._summaries())
        scalars["grad_norm"] = context.grad_norm
        if skipped is not None:
            scalars["skipped"] = skipped
        seconds, speed = self.clock.tick(fed)
        scalars["data_wait"] = (sums[WAITED] / seconds).clamp(max=1)
        record: dict[str, Any] = {"step": context.step, "lr": rate, "tokens": tokens, "tokens_per_second": speed}
        record |= {"step_seconds": seconds, "time": time.time(), **self._seconds_since_last_line()}
        flops = context.logged.get("flops_per_token", scalars.get("flops_per_token", self._flops))  # else as stated
        used = {"mfu": speed * flops / self._peak} if self._peak and flops is not None else {}
        used |= {"skipped": 1.0} if context.skipped else {}
        for name, value in {**used, **context.logged}.items():  # tensors with the others: to read one now would wait
            (scalars if isinstance(value, Tensor) else record)[name] = value
        self._tracker.put(record, scalars)

    def _seconds_since_last_line(self) -> dict[str, float]:
        """Seconds by phase of this step and of the work before it: an agreement, an evaluation, a save."""
        before, self._in_lines = self._in_lines, self._seconds()
        spent = {phase: round(total - before.get(phase, 0.0), 6) for phase, total in self._in_lines.items()}
        return {f"seconds/{phase.replace(' ', '_')}": taken for phase, taken in spent.items() if taken}

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write an evaluation's line; call `flush` first, so that it follows the lines of earlier steps."""
        self.last_evaluation = metrics
        self._write({"step": step, **metrics})

    def sync(self) -> None:
        """Let loggers put the lines so far where they outlive the machine: the checkpoint that follows needs them."""
        for name, logger in self._loggers.items():
            if isinstance(logger, Flushes):
                with named(name):
                    logger.flush()

    def _deliver(self, record: dict[str, Any]) -> None:
        if not record.get("skipped"):  # the device's flag is in every line, and most steps are not skipped
            record.pop("skipped", None)
        self.last_loss = record["loss"]
        self._on_line(record)
        self._write({"step": record.pop("step"), "loss": record.pop("loss"), **record})

    def artifact(self, path: Path, name: str, step: int) -> None:
        for logger_name, logger in self._loggers.items():
            if isinstance(logger, TakesArtifacts):
                self._call(logger_name, logger.artifact, path, name, step)

    def _write(self, record: Mapping[str, Any]) -> None:
        for name, logger in self._loggers.items():
            self._call(name, logger.log, record)

    def _close(self, name: str, kind: object, error: BaseException | None, traceback: object) -> None:
        logger, failed = self._loggers[name], getattr(error, "exit_code", ExitCode.FAILED)
        with closing(logger):
            if isinstance(logger, LearnsEnd):
                self._call(name, logger.end, *((failed, f"{type(error).__name__}: {error}") if error else self.ending))

    def _call(self, name: str, method: Callable[..., None], *args: Any) -> None:
        try:
            with named(name):
                method(*args)
        except OSError as error:  # a full disk or a closed terminal ends no run
            warnings.warn(f"{name}: {error}", stacklevel=3)


@define
class _Pending:
    """The line of a step whose numbers are on their way to the host."""

    record: dict[str, Any]
    sizes: Mapping[str | Count, int]
    """How many values each name has."""
    values: Tensor
    arrived: Any
    """The event behind the copy; of the CPU's module, one that has always occurred."""

    def line(self) -> dict[str, Any]:
        self.arrived.synchronize()
        line, counts = dict(self.record), dict[str, dict[str, list[float]]]()
        values = iter(self.values.tolist())
        for name, size in self.sizes.items():
            own = [next(values) for _ in range(size)]
            if isinstance(name, Count):
                counts.setdefault(name.name, {})[str(name.row)] = own
            elif own[0] != ABSENT or not name.startswith(SOURCE_LOSS):
                line[name] = own[0]
        return line | ({"counts": counts} if counts else {})


class Tracker:
    """Takes the numbers of each step from the device to `deliver`, as complete records in order, without waiting.

    A step copies one small vector to pinned memory, asynchronously. Its line is delivered once the copy has arrived, at
    most two steps later: reading a number at once would wait for all work queued on the device, which would then idle
    until the host has queued the next step.
    """

    def __init__(self, deliver: Callable[[dict[str, Any]], None]) -> None:
        self._deliver = deliver
        self._pending: deque[_Pending] = deque()

    def put(self, record: Mapping[str, Any], scalars: Mapping[str | Count, Tensor]) -> None:
        """Queue a step's line: `record` on the host, `scalars` and counts on the device."""
        sizes = {name: tensor.numel() for name, tensor in scalars.items()}
        # Tensors on the host (the gradient norm of offloaded parameters) move to the device: else the host waits.
        home = home_of(scalars.values())
        moved = [tensor.detach().to(home, non_blocking=True).reshape(-1) for tensor in scalars.values()]
        on_host = torch.cat(moved).to("cpu", non_blocking=True)  # into pinned memory, which torch allocates
        arrived = torch.get_device_module(home).Event()
        arrived.record()  # after the copy, on the same stream
        self._pending.append(_Pending(dict(record), sizes, on_host, arrived))
        while self._pending and (len(self._pending) > MAX_LAG or self._pending[0].arrived.query()):
            self._deliver(self._pending.popleft().line())

    def flush(self) -> None:
        """Deliver everything, waiting for it."""
        while self._pending:
            self._deliver(self._pending.popleft().line())


def peak_memory(device: torch.device) -> dict[str, float]:
    """GB at most of this rank: of a GPU allocated and reserved, since the last call; of a CPU resident, since ever."""
    if device.type == "cpu":
        return {"peak_memory_gb": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9}  # stated in kB
    # Once, and not by `max_memory_…`: each call builds the whole table.
    stats = query_device(device, "memory_stats") or {}
    query_device(device, "reset_peak_memory_stats")  # so that the step shows in which it grew
    names = ("peak_memory_gb", "allocated"), ("peak_reserved_gb", "reserved")
    return {name: stats[f"{kind}_bytes.all.peak"] / 1e9 for name, kind in names if stats}


class Clock:
    """Tokens per second over a short window of steps, so that a slow step shows."""

    WINDOW = 10

    def __init__(self) -> None:
        self._tokens = 0
        self.restart()

    def tick(self, tokens: int) -> tuple[float, float]:
        """A step of `tokens` has ended; returns (its seconds, tokens per second over the window)."""
        self._tokens += tokens
        before, now = self._marks[-1][0], time.perf_counter()
        self._marks.append((now, self._tokens))
        start, fed = self._marks[0]
        return now - before, (self._tokens - fed) / max(now - start, 1e-9)

    def restart(self) -> None:
        """Start the window afresh, so that a pause does not count."""
        self._marks = deque([(time.perf_counter(), self._tokens)], maxlen=self.WINDOW + 1)
