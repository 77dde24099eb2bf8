"""Base of the evaluations that compare generated answers with the right answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import gt

from forge_core.contracts.errors import DataError
from forge_plugin_vlm_eval.question_rows import Asked, ImageQuestions

if TYPE_CHECKING:
    from forge_core.contracts.contexts import EvaluationContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_plugin_vlm_eval.question_rows import Questions


@frozen(kw_only=True)
class GeneratedAnswers(ImageQuestions):
    """Lets the model answer, by the likeliest token each time, and compares with the right answers."""

    references: str = ""
    """The key of the source's records with the right answers: a text, or a list of texts (VQA has ten answers a
    question, COCO five captions an image). Empty: the learned text alone is right."""
    max_tokens: int = field(default=32, validator=gt(0))
    """Upper bound of the tokens of an answer."""

    @property
    def record_keys(self) -> Mapping[str, str]:
        """`references`, whose value is a text or a list of texts."""
        return {"references": self.references}

    def check_model(self, model: Model, layout: Layout) -> None:
        """Checks that the model generates, and that the ranks of its layout can do so together."""
        from forge_plugin_vlm_eval.generation import check_generates

        check_generates(model, layout)

    def check(self, asked: Asked) -> None:
        """Reads the right answers, so that a record without them is found with the questions."""
        self.right(asked)

    def right(self, asked: Asked) -> list[str]:
        """Returns the right answers to a question; raises `DataError` if its record has none."""
        if not self.references:
            return [asked.answer]
        value = asked.value(self.references)
        texts = value if isinstance(value, list | tuple) else [value]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{asked.place}: {self.references!r} holds {str(value)[:60]!r}, which is no list of texts")
        return list(texts)

    def measure(self, questions: Questions, context: EvaluationContext) -> Mapping[str, float]:
        """Generates an answer to each question and compares it with the right ones. Collective."""
        from forge_plugin_vlm_eval.generation import generated

        said = generated(context, questions, self.max_tokens)
        prefix = self.label(context.job)
        metrics = self.scores(said, [self.right(asked) for asked in questions.asked])
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    def scores(self, said: Sequence[str], right: Sequence[Sequence[str]]) -> Mapping[str, float]:
        """Returns the metrics of answers; `right` are the right ones to each."""
        raise NotImplementedError


def mean_and_error(name: str, values: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yields the mean of a metric, and its standard error as `NAME_stderr` if there are at least two values."""
    mean = sum(values) / len(values)
    yield name, mean
    if len(values) > 1:
        # Divided by n - 1, since the mean is estimated from the same values
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        yield f"{name}_stderr", math.sqrt(variance / len(values))
