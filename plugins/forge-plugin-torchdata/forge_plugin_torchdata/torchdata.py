"""The components: `nodes` reads samples ahead by workers, `pipeline` is a source made with torchdata."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen
from attrs.validators import ge, min_len

from forge_core.contracts.components import DatasetComponent, LoaderComponent, when_resumed
from forge_core.contracts.errors import JobError, PluginError, Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import LoadedRows, SampleReader, SampleRow, Stream, Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class Nodes(LoaderComponent):
    """Reads by `data.workers` workers, in a graph of `torchdata.nodes`: for sources that decode or tokenise.

    The samples are bit-identical to the core loader's samples for any number of workers, which may change when a run
    is continued. A worker that dies or fails is reported with what it was reading.
    """

    method: Literal["process", "thread"] = "process"
    """Kind of worker. Threads share the memory of the run and start at once; they suit decoders that release the
    GIL."""
    ahead: int = field(default=2, validator=ge(1))
    """Units (a worker's part of a step) that are kept ready for each worker, in addition to the units being read."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if not job.data.workers:
            message = "reads by workers, but data.workers = 0; set data.workers, or leave [data.loader] out"
            yield Problem("type", message)

    def build(
        self, context: BuildContext, reader: SampleReader, units: Iterator[Sequence[SampleRow]], units_per_step: int
    ) -> Generator[LoadedRows]:
        from forge_plugin_torchdata.workers import Workers

        # No more workers than units of a step where each worker keeps its own lanes: further workers would be idle.
        count = units_per_step if reader.has_lanes else context.job.data.workers
        workers = Workers(reader, count, self.method)
        from forge_plugin_torchdata.nodes import load  # late: processes start while torchdata is imported

        return load(workers, units, self.ahead * count, context.device)


@frozen(kw_only=True)
class PipelineLane:
    """One lane of a `pipeline`, for which its factory makes a graph."""

    number: int
    """From 0. Equal numbers must yield equal samples, and no sample may be in two lanes."""
    count: int
    """Number of lanes."""
    seed: int
    """Seed of the data order (`data.seed`, else `job.seed`), the same in every lane."""
    seq_len: int
    tokenizer: Tokenizer | None
    """The job's, if it has one."""
    options: Mapping[str, Any]
    """The table `options` of the source."""


@frozen(kw_only=True)
class Pipeline(DatasetComponent):
    """A custom graph of `torchdata.nodes`, or a `StatefulDataLoader`, whose state is saved in checkpoints.

    Each item is one sequence: a mapping with `input_ids` and `labels`, (S,) integers, the labels shifted and -100 where
    ignored, and whatever else the model reads, as arrays or tensors.
    """

    factory: str = field(validator=min_len(1))
    """Function that makes the graph of one lane from a `PipelineLane`: `package.module:function`, or
    `./file.py:function`, relative to the working directory."""
    lanes: int = field(default=1, validator=ge(1), metadata=when_resumed("impossible"))
    """Graphs that are read side by side. They divide `train.global_batch_size` and are a multiple of the data-parallel
    ranks: choose at least as many as the ranks and the workers of any run that continues this one."""
    held_out: str | None = None
    """Function that makes the held-out sequences from a `PipelineLane` (number 0 of 1): something with a length and
    items by number. By default there are none."""
    snapshot_every: int = field(default=1, validator=ge(1), metadata=when_resumed("safe"))
    """Samples of a lane from one copy of the graph's state to the next. A continued run reads again what came since the
    copy, fewer samples than this. Raise it if copying the state takes long."""
    options: Mapping[str, str | int | float | bool] = field(factory=dict)
    """Handed to the functions as they are."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        for key, spec in (("factory", self.factory), ("held_out", self.held_out)):
            if spec is not None and ":" not in spec:
                message = f"expected package.module:function or ./file.py:function, got {spec!r}"
                yield Problem(key, message)

    def build(self, context: BuildContext) -> Stream:
        from forge_plugin_torchdata.pipeline import PipelineStream

        data = context.job.data
        factory = self._function("factory", self.factory, context)
        held_out = self._function("held_out", self.held_out, context) if self.held_out else None
        lane = PipelineLane(
            number=0,
            count=1,
            seed=context.job.job.seed if data.seed is None else data.seed,
            seq_len=context.job.train.seq_len,
            tokenizer=context.tokenizer,
            options=dict(self.options),
        )
        return PipelineStream(factory, lane, self.lanes, self.snapshot_every, held_out and held_out(lane))

    def _function(self, key: str, spec: str, context: BuildContext) -> Callable[[PipelineLane], Any]:
        try:
            return context.load_object(spec)
        except PluginError as error:
            raise JobError([Problem(key, str(error))]) from error
