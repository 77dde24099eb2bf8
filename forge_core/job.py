"""The job: the core's own tables and one table per kind. `forge-run explain` shows these docstrings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, le, matches_re, min_len, optional

from forge_core.contracts import components
from forge_core.contracts.components import default_type, when_resumed
from forge_core.contracts.layout import Layout

METRICS = "metrics.jsonl"
"""Lines of metrics in the run folder, where the logger `jsonl` has no other `file`."""
RUN_FILES = ("provenance.json", "job.toml", METRICS)
"""Files of every run folder, in the order in which they are written: a folder with the first is a run's."""
LOCAL_STORAGE = "forge-run/local"  # type of the core's storage in a resolved job
WORKER_LOADER = "nodes"  # type of the loader that `data.workers` needs where the job names none; the core has none
SAFE, FLAG = when_resumed("safe"), when_resumed("flag")
"""Meaning of a changed key for a run that continues; a key without either is as its section. Micro-batches are layout:
the loss is normalised over the global batch, so that the curve does not depend on them."""


@frozen(kw_only=True)
class JobSection:
    """`[job]`: what the run is called, where it goes, and the seed everything random derives from."""

    name: str = field(default="run", validator=matches_re(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"), metadata=SAFE)
    """Name of the run, and of its folder. At most 200 letters, digits, `.`, `_` and `-`."""
    output: components.FilePath = field(default="runs", metadata=SAFE)
    """Folder that holds run folders; the run's own is `{output}/{name}`. `~` is the home folder."""
    seed: int = field(default=42, validator=ge(0))
    """Initial weights, data order and dropout derive from it."""


@frozen(kw_only=True)
class TrainSection:
    """`[train]`: length, batch and numerics of the training."""

    steps: int = field(validator=[gt(0), le(1 << 53)], metadata=SAFE)  # schedules compute in float64
    """Optimizer steps of the whole run. Schedules and phases go by it. Where a later file or an override shortens the
    run, a warm-up, decay or phase of an earlier file that no longer fits is clipped or left out, with a warning."""
    stop_after: int = field(default=0, validator=ge(0), metadata=SAFE)
    """End the run after this step, saved, and leave schedules and phases as `steps` has them; 0: after `steps`. Without
    this key the same job continues."""
    global_batch_size: int = field(validator=[gt(0), le(1 << 53)])
    """Sequences per optimizer step, whatever the layout; with `batch_schedule` the most of any step."""
    batch_schedule: components.BatchScheduleComponent | None = None
    """`[train.batch_schedule]`: sizes of the global batch over the run; by default all are `global_batch_size`."""
    micro_batch_size: int = field(default=0, validator=ge(0), metadata=SAFE)
    """Sequences per forward pass on one data-parallel rank; 0: as many as fall to the rank, in one pass."""
    seq_len: int = field(validator=gt(0))
    """Tokens per sequence."""
    grad_clip_norm: float = field(default=1.0, validator=ge(0))
    """Largest global norm of the gradient; it is scaled down to this. 0 turns clipping off."""
    precision: Literal["bf16", "fp32", "fp64"] = "fp32"
    """Compute dtype. With bf16, master weights, losses, reductions and norms stay float32. fp64 is for comparisons."""
    float32_matmul: Literal["highest", "high", "medium"] = field(default="highest", metadata=SAFE)
    """Precision of float32 matrix products inside (torch's `set_float32_matmul_precision`)."""
    device: str = field(default="auto", metadata=SAFE)
    """Device type: `cpu`, `cuda`, `xpu`, `mps`, or a type that a vendor's package registers with torch. `auto`: the
    available accelerator, or the CPU."""
    non_finite: Literal["skip", "stop", "ignore"] = field(default="skip", metadata=SAFE)
    """When loss or gradients are not finite: skip the update, stop the run, or ignore it and update all the same: then
    clipping by an infinite norm makes gradients 0, and NaN where they are infinite, as torch's does."""
    non_finite_limit: int = field(default=10, validator=gt(0), metadata=SAFE)
    """With `skip`: skipped updates in a row that stop the run (exit code 76). A run that ends with a skipped update, or
    with an evaluation that is not finite, exits with 76 too."""
    dry_run: Literal["auto", "always", "never"] = field(default="auto", metadata=SAFE)
    """Before training, one forward and backward of the largest shapes, which leaves no trace, to find errors and the
    peak of memory early. auto: on an accelerator only."""
    deterministic: bool = field(default=False, metadata=SAFE)
    """Refuse algorithms that are not deterministic (torch's `use_deterministic_algorithms`)."""
    gc_interval: int = field(default=100, validator=ge(0), metadata=SAFE)
    """Steps between garbage collections, which are off otherwise; 0 leaves Python's own collector on."""

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return min(self.steps, self.stop_after or self.steps)

    @property
    def batch_sizes(self) -> Mapping[int, int]:
        """Sequences per step by the number of the sample from which on it holds."""
        return self.batch_schedule.sizes(self) if self.batch_schedule else {0: self.global_batch_size}

    def batch_size(self, step: int) -> int:
        """Sequences of a step, numbered from 1."""
        return self.sample_after(step) - self.sample_after(step - 1)

    def sample_after(self, steps: int, sample: int = 0) -> int:
        """The sample that is next after `steps` steps, of which the first begins with `sample`.

        Of negative steps: as if the steps before it had its size.
        """
        for count, first, size in self._stretches(sample):
            sample = first + min(steps, count) * size
            if steps <= count:
                break
            steps -= count
        return sample

    def steps_until(self, end: int, sample: int = 0) -> int:
        """Steps from the one that begins with `sample` to the first that begins with sample `end` or a later one."""
        passed = 0
        for count, first, size in self._stretches(sample):
            steps = -((first - end) // size)
            if steps <= count:
                return passed + steps
            passed += count
        return passed

    def _stretches(self, sample: int) -> Iterator[tuple[int, int, int]]:
        """Steps in a row of one size from `sample` on: their number (of the last, without end), first sample, size."""
        for (_, size), (end, _) in pairwise([*sorted(self.batch_sizes.items()), (1 << 62, 0)]):
            if sample < end and size > 0:  # a check reports other sizes
                steps = -((sample - end) // size)  # rounded up: a step that begins before `end` has this size
                yield steps, sample, size
                sample += steps * size


@frozen(kw_only=True)
class Phase:
    """`[[data.phases]]`: other weights of the sources, and a factor on the learning rate, from some step on.

    A phase lasts until the next begins. Every source continues where it was: it neither repeats nor skips sequences.
    """

    start_step: int | None = field(default=None, validator=optional(ge(0)))
    """Completed steps after which the phase begins. Give this or `start_tokens`."""
    start_tokens: int | None = field(default=None, validator=optional(ge(0)))
    """Positions fed after which the phase begins, with the first step that starts at or after them."""
    weights: Mapping[str, float] = field(factory=dict)
    """Weights by name of the source. A source that is not named keeps the weight it had; 0 means never from here on."""
    lr_factor: float = field(default=1.0, validator=gt(0))
    """Factor on the learning rate during this phase: the rate is base x schedule x this."""


@frozen(kw_only=True)
class DataSection:
    """`[data]`: the sources of training sequences and how they are loaded."""

    sources: tuple[components.DatasetComponent, ...]
    """`[[data.sources]]`: one table a source, mixed by `weight`."""
    temperature: float = field(default=1.0, validator=gt(0))
    """Shares are proportional to weight ** (1 / temperature): above 1 more equal than the weights. 0 stays 0."""
    phases: tuple[Phase, ...] = ()
    """`[[data.phases]]`: one table a phase, in the order in which they begin."""
    tokenizer: components.TokenizerComponent | None = None
    """`[data.tokenizer]`: needed by sources of text."""
    packing: components.PackingComponent = default_type("forge-run/concatenate")
    """`[data.packing]`: how documents become sequences; by default they follow each other without a border."""
    workers: int = field(default=0, validator=[ge(0), le(1024)], metadata=SAFE)
    """Processes that load data, for sources that decode or tokenise; 0 loads in a background thread."""
    loader: components.LoaderComponent | None = None
    """`[data.loader]`: reads samples ahead; by default `plain`, one thread, and with `workers` the installed loader
    `nodes`. No loader changes a sample."""
    seed: int | None = None
    """Seed of the data order; by default `job.seed`."""


@frozen(kw_only=True)
class Retention:
    """The checkpoints to keep, by keys of `[checkpoint]`: a checkpoint is kept if any of these keys selects it."""

    early_steps: int = field(default=0, validator=ge(0))
    """Up to this step, also save at the powers of two (1, 2, 4, …), and keep those forever."""
    at_start: bool = False
    """Also save before the first step, as step 0, and keep it forever."""
    keep: int = field(default=0, validator=ge(0))
    """Number of the newest checkpoints to keep; 0 keeps all."""
    keep_every: int = field(default=0, validator=ge(0))
    """Keep checkpoints at multiples of this step forever; 0: none."""
    keep_best: int = field(default=0, validator=ge(0))
    """Number of the best checkpoints to keep, by `best_metric`; needs `eval.interval`."""
    best_metric: str = field(default="eval/loss", validator=min_len(1))
    """Evaluation metric that determines which checkpoints are best: lower is better. The newest evaluation at or
    before a checkpoint counts, and only for the first checkpoint after it."""

    def to_delete(self, steps: Sequence[int], metrics: Mapping[int, float]) -> list[int]:
        """The steps of checkpoints that no key keeps, ascending; in `metrics`, by step, lower values are better."""
        staying = {step for step in steps if self.keeps_forever(step)}
        staying |= set(sorted(steps)[-self.keep :])  # all of them if `keep` is 0
        best = sorted((metrics[step], step) for step in steps if step in metrics)
        staying |= {step for _, step in best[: self.keep_best]}
        return sorted(set(steps) - staying)

    def keeps_forever(self, step: int) -> bool:
        """Whether a checkpoint of this step is never deleted, whatever comes later."""
        every = bool(self.keep_every) and step > 0 and step % self.keep_every == 0
        return every or self.is_early(step) or (self.at_start and step == 0)

    def is_early(self, step: int) -> bool:
        """Whether the step is in the dense window at the start: a power of two."""
        return 0 < step <= self.early_steps and step & (step - 1) == 0


@frozen(kw_only=True)
class CheckpointSection(Retention):
    """`[checkpoint]`: when states are saved, always after the last step and a requested stop, and which are kept."""

    interval: int = field(default=1000, validator=ge(0))
    """Steps between checkpoints; 0: only at the end, and by `interval_minutes`."""
    interval_minutes: float = field(default=30.0, validator=ge(0))
    """Save too when this many minutes have passed since the last checkpoint; 0: never by time."""
    keep: int = field(default=3, validator=ge(0))
    """Number of the newest checkpoints to keep; 0 keeps all."""
    async_save: bool = False
    """Copy the state to host memory and write it while training continues. Takes as much host memory as the state."""
    on_failure: Literal["stop", "continue"] = "stop"
    """When a save fails (for example because the disk is full): end the run, or warn, continue, and try again at the
    next save. The last save of a run must succeed either way."""
    verify: Literal["full", "sizes"] = "full"
    """Check before loading: SHA-256 of every file, or sizes only, which does not find flipped bytes."""
    storage: components.StorageComponent = default_type(LOCAL_STORAGE)
    """`[checkpoint.storage]`: where checkpoints are kept."""
    load: components.LoadComponent | tuple[components.LoadComponent, ...] | None = None
    """`[checkpoint.load]`: weights of another run to start from; by default training starts from random ones. Several
    tables, `[[checkpoint.load]]`, take parts of the model from several places, each part from one of them."""

    @property
    def loads(self) -> Mapping[str, components.LoadComponent]:
        """Each table of `load` by its path in the job."""
        if isinstance(self.load, tuple):
            return {f"checkpoint.load.{number}": table for number, table in enumerate(self.load)}
        return {"checkpoint.load": self.load} if self.load else {}


@frozen(kw_only=True)
class EvalSection:
    """`[eval]`: when the evaluations under `[evaluations.NAME]` run. They always run after the last step."""

    interval: int = field(default=0, validator=ge(0))
    """Steps between evaluations; 0: only at the end."""
    at_start: bool = False
    """Also before the first step."""


@frozen(kw_only=True)
class MetricsSection:
    """`[metrics]`: what the run measures of itself."""

    peak_tflops: float = field(default=0.0, validator=ge(0))
    """Peak TFLOP/s of one device for the model-FLOPs utilisation; 0: from the core's table, no MFU where unknown."""
    counts_interval: int = field(default=10, validator=ge(0))
    """Steps between the lines that contain counts of modules, such as the tokens of each expert; the last step's line
    has them too; 0: never. With them, a line of a model with 58 layers of 256 experts has 120 kB."""


@frozen(kw_only=True)
class LaunchSection:
    """`[launch]`: how long the ranks of a run wait for each other. It matters to runs of several ranks only."""

    start_timeout_s: float = field(default=600.0, validator=gt(0))
    """Seconds that ranks wait at the start for those that have not come."""
    hang_timeout_s: float = field(default=1800.0, validator=ge(0))
    """When a rank is in one phase of the engine (data, forward and backward, a save …) for more seconds than this, the
    run ends, and names the late rank and its phase. Take more than the longest phase, with compilation. 0: never."""
    hang_factor: float = field(default=10.0, validator=ge(0))
    """The same after this many times the longest such phase of the run so far, but at least 30 s, where ranks only
    compute or wait for each other; from the fifth such phase on. 0: after `hang_timeout_s` only."""
    silence_timeout_s: float = field(default=15.0, validator=ge(0))
    """When the process of a rank sends no heartbeat for more seconds than this, because it is stopped or its machine
    or network has gone, the run ends, and names it. Before the first step: 10 times as long. 0: `hang_timeout_s`."""
    grace_s: float = field(default=600.0, validator=ge(0))
    """With `--nproc`: seconds from a request to stop until ranks that have not saved and ended are killed. 0: never."""


@frozen(eq=False)
class Checked:
    """Record that a job passed every check, and under which circumstances."""

    world_size: int
    layout: Layout
    catalog: Any
    """The `Catalog`, a class of a higher floor."""


@frozen(kw_only=True)
class Job:
    """A whole job. `forge_core.load_job` makes one from TOML; `forge_core.dump_job` writes it back."""

    job: JobSection = field(default=JobSection(), metadata=FLAG)
    """`[job]`: what the run is called, where it goes, its seed."""
    train: TrainSection = field(metadata=FLAG)
    """`[train]`: length, batch and numerics."""
    model: components.ModelComponent
    """`[model]`: the network; `type` is required."""
    data: DataSection = field(metadata=FLAG)
    """`[data]`: what to train on."""
    optimizer: components.OptimizerComponent
    """`[optimizer]`: how weights are updated; `type` is required."""
    scheduler: components.SchedulerComponent = default_type("forge-run/constant")
    """`[scheduler]`: what multiplies the learning rate, step by step; by default nothing does."""
    loss: components.LossComponent = default_type("forge-run/cross_entropy")
    """`[loss]`: the objective; by default the plain cross-entropy."""
    executor: components.ExecutorComponent = default_type("forge-run/plain")
    """`[executor]`: how a step's micro-batches are run; left out where a stage, such as a pipeline, brings its own."""
    checkpoint: CheckpointSection = field(default=CheckpointSection(), metadata=SAFE)
    """`[checkpoint]`: when and where states are saved."""
    eval: EvalSection = field(default=EvalSection(), metadata=SAFE)
    """`[eval]`: when evaluations run."""
    metrics: MetricsSection = field(default=MetricsSection(), metadata=SAFE)
    """`[metrics]`: what the run measures of itself."""
    launch: LaunchSection = field(default=LaunchSection(), metadata=SAFE)
    """`[launch]`: how long ranks wait for each other."""
    parallel: Mapping[str, components.ParallelComponent] = field(factory=dict)
    """`[parallel.NAME]`: stages; NAME is the default for `type`. Their order follows from their relations."""
    evaluations: Mapping[str, components.EvaluationComponent] = field(factory=dict)
    """`[evaluations.NAME]`; by default `held_out`: loss and perplexity of the held-out sequences."""
    loggers: Mapping[str, components.LoggerComponent] = field(factory=dict)
    """`[loggers.NAME]`; `console` and `jsonl` are always there."""
    hooks: Mapping[str, components.TrainingHook] = field(factory=dict)
    """`[hooks.NAME]`: training hooks, in the order of the file."""
    plugins: Mapping[str, components.Plugin] = field(factory=dict)
    """`[plugins.NAME]`: plugins whose hooks act in this run, in the order of the file."""
    # Not a key. A job that `attrs.evolve` derives from a checked one starts without it, so it is checked again.
    checked: Checked | None = field(init=False, default=None, eq=False, repr=False)

    def layout_for(self, world_size: int) -> Layout | None:
        """The layout with which the job was checked; None if it was not checked for this many ranks."""
        return self.checked.layout if self.checked and self.checked.world_size == world_size else None


ALWAYS: Mapping[str, tuple[str, ...]] = {"evaluations": ("held_out",), "loggers": ("console", "jsonl")}
"""The core's own entries of named tables, which a job without them has too."""
