"""Dataset `huggingface`: from the hub, from data files or from `save_to_disk`; whole, or as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import frozen
from attrs.validators import ge

from forge_core.contracts.components import DatasetComponent, FilePath, when_resumed
from forge_core.contracts.data import HasDescription
from forge_core.contracts.errors import JobError, Problem
from forge_kit.tools.rank_zero import from_rank0
from forge_plugin_huggingface.label_check import LearnsSomething
from forge_plugin_huggingface.part import SplitPart
from forge_plugin_huggingface.problems import NO_TOKENIZER, problems_of
from forge_plugin_huggingface.source import DescribedSource, Origin

if TYPE_CHECKING:
    from forge_core.contracts.components import TrainingHook
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Documents, Stream, Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_huggingface.encoding import Encoder
    from forge_plugin_huggingface.stream import LaneStream
    from forge_plugin_huggingface.tokens import DocumentSource, EncodedRows


Learn = Literal["all", "last"]


def _off_or_at_least_two(_: Any, attribute: attrs.Attribute, value: int) -> None:
    if value < 0 or value == 1:
        raise ValueError(f"{attribute.name!r} must be 0 (off) or at least 2, not {value}")


@frozen(kw_only=True)
class HuggingFace(DatasetComponent):
    """Documents of a Hugging Face dataset: rows with a text, with a chat, or with a prompt and its completion.

    Read as a whole, it is tokenised once and cached; as a stream, rows are tokenised as they are read, and nothing
    is cached. Rows without text, and chats without an answer of the assistant, are left out. Code of a dataset is
    never run.
    """

    path: FilePath
    """A folder with data files (`.jsonl`, `.parquet`, …), a folder that `save_to_disk` wrote, the name of a dataset on
    the hub (`owner/name`), or a format (`json`, `parquet`, `csv`, `arrow`, `text`) whose files `data_files` names."""
    config: str = ""
    """Configuration of the dataset, if it has several."""
    split: str = "train"
    """The split to train on; read as a whole, also a part of one (`train[:90%]`)."""
    revision: str = ""
    """Branch, tag or commit on the hub; empty: its default branch."""
    data_files: FilePath | tuple[FilePath, ...] | Mapping[str, FilePath] = ()
    """Files or globs, relative to `path`: one, a list, or one for each split; by default all files of `path`."""
    field: str = "text"
    """The field of a row that holds its text."""
    messages: str = ""
    """The field that holds a chat, a list of messages with `role` and `content`; instead of `field`. The tokenizer's
    chat template writes it, and only the assistant's turns are learned. A message with `train = false`, or with
    `weight = 0` as in OpenAI's format, is not learned."""
    prompt: str = ""
    """The field that holds a prompt, instead of `field`; with `completion`."""
    completion: str = ""
    """The field that holds the completion of `prompt`, which alone is learned, with the end-of-text. Both are texts, or
    both are lists of chat messages."""
    tools: str = ""
    """With chats: the field that holds the JSON schemas of the functions that the assistant may call."""
    learn: Learn = "all"
    """With chats: whether all turns of the assistant are learned, or only the last one (`last`)."""
    too_long: Literal["keep", "drop", "truncate", "error"] = "keep"
    """What happens to documents of more than `train.seq_len` tokens, end-of-text aside. `keep`: they are cut into
    sequences by `[data.packing]`, and all of their tokens are used; `drop`: they are left out; `truncate`: only their
    beginning is used, or they are left out if nothing of that is learned; `error`: the first one ends the run."""
    held_out_split: str = ""
    """The split to evaluate on; empty: none."""
    held_out_every: int = attrs.field(default=0, validator=_off_or_at_least_two)
    """Hold out every n-th row, starting with the first; in a stream, of every file. 0: none."""
    held_out_documents: int = attrs.field(default=0, validator=ge(0))
    """Upper bound of the held-out rows to evaluate on; 0: all. The others are not trained on either."""
    streaming: bool = False
    """Whether to read the data during training, instead of as a whole before it."""
    lanes: int = attrs.field(default=0, validator=ge(0), metadata=when_resumed("impossible"))
    """With `streaming`: readers that fill the global batch, each with different rows; a divisor of the batch's size,
    and preferably of the number of files too. 0: `train.global_batch_size`."""
    shuffle: int = attrs.field(default=0, validator=ge(0), metadata=when_resumed("impossible"))
    """With `streaming`: rows that each lane reads ahead and shuffles; its files are shuffled too. 0: rows in the order
    of the files."""
    processes: int = attrs.field(default=1, validator=ge(1), metadata=when_resumed("safe"))
    """Processes that tokenise a dataset that is read as a whole."""
    verify: Literal["sizes", "full"] = attrs.field(default="sizes", metadata=when_resumed("safe"))
    """How cached token files are checked: by their sizes, or also by SHA-256, which detects flipped bytes."""
    _built: list[HasDescription] = attrs.field(factory=list, init=False, eq=False, repr=False)
    """The data that `build` returned, for `choices`."""

    def documents(self) -> Iterator[str]:
        """Yields texts of the rows that are not held out, each once; none for a dataset of chats."""
        if self.messages:
            return iter(())
        from forge_plugin_huggingface.tokens import texts

        fields = [self.prompt, self.completion] if self.prompt else [self.field]
        return texts(self.origin().open(), self.path, self.training_part(), fields, self.streaming)

    def build(self, context: BuildContext) -> Documents | Stream:
        """Returns the tokenised documents, or the sequences of a stream of them.

        Raises:
            JobError: the data cannot be read, or does not match the job's keys.
        """
        from forge_kit.data.document_streams import packed
        from forge_plugin_huggingface.stream import LaneStream

        built = self.tokenised(context)
        # In place, since the class is frozen
        self._built[:] = [built]
        return packed(built, context) if isinstance(built, LaneStream) else built

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Reports in the run's summary how much of the tokens is learned, and which rows are left out."""
        if (described := "".join(data.describe() for data in self._built)) and self._is_reported:
            yield f"rows {self.name or self.path}", described, f"too_long = {self.too_long}"

    def plan_data_lines(self, context: BuildContext) -> Iterable[tuple[str, str]]:
        """Reports the same of a sample of rows to `forge-run plan`; see `forge_plugin_plan.lines.HasPlanDataLines`.

        Raises:
            JobError: the rows are not on this machine, or cannot be read.
        """
        if not self._is_reported:
            return
        from forge_plugin_huggingface.row_sample import RowSample

        if context.tokenizer is None:
            raise JobError(NO_TOKENIZER)
        encoder = self._encoder(context.tokenizer, context.job.train.seq_len)
        yield "rows", RowSample.of(self.origin(), self.training_part(), encoder).describe()

    @property
    def _is_reported(self) -> bool:
        """Whether something is to be reported of the rows: a part is not learned, or may be left out."""
        return self.has_mask or self.too_long != "keep"

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """A check that the first step learns something, for data of which only a part is learned."""
        masked = {number: source for number, source in enumerate(job.data.sources) if _has_mask(source)}
        # One check for all of them, as it is of the whole global batch
        if masked and next(iter(masked.values())) is self:
            yield LearnsSomething(sources=tuple(source.name or str(number) for number, source in masked.items()))

    @property
    def has_mask(self) -> bool:
        """Whether only a part of the tokens is learned."""
        return bool(self.messages or self.prompt)

    def tokenised(self, context: BuildContext) -> EncodedRows | LaneStream:
        """Returns the documents, or a stream of them; raises as `build`."""
        if context.tokenizer is None:
            raise JobError(NO_TOKENIZER)
        splits = [split for split in (self.split, self.held_out_split) if split]
        streamed = (self.split,) if self.streaming else ()
        # Collective: rank 0 alone contacts the hub and lists files, and all ranks must reach this call
        data = from_rank0(context, lambda: DescribedSource.of(self.origin(), splits, streamed))
        corpus = self._corpus(data, context.tokenizer, context.job.train.seq_len)
        if self.streaming:
            return self._stream(corpus, context)
        if self.held_out_split:
            data.source.check_apart(self.split, self.held_out_split)
        held_out = self.held_out_part()
        return corpus.documents(self.training_part(), corpus.documents(held_out) if held_out else None)

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the keys without the network and without reading rows; files are looked at on rank 0 only."""
        return problems_of(self, job)

    def left_out(self) -> Mapping[str, int]:
        """See `forge_kit.data.data_files.ListsFiles`."""
        return self.origin().open().left_out

    def origin(self) -> Origin:
        """Returns the keys that locate the data."""
        return Origin(self.path, self.config, self.revision, self.data_files)

    def training_part(self) -> SplitPart:
        """Returns the rows to train on."""
        return SplitPart(self.split, self.held_out_every)

    def held_out_part(self) -> SplitPart | None:
        """Returns the rows to evaluate on, if any."""
        if self.held_out_split:
            return SplitPart(self.held_out_split, limit=self.held_out_documents)
        if self.held_out_every:
            return SplitPart(self.split, self.held_out_every, is_held_out=True, limit=self.held_out_documents)
        return None

    def _corpus(self, data: DescribedSource, tokenizer: Tokenizer, seq_len: int) -> DocumentSource:
        from forge_plugin_huggingface.tokens import DocumentSource

        return DocumentSource(
            data=data,
            path=self.path,
            encoder=self._encoder(tokenizer, seq_len),
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            processes=self.processes,
            verify=self.verify,
        )

    def _encoder(self, tokenizer: Tokenizer, seq_len: int) -> Encoder:
        from forge_plugin_huggingface.encoding import ChatEncoder, CompletionEncoder, LengthLimit, TextEncoder

        encoder: Encoder
        if self.messages:
            encoder = ChatEncoder(tokenizer, self.messages, self.tools, self.learn)
        elif self.prompt:
            encoder = CompletionEncoder(tokenizer, self.prompt, self.completion, self.tools, self.learn)
        else:
            encoder = TextEncoder(tokenizer, self.field)
        return encoder if self.too_long == "keep" else LengthLimit(encoder, self.too_long, seq_len)

    def _stream(self, corpus: DocumentSource, context: BuildContext) -> LaneStream:
        from forge_plugin_huggingface.rows import stream_rows
        from forge_plugin_huggingface.stream import CountingEncoder, LaneReader, LaneStream

        job, held_out = context.job, self.held_out_part()
        lanes = self.lanes or job.train.global_batch_size
        name = f"{self.path!r}, split {self.split!r}"
        encode = CountingEncoder(corpus.encoder, name)
        reader = LaneReader(
            stream_rows(corpus.data.source.stream(self.split), corpus.encoder.columns, name, lanes),
            encode,
            data=corpus.data.fingerprints[self.split],
            lanes=lanes,
            shuffle=self.shuffle,
            # `data.seed` lets runs with different initial weights read the same order.
            seed=job.job.seed if job.data.seed is None else job.data.seed,
            held_out_every=self.held_out_every,
        )
        held_out_documents = corpus.first_documents(held_out) if held_out else None
        return LaneStream(reader, corpus.end_of_text, held_out_documents, encode.counts)


def _has_mask(source: DatasetComponent) -> bool:
    return isinstance(source, HuggingFace) and source.has_mask
