"""Base classes of the core's kinds of component.

A component is a frozen, keyword-only attrs class that *is* the typed configuration and can `build` the object that it
configures. The modules `model`, `data`, `optimizer` and `runtime` of this package describe what `build` must return.
"""

# Neither this module nor one of a component imports torch: `build` does, so that a job file is checked on a login node
# in a fraction of a second.
from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from attrs import Attribute, define, field, fields, frozen, has
from attrs.validators import ge, matches_re, min_len, optional

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.layout import Layout, MeshDimension

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.contracts.contexts import (
        BuildContext,
        CheckpointContext,
        Evaluation,
        EvaluationContext,
        StepContext,
        TrainContext,
    )
    from forge_core.contracts.data import (
        BatchField,
        Dataset,
        DataSource,
        Documents,
        LoadedRows,
        SampleReader,
        SampleRow,
        Tokenizer,
    )
    from forge_core.contracts.model import Model, Outline
    from forge_core.contracts.optimizer import NamedParameters, Schedule
    from forge_core.contracts.runtime import Executor, Logger, LossFunction, ParallelStage, Storage
    from forge_core.job import Job, TrainSection


@frozen
class DefaultType:
    """A default that names a component by type, looked up only when the job leaves the table out."""

    type: str


def default_type(type_: str) -> Any:
    """Attrs field whose default is the installed component `type_`, imported only if the job leaves the table out."""
    return field(default=DefaultType(type_))


WhenResumed = Literal["safe", "flag", "impossible"]
"""Effect of a changed key on a continued run. `safe`: it applies at once. `flag`: it makes another run of it, which the
user must allow by `--resume-with-changes`. `impossible`: the saved state does not fit."""


def when_resumed(change: WhenResumed) -> dict[str, WhenResumed]:
    """Metadata of a field whose change affects a continued run differently from `Component.resumes_as`."""
    return {"when_resumed": change}


class AnyFloat(float):
    """Type of a key that may be `inf`, `-inf` or `nan`: a job refuses these in every other `float`."""


if TYPE_CHECKING:
    FilePath = str
else:

    class FilePath(str):
        """Type of a key that is a path, or may be one: a string in which a leading `~` is the home folder.

        Relative paths start in the working directory. A key of type `pathlib.Path` is read in the same way.
        """


Built = TypeVar("Built")


class Component(Generic[Built]):
    """Base of all components. The base of a new kind sets `kind`; `Built` is the type of what its `build` returns."""

    kind: ClassVar[str]
    resumes_as: ClassVar[WhenResumed | None] = None
    """Effect of a changed key, or of adding or removing the component. None: as for the component around it."""
    type_resumes_as: ClassVar[WhenResumed | None] = None
    """Effect of another type in this component's table, where that is more serious than a changed key."""
    usual_type: ClassVar[str | None] = None
    """Type of a table of this kind that names none, whatever the default of its field; None: it must name one."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Mistakes that only show across fields or sections; paths are relative to this component's table."""
        return ()

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Choices of this component by measurement, printed in the summary: (subject, choice, reason)."""
        return ()

    def waits(self) -> str:
        """The host's waits for the device because of it, for the summary: how many, when, and why."""
        return ""

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Hooks that this component needs in the run loop, in order."""
        return ()


class Unavailable(Component[Any]):
    """Stands in, by the defaults of its kind's base, for a component that cannot be read and that nobody needs now."""

    table: ClassVar[Mapping[str, Any]]
    error: ClassVar[JobError]
    """Why its `table` cannot be read, with paths relative to that."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        return self.error.problems

    def build(self, context: BuildContext, **inputs: Any) -> Any:
        """Raises `error`: the component is needed after all."""
        raise self.error


@frozen(kw_only=True)
class ModelComponent(Component["Model"]):
    """Builds the network, on the meta device; memory and initial values come later from the engine."""

    kind = "model"
    resumes_as = "impossible"
    built_to_check: ClassVar[bool] = False
    """Whether building the model shows mistakes that `problems` cannot, so that a check of the job builds it."""

    def batch_fields(self, job: Job) -> Mapping[str, BatchField]:
        """Batch entries that the model takes in addition to tokens, by name. A row without an entry has zeros."""
        # Of the component, not of the module: workers, the plan and every rank of a pipeline know them without a model.
        return {}

    def build(self, context: BuildContext) -> Model:
        """Build all layers, whatever the layout: stages divide them later."""
        raise NotImplementedError


@frozen(kw_only=True)
class ParameterGroup:
    """`[[optimizer.groups]]`: other settings for parameters. The first table whose pattern matches a name applies."""

    match: str = field(validator=min_len(1))
    """Shell-style glob over parameter names (`layers.*.ffn.*`); `*` also matches dots."""
    lr: float | None = field(default=None, validator=optional(ge(0)))
    """Base learning rate of these parameters; the schedule multiplies it."""
    weight_decay: float | None = field(default=None, validator=optional(ge(0)))
    """Weight decay of these parameters."""
    settings: Mapping[str, float] = field(factory=dict)
    """Other numbers that the optimizer keeps for each group, by its own names (`eps`, `momentum`)."""

    def values(self) -> dict[str, float]:
        """Everything that the table sets, by the optimizer's names."""
        named = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {name: value for name, value in named.items() if value is not None} | dict(self.settings)


