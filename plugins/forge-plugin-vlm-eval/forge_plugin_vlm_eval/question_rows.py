"""The rows that an evaluation uses, its questions about them, and the right answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import define, field, frozen
from attrs.validators import ge, matches_re

from forge_core.contracts.components import DatasetComponent, EvaluationComponent, TrainingHook
from forge_core.contracts.data import HasLocation
from forge_core.contracts.errors import DataError, JobError, Problem
from forge_plugin_vision import BROKEN, HasImageInput, image_input

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext, Evaluation, EvaluationContext, TrainContext
    from forge_core.contracts.data import Dataset, Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.job import Job
    from forge_plugin_vlm_eval.questions import Question

NO_TOKENIZER = "answers are text, which needs a tokenizer; add [data.tokenizer], or leave this out"


class HasValues(Protocol):
    """A record of a file."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The values of the record by key, as its file has them; a missing one is None or left out."""
        ...


@runtime_checkable
class HasRecords(Protocol):
    """A dataset that provides the records of its files for a row, such as the datasets of forge-plugin-images."""

    def records(self, index: int) -> Sequence[HasValues]:
        """Returns the record of each document of a row, in order."""
        ...


@frozen
class Asked:
    """A question, and where it is."""

    index: int
    """Number of its row."""
    question: Question = field(eq=False)
    answer: str
    """The learned text, without what ends it."""
    place: str
    """For errors."""
    values: Mapping[str, Any] | None = field(eq=False, default=None)
    """The values of its record; None: unknown, or the document has several questions."""

    def value(self, key: str) -> Any:
        """Returns a value of the record; raises `DataError` if there is none."""
        if self.values is None:
            message = "its document has several answers, or its source does not know records"
            raise DataError(f"{self.place}: {message}, so {key!r} cannot be read for it; leave the key out")
        if self.values.get(key) is None:
            names = ", ".join(map(repr, filter(None, self.values))) or "nothing"
            raise DataError(f"{self.place}: no key {key!r}, but {names}")
        return self.values[key]


@frozen
class Questions:
    """The questions of an evaluation, in the order of rows."""

    dataset: Dataset | None
    asked: Sequence[Asked]

    def row(self, asked: Asked) -> Mapping[str, Any]:
        """Returns the row of a question; it is read again at each call, since rows with their images are large."""
        assert self.dataset is not None
        return self.dataset[asked.index]


