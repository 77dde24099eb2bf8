"""The evaluation `multiple_choice`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen
from attrs.validators import min_len

from forge_core.contracts.errors import DataError, JobError, Problem
from forge_plugin_evaluate.tasks import Item
from forge_plugin_vlm_eval.question_rows import Asked, ImageQuestions

if TYPE_CHECKING:
    from forge_core.contracts.contexts import EvaluationContext
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_vlm_eval.choice_rows import Choice
    from forge_plugin_vlm_eval.question_rows import Questions

Metric = Literal["acc", "acc_per_char", "acc_per_byte", "bits_per_byte"]


@frozen(kw_only=True)
class MultipleChoice(ImageQuestions):
    """Which of several texts is likeliest after image and question; from losses alone, so under every layout.

    Logs each of `metrics` as `{prefix}/{metric}`, its standard error as `{prefix}/{metric}_stderr`, as the evaluation
    `tasks` defines them.
    """

    options: str | tuple[str, ...] = field(validator=min_len(1))
    """The key of the source's records with the choices, a list of texts; or the choices themselves, if all questions
    have the same: `["yes", "no"]`. They take the place of the learned text, and begin with a space if that does."""
    answer: str = ""
    """The key of the source's records with the right choice: its number, from 0, or its text. Empty: the choice that is
    the learned text."""
    metrics: tuple[Metric, ...] = field(
        default=("acc", "acc_per_char", "acc_per_byte", "bits_per_byte"), validator=min_len(1)
    )
    """acc: the share of questions whose likeliest choice is right. acc_per_char, acc_per_byte: the same with the
    logarithm of the probability divided by the choice's characters or bytes. bits_per_byte: bits that the right choice
    costs for each of its bytes."""

    @property
    def record_keys(self) -> Mapping[str, str]:
        """`options`, unless it lists the choices themselves, and `answer`."""
        return {"options": self.options if isinstance(self.options, str) else "", "answer": self.answer}

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks choices that the job lists; choices of records are checked with their questions."""
        yield from super().problems(job, layout)
        if not isinstance(self.options, str) and (message := _fault(self.options)):
            yield Problem("options", message)

    def check(self, asked: Asked) -> None:
        """Reads the choices and the right one, so that a faulty record is found with the questions."""
        self.item(asked)

    def item(self, asked: Asked) -> Item:
        """Returns the choices of a question and the right one; raises `DataError` if its record has none."""
        choices = asked.value(self.options) if isinstance(self.options, str) else self.options
        if message := _fault(choices):
            raise DataError(f"{asked.place}: {self.options!r} {message}")
        answer = asked.value(self.answer) if self.answer else asked.answer
        if isinstance(answer, str):
            # Choices may begin with a space, as tokens of the learned text do
            texts = [text.strip() for text in choices]
            if (count := texts.count(answer.strip())) != 1:
                what = f"{self.answer!r} is {answer!r}" if self.answer else f"the learned text is {answer!r}"
                raise DataError(f"{asked.place}: {what}, which is {count} of the choices {list(choices)}")
            answer = texts.index(answer.strip())
        # True and False are integers in Python
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
            raise DataError(f"{asked.place}: {self.answer!r} is {answer!r}, not a number from 0 to {len(choices) - 1}")
        return Item("", tuple(choices), answer)

    def measure(self, questions: Questions, context: EvaluationContext) -> Mapping[str, float]:
        """Computes the log-probability of each choice, as a row with image, question and choice. Collective."""
        from forge_plugin_evaluate.tasks.measuring import log_probabilities
        from forge_plugin_evaluate.tasks.rows import row_length
        from forge_plugin_evaluate.tasks.scores import metrics_of
        from forge_plugin_vlm_eval.choice_rows import ChoiceRows

        tokenizer = context.build.tokenizer
        assert tokenizer is not None
        items = [self.item(asked) for asked in questions.asked]
        # All choices have rows of one length, and no row is longer than in training
        choices = _choices(questions, items, tokenizer, longest := context.job.train.seq_len)
        length = row_length(max(choice.positions for choice in choices), longest, context.build.layout)
        values = log_probabilities(context, ChoiceRows(questions, choices, length, tokenizer.end_of_text))
        prefix = self.label(context.job)
        return {f"{prefix}/{name}": value for name, value in metrics_of(items, values, self.metrics).items()}


def _choices(questions: Questions, items: Sequence[Item], tokenizer: Tokenizer, longest: int) -> list[Choice]:
    """Returns the choices of all questions; raises `JobError` if one is too long for a row."""
    from forge_plugin_vlm_eval.choice_rows import Choice

    choices = []
    for asked, item in zip(questions.asked, items, strict=True):
        for text, tokens in zip(item.choices, tokenizer.encode_batch(list(item.choices)), strict=True):
            choices.append(choice := Choice(asked, tokens))
            if choice.positions > longest:
                message = f"{asked.place}: with the choice {text!r} it has {choice.positions} positions"
                raise JobError(f"{message}, and train.seq_len is {longest}; raise it, or shorten the choice")
    return choices


def _fault(choices: Any) -> str:
    """Returns the problem with the choices; empty if there is none."""
    if not isinstance(choices, list | tuple) or not all(isinstance(text, str) for text in choices):
        return f"holds {str(choices)[:60]!r}, which is no list of texts"
    if len(choices) < 2 or any(not text.strip() for text in choices):
        return f"holds {list(choices)}; at least two are needed, and none may be blank"
    return ""