@frozen(kw_only=True)
class RouterComponent(Component["nn.Module"]):
    """Builds the module that assigns tokens to experts.

    It maps `(x (B, S, D), batch)` to the weights, float32 or wider, and the numbers of K experts for each token, both
    (B, S, K). -1 means no expert, and needs an attribute `leaves_out = True`. Its attribute `experts_per_token` is
    their mean number. Losses attach to the weights (`context.auxiliary.attach`).
    """

    kind = "router"

    def expert_problems(self, experts: int) -> Iterable[Problem]:
        """Mistakes that show once the number of experts is known; paths as for `problems`."""
        return ()

    def build(self, context: BuildContext, dim: int, experts: int) -> nn.Module:
        """Build the router of layer `context.layer`, for tokens of width `dim` and a number of routed `experts`."""
        raise NotImplementedError


@frozen(kw_only=True)
class OptimizerComponent(Component["torch.optim.Optimizer"]):
    """Builds a `torch.optim.Optimizer`.

    Every parameter group has `names`, the names of its parameters in their order (`NamedParameters.groups` sets them).
    Before each step the engine multiplies its base `lr` by the schedule, and writes each field that holds a
    `SchedulerComponent` to the key of that name. The optimizer's attribute `group_state` lists the keys of its internal
    counters. It may implement `HasEvaluationWeights` and `PlacesState` of `forge_core.contracts.optimizer`.
    """

    kind = "optimizer"
    resumes_as = "flag"
    type_resumes_as = "impossible"  # the state of one optimizer is of no use to another

    has_evaluation_weights: ClassVar[bool] = False
    """Whether what it builds implements `HasEvaluationWeights`; known before it is built, when the job is checked."""
    further_roles: ClassVar[Sequence[str] | None] = None
    """Parameter roles supported in addition to the usual ones: a model with another role is refused. None: any role."""
    groups: tuple[ParameterGroup, ...] = ()
    """Other settings for some parameters, by pattern of their names."""

    @property
    def parameter_dtype(self) -> Literal["fp32", "bf16"]:
        """Dtype of parameters between steps; `fp32` is float64 with `train.precision = "fp64"`."""
        # bf16 is for an optimizer whose small updates are not lost in it, as by stochastic rounding. Only it can know
        # that, so it is no key of `[train]`. Gradients accumulate in float32 all the same.
        return "fp32"

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        """Why `model` cannot be optimized under this layout; as `ParallelComponent.model_problems`."""
        return ()

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Build it over this rank's `parameters`, after all stages have been applied to the model."""
        raise NotImplementedError


@frozen(kw_only=True)
class SchedulerComponent(Component["Schedule"]):
    """Builds a pure function (step, total steps) -> factor. Step 0 is the first update."""

    kind = "scheduler"
    resumes_as = "flag"

    def build(self, context: BuildContext) -> Schedule:
        """Returns the function. It has no state: a run that resumes calls it from a later step on."""
        raise NotImplementedError