@frozen(kw_only=True)
class ImageQuestions(EvaluationComponent):
    """Base of evaluations that ask a model about images and clips.

    A question is a learned text that follows an image in a held-out row; everything before the text is the prompt.
    """

    source: DatasetComponent | None = None
    """`[evaluations.NAME.source]`: separate data, of a type that makes rows with images (`image_text`, `image_chat`,
    …): its held-out rows, or all rows if it holds out none. Without the table: the held-out rows of the job."""
    sequences: int = field(default=256, validator=ge(0))
    """Rows to ask at most, spread evenly; 0: all. Those without images do not count."""
    prefix: str = field(default="", validator=matches_re(r"[\w./-]*"))
    """Prefix of the names of the metrics. Empty: the name of this table."""

    @property
    def record_keys(self) -> Mapping[str, str]:
        """Settings that name a key of the source's records, with the key; those that are empty name none."""
        return {}

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the model takes images, that there is a tokenizer, and that keys of records have a source."""
        if not isinstance(job.model, HasImageInput):
            yield Problem("", f"{type(job.model).__name__} sees no images; leave this evaluation out")
        if job.data.tokenizer is None:
            yield Problem("", NO_TOKENIZER)
        for setting, key in self.record_keys.items():
            if key and self.source is None:
                message = f"{key!r} is a key of records, and held-out rows of the job do not know theirs"
                yield Problem(setting, f"{message}; add [evaluations.NAME.source] with its own files")

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """A hook that checks the model before training: the first evaluation may come hours later."""
        # The model does not exist yet when evaluations are built
        return [CheckModel(evaluation=self)]

    def build(self, context: BuildContext) -> Evaluation:
        """Finds questions of a separate source now, so that mistakes show early; others at the first evaluation."""
        if context.tokenizer is None:  # an evaluation given from Python has not been checked
            raise JobError(list(self.problems(context.job, context.layout)))
        if self.source is None:
            return Asking(self, None)
        return Asking(self, questions_for(self, context, _rows_of(self.source, context)))

    def measure(self, questions: Questions, context: EvaluationContext) -> Mapping[str, float]:
        """Returns the metrics; `questions` has at least one."""
        raise NotImplementedError

    def check_model(self, model: Model, layout: Layout) -> None:
        """Raise `ForgeError` if the model, or the layout that it was built for, cannot be asked."""

    def check(self, asked: Asked) -> None:
        """Raise `DataError` if the record of a question has not what the evaluation reads in it."""

    def label(self, job: Job) -> str:
        """Returns the prefix of the metrics."""
        # By identity: two evaluations with the same settings are equal
        own = next((name for name, evaluation in job.evaluations.items() if evaluation is self), type(self).__name__)
        return self.prefix or own


@define(kw_only=True, slots=False)
class CheckModel(TrainingHook):
    """Checks before the first step what an evaluation needs of the model, lest it end a run later."""

    evaluation: ImageQuestions

    def on_train_begin(self, context: TrainContext) -> None:
        """Raises `ForgeError` if the model, or its layout, cannot be asked."""
        if context.build is None:  # a hook that is tried without a run
            return
        self.evaluation.check_model(context.model, context.build.layout)


@define
class Asking:
    """Measures by the questions of a run, which are found once."""

    evaluation: ImageQuestions
    questions: Questions | None
    """None until the first call, which has the held-out rows of the run, if those are asked about."""

    def __call__(self, context: EvaluationContext) -> Mapping[str, float]:
        if self.questions is None:
            self.questions = questions_for(self.evaluation, context.build, context.held_out)
        return self.evaluation.measure(self.questions, context) if self.questions.asked else {}


def questions_for(evaluation: ImageQuestions, context: BuildContext, dataset: Dataset | None) -> Questions:
    """Returns the questions of an evaluation about rows.

    Raises:
        JobError: its own source has no question, or a record lacks something.
    """
    assert context.tokenizer is not None
    try:
        asked = [] if dataset is None else list(_asked(evaluation, dataset, context, context.tokenizer))
    except DataError as error:
        raise JobError(str(error)) from error
    if evaluation.source is not None and not asked:
        raise JobError("the source has no learned text behind an image; see its keys, or leave the evaluation out")
    return Questions(dataset, asked)


def _rows_of(source: DatasetComponent, context: BuildContext) -> Dataset:
    built: Any = context.build(source)
    rows = built.held_out
    # Nothing of this source is trained on, so all rows may be asked about
    if rows is None and hasattr(built, "__getitem__"):
        rows = built
    if rows is None:
        raise JobError("the source is a stream without held-out documents; set held_out_split or held_out_every")
    if not len(rows):
        raise JobError("the source has no document to ask about; see what its path and keys name")
    return rows  # type: ignore[no-any-return]


def _asked(
    evaluation: ImageQuestions, dataset: Dataset, context: BuildContext, tokenizer: Tokenizer
) -> Iterator[Asked]:
    from forge_plugin_generate.prompts import stop_ids
    from forge_plugin_vlm_eval.questions import questions_of

    seen, stops = image_input(context.job), set(stop_ids(tokenizer))
    count = min(evaluation.sequences or len(dataset), len(dataset))
    for number in range(count):
        # The same rows at each evaluation, spread over all of them
        index = number * len(dataset) // count
        row = dataset[index]
        place = dataset.where(index) if isinstance(dataset, HasLocation) else f"row {index}"
        try:
            found = list(questions_of(row, seen))
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        # With a document left out, those that are there have other numbers than the records.
        complete = isinstance(dataset, HasRecords) and not row.get(BROKEN, 0)
        records = dataset.records(index) if complete and any(evaluation.record_keys.values()) else []  # type: ignore[attr-defined]
        for question in found:
            alone = sum(question.document == other.document for other in found) == 1
            # A record with several questions has one set of values, which cannot belong to all of them
            values = records[question.document].values if records and alone else None
            answer = tokenizer.decode([token for token in question.answer.tolist() if token not in stops])
            asked = Asked(index, question, answer, place, values)
            # Here and not when answers are compared: a faulty record of a source ends the job at its start
            evaluation.check(asked)
            yield asked