@frozen(kw_only=True)
class BatchScheduleComponent(Component[Any]):
    """Sizes of the global batch over the run: `[train.batch_schedule]`."""

    kind = "batch_schedule"
    resumes_as = "flag"

    def sizes(self, train: TrainSection) -> Mapping[int, int]:
        """Sequences per step by the number of the sample from which on it holds, 0 among them.

        A step has the size that holds for its first sample, so a run that resumes takes the same ones.
        """
        raise NotImplementedError


@frozen(kw_only=True)
class LossComponent(Component["LossFunction"]):
    """Builds a function (head, hidden, batch) -> `LossOutput`."""

    kind = "loss"
    resumes_as = "flag"
    is_cross_entropy: ClassVar[bool] = True
    """Whether what it reports of held-out sequences is in nats per token, so that they have a perplexity."""
    predicts_next_token: ClassVar[bool] = True
    """Whether a label is the next token, which no position may see; false for masked tokens, or rewards of answers."""

    def build(self, context: BuildContext) -> LossFunction:
        """Returns the function, which is called for each micro-batch, in evaluations too."""
        raise NotImplementedError


@frozen(kw_only=True)
class DatasetComponent(Component["DataSource"]):
    """One source of training sequences: an entry of `[[data.sources]]`."""

    kind = "dataset"
    resumes_as = "flag"

    name: str | None = field(default=None, validator=optional(matches_re(r"[A-Za-z0-9][A-Za-z0-9._-]*")))
    """Name in phases, metrics and checkpoints, which seeds the order of its sequences; by default its number."""
    weight: float = field(default=1.0, validator=ge(0))
    """Share of the training sequences that come from this source, relative to the other sources; 0 means never."""
    max_epochs: float = field(default=0.0, validator=ge(0))
    """Passes over the source after which it is left out, and the others share its part; 0 is no limit."""

    def documents(self) -> Iterable[str]:
        """Texts of the training split, for tokenizers that are trained on the corpus. Empty if it has no text."""
        return ()

    def build(self, context: BuildContext) -> DataSource:
        """Tokenised documents, of which `[data.packing]` makes sequences; or finished sequences."""
        raise NotImplementedError


@frozen(kw_only=True)
class PackingComponent(Component["Dataset"]):
    """Makes training sequences of the documents of the sources: `[data.packing]`."""

    kind = "packing"
    resumes_as = "flag"
    needs_boundaries: ClassVar[bool] = True
    """Whether it must know where documents end."""
    isolates: ClassVar[bool] = False
    """Whether its sequences have `document_ids`, so that documents in them are learned apart."""
    accepts_sequences: ClassVar[bool] = False
    """Whether sources of finished sequences are allowed beside it; they are left as they are."""

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        """Why `model` cannot learn from such sequences; as `ParallelComponent.model_problems`."""
        return ()

    def build(self, context: BuildContext, documents: Documents) -> Dataset:
        """The sequences of the documents; its `held_out` has the sequences of `documents.held_out`."""
        raise NotImplementedError


@frozen(kw_only=True)
class LoaderComponent(Component["Generator[LoadedRows]"]):
    """Reads the samples of a run ahead of the training: `[data.loader]`."""

    kind = "loader"
    resumes_as = "safe"  # the core has drawn the order, which no loader may change: another one continues a run

    def build(
        self, context: BuildContext, reader: SampleReader, units: Iterator[Sequence[SampleRow]], units_per_step: int
    ) -> Generator[LoadedRows]:
        """Start to read, with `context.job.data.workers` workers.

        Args:
            context: the run.
            reader: reads a unit, the rows that this rank reads at once.
            units: to the end of the run or longer; iterate it in one thread.
            units_per_step: with `reader.has_lanes`, units whose numbers are equal modulo this hold the same lanes: one
                copy of the reader must read them, in order.

        Returns:
            A generator of the rows in the order of `units`, pinned if the run's device is a GPU. It raises the
            `DataError` of a unit in its turn; `close()` ends all threads and processes.
        """
        raise NotImplementedError


@frozen(kw_only=True)
class TokenizerComponent(Component["Tokenizer"]):
    """Text to token ids and back."""

    kind = "tokenizer"
    resumes_as = "impossible"

    def build(self, context: BuildContext, documents: Callable[[], Iterable[str]]) -> Tokenizer:
        """Build the tokenizer; `documents()` returns the training texts of all sources, from the start."""
        raise NotImplementedError

    def load(self, context: BuildContext, folder: Path) -> Tokenizer:
        """The tokenizer that `Tokenizer.save(folder)` wrote: a continued run or `generate` uses it unchanged."""
        raise NotImplementedError

    def expected_vocab_size(self) -> int | None:
        """`vocab_size`, if known before any document is read, so that a model of that size is checked with the job."""
        return None


def positive_or_auto(_: object, attribute: Attribute, value: int | str) -> None:
    """Validator of a degree: at least 1, or `"auto"`."""
    if value != "auto" and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{attribute.name!r} must be at least 1 or 'auto', got {value!r}")


@frozen(kw_only=True)
class ParallelComponent(Component["ParallelStage"]):
    """A stage: transforms the model on the meta device (compile, tensor parallel, FSDP, …).

    `after` and `before` map the type of another stage, if the job has it, to the reason for that order.
    """

    kind = "parallel"
    resumes_as = "safe"
    after: ClassVar[Mapping[str, str]] = {}
    before: ClassVar[Mapping[str, str]] = {}
    owns_reduction: ClassVar[bool] = False
    """Whether this stage reduces gradients over the token dimensions. At most one stage of a job may."""
    drops_parameters: ClassVar[bool] = False
    """Whether it leaves each rank only some of the model's layers. Names of parameters stay the same all the same."""
    dimensions: ClassVar[Sequence[MeshDimension]] = ()
    """Mesh dimensions that this stage adds to the usual ones (`forge_core.contracts.layout.DIMENSIONS`)."""

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart, so that parameters must not change until the step ends."""
        return False

    @property
    def waits_in_blocks(self) -> str:
        """Why blocks wait for a number on the host with this stage, which breaks their graph; empty: they do not."""
        return ""

    @property
    def brings_executor(self) -> bool:
        """Whether its stage runs the micro-batches itself (`executor`), so that no other can be asked for."""
        return False

    def micro_batches_alive(self, count: int) -> float:
        """Upper bound on the micro-batches of a step whose activations a rank holds at once; a fraction for layers."""
        return 1.0

    def degrees(self) -> Mapping[str, int | str]:
        """Mesh dimensions that this stage requires, with their sizes, or `"auto"` for the remaining ranks."""
        return {}

    def divided_axes(self) -> Mapping[str, Collection[str]]:
        """The axes of activations that ranks divide, by mesh dimension; for a dimension left out, they are unknown.

        Of `heads`, `hidden` (features), and `rest` (positions between blocks), the ranks in order have equal parts. Of
        `positions`, each rank has those given by the entry `places` (B, s) that `split` adds. Without any axis, all
        ranks have equal values.
        """
        return {}

    def part_of_batch(self) -> tuple[int, int]:
        """(number, count) of this run among runs that train one model, each on its rows of every global batch."""
        return 0, 1

    def model_problems(self, model: Model, layout: Layout) -> Iterable[Problem]:
        """Why this stage cannot be applied to `model`, whole, on the meta device, and unchanged by any stage."""
        # Called when a job is checked too, without a process group.
        return ()

    def build(self, context: BuildContext) -> ParallelStage:
        raise NotImplementedError


@frozen(kw_only=True)
class ExecutorComponent(Component["Executor"]):
    """Runs the micro-batches of a step, each within what stages put around it (`forge_core.parallel.stages.around`)."""

    kind = "executor"
    resumes_as = "safe"

    def build(
        self, context: BuildContext, model: Model, loss: LossFunction, stages: Sequence[ParallelStage]
    ) -> Executor:
        """Build it for `model`, to which `stages` have been applied, in their order."""
        raise NotImplementedError


@frozen(kw_only=True)
class Command(Component):
    """A subcommand of `forge-run`: a plain function, which an entry point of the group `forge.command` names.

    `forge-run` shows the first line of its docstring as help, read from the source: the module is imported only when
    the command is called. `forge_core.cli.command_line.parse_job_arguments` is for commands that take a job.

    `forge-run --help` lists the command below the heading that a module constant `HEADING` names (the usual ones are
    `forge_core.cli.HEADINGS`), without one below "more". An entry point whose key has two words, such as
    `"inside gradients"`, makes it one command of the group `inside`.

    A command that is of use to Python too has a function `of_model(model, …)` beside it, in the same module: as a
    method of trained models (`load_model(run).generate("…")`), it is called with the `TrainedModel` first.
    """

    kind = "command"

    def __call__(self, argv: list[str]) -> int:
        """Run with the arguments after the name. Returns the exit code, or raises a `ForgeError` that the user sees."""
        raise NotImplementedError


@frozen(kw_only=True)
class Environment(Component):
    """Variables of a launcher that starts each rank, other than torchrun's. No job names one: all processes ask all."""

    kind = "environment"
    OWN_DEVICES: ClassVar[str] = "FORGE_OWN_DEVICES"
    """Variable that `rank` may add where each rank of a machine is shown devices that others are not."""

    def rank(self, variables: Mapping[str, str]) -> Mapping[str, str]:
        """`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`; empty: no rank."""
        raise NotImplementedError

    def warning(self, variables: Mapping[str, str]) -> str:
        """Why a process that trains alone may be a mistake here, such as idle ranks; empty: it is none."""
        return ""


@frozen(kw_only=True)
class EvaluationComponent(Component["Evaluation"]):
    """Measures the model during training; an entry of `[evaluations.NAME]`."""

    kind = "evaluation"
    resumes_as = "safe"

    def build(self, context: BuildContext) -> Evaluation:
        """What measures: `evaluate`, unless the evaluation keeps something between its calls. Called once a run.

        The model comes later. Read files here: mistakes in them then show before training.
        """
        return self.evaluate

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        """Metrics, keyed as they are logged (`eval/loss`). Called on every rank, with the model in evaluation mode."""
        raise NotImplementedError


@frozen(kw_only=True)
class StorageComponent(Component["Storage"]):
    """Where checkpoints live and how one becomes visible at once."""

    kind = "storage"
    resumes_as = "safe"

    def build(self, context: BuildContext) -> Storage:
        raise NotImplementedError


@frozen(kw_only=True)
class LoadComponent(Component):
    """Gives a new run weights from elsewhere: a table of `[checkpoint.load]`. A run that continues does without."""

    kind = "load"
    resumes_as = "safe"
    usual_type = "forge-plugin-checkpoints/parts"

    def find(self, job: Job) -> Any:
        """Find and verify what `load` will read, which receives the result. Called before data and model are built."""
        raise NotImplementedError

    def load(
        self, found: Any, table: str, context: BuildContext, model: Model, outline: Outline
    ) -> tuple[Collection[str], Iterable[str]]:
        """Fill parameters and buffers of `model`, to which all stages have been applied. Collective.

        Returns the names, in the whole model, of all that some rank has filled, and lines for the user. `table` is the
        path of this component's table, for errors.
        """
        raise NotImplementedError

    def names(self) -> Collection[str]:
        """Names of parameters and buffers that it fills where the model has them."""
        return ()


@frozen(kw_only=True)
class LoggerComponent(Component["Logger"]):
    """Receives the metrics, on rank 0."""

    kind = "logger"
    resumes_as = "safe"
    file = ""
    """Path of the file that it writes, relative to the run folder, usually a key; empty: none."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """The file must be in the run folder, as others are the user's, and no other logger may have it."""
        is_shared = bool(self.file) and sum(logger.file == self.file for logger in job.loggers.values()) > 1
        if is_shared or self.file.startswith(("/", "~")) or ".." in self.file.split("/"):
            yield Problem("file", f"{self.file!r}: must be in the run folder, and the file of no other logger")

    def build(self, context: BuildContext) -> Logger:
        """Called on rank 0 only. Files are opened by `Logger.start`, which receives the step."""
        raise NotImplementedError


class _WithState:
    """A component that is the running object itself, and whose state is saved."""

    rolls_back: ClassVar[bool] = True
    """Whether its state goes back with weights and optimizer in a roll-back (`StepContext.request_rollback`)."""

    def state_dict(self) -> dict[str, Any]:
        """State to save: by default the `field(init=False)` fields."""
        return {f.name: getattr(self, f.name) for f in state_fields(type(self))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)


@define(kw_only=True, slots=False)
class TrainingHook(Component, _WithState):
    """Takes part in the run loop. The class is the running object: there is no `build`.

    Fields with `init=False` are state and travel with checkpoints, so they hold plain values (numbers, strings, lists,
    dicts) or tensors. Hooks run on every rank, in the printed order.
    """

    kind = "hook"
    resumes_as: ClassVar[WhenResumed | None] = "flag"
    may_skip: ClassVar[bool] = False
    """Whether it may ask to skip an update, which costs one wait on the device a step."""

    def on_train_begin(self, context: TrainContext) -> None:
        """Everything is built and, if the run continues, restored; no step of this process has run."""

    def on_step_begin(self, context: StepContext) -> None:
        """Before the micro-batches of a step."""

    def on_gradients(self, context: StepContext) -> None:
        """The gradients of the whole step are complete on every rank, their norm is known, and nothing is clipped."""

    def on_step_end(self, context: StepContext) -> None:
        """After the update, or after it was skipped."""

    def on_eval_end(self, context: StepContext, metrics: Mapping[str, float]) -> None:
        """After all evaluations of a step, with their metrics."""

    def on_checkpoint_begin(self, context: TrainContext) -> None:
        """A save of the state after `context.step` steps begins; it may fail, or be committed at a later step."""

    def on_checkpoint_save(self, context: CheckpointContext) -> None:
        """A checkpoint of `context.step` was committed; with `checkpoint.async_save`, at the end of a later step."""

    def on_checkpoint_load(self, context: CheckpointContext) -> None:
        """A checkpoint was restored, before anything else."""

    def on_rollback(self, context: TrainContext, step: int, reason: str) -> None:
        """The run went back from `context.step` to the state that it had after `step` steps, for a reason in words."""

    def on_train_end(self, context: TrainContext) -> None:
        """The loop ended without an error, or only its last save failed."""

    def on_exception(self, context: TrainContext, error: BaseException) -> None:
        """The loop ended with `error`, which is raised on afterwards."""


@define(kw_only=True, slots=False)
class Plugin(Component, _WithState):
    """Behaviour through hooks: methods marked `@hookimpl` implement specifications of `forge_core.contracts.hookspecs`.

    The class is the running object, made only when the job names it under `[plugins.NAME]`; state as in `TrainingHook`.
    """

    kind = "plugin"
    resumes_as: ClassVar[WhenResumed | None] = "flag"


def call_refusal(own: Callable[..., Any], asked: Callable[..., Any]) -> str:
    """Why `own` cannot be called as `asked`, the method of the base class that it overrides; empty if it can."""
    # Methods receive their arguments by position, but `build` its inputs by name, since hooks are called so.
    names = list(inspect.signature(asked).parameters)[1:]
    by_name = names[1:] if asked.__name__ == "build" else []
    try:
        inspect.signature(own).bind(None, *names[: len(names) - len(by_name)], **dict.fromkeys(by_name))
    except TypeError as error:
        signature = ", ".join(inspect.signature(asked).parameters)
        return f"{asked.__name__} cannot be called: {error}; it is called as {asked.__name__}({signature})"
    return ""


def state_fields(cls: type) -> list[Attribute]:
    """Fields of a hook or plugin class that are state: those with `init=False`."""
    return [f for f in fields(cls) if not f.init] if has(cls) else []
