"""The evaluation `exact_match`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from forge_core.contracts.errors import DataError, Problem
from forge_plugin_vlm_eval.answer_evaluation import GeneratedAnswers, mean_and_error
from forge_plugin_vlm_eval.normalisation import Normalisation, normaliser, vqa_accuracy
from forge_plugin_vlm_eval.question_rows import Asked

if TYPE_CHECKING:
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

PEOPLE = 4
"""Answers from which on VQA's accuracy can be 1."""


@frozen(kw_only=True)
class ExactMatch(GeneratedAnswers):
    """Share of questions whose generated answer equals a right one, both normalised.

    Logs `{prefix}/exact_match` and its standard error, `{prefix}/exact_match_stderr`.
    """

    normalise: Normalisation = "vqa"
    """How both are normalised before they are compared. vqa: as in VQA's evaluation server: no punctuation, lower case,
    zero to ten as digits, no articles, contractions with their apostrophes. case: lower case and single spaces. none:
    nothing, so that answers must be equal to the letter."""
    agreement: Literal["any", "vqa"] = "any"
    """With several right answers: any of them will do, or a question counts min(matches / 3, 1), on average over the
    answers but one, as in VQA, whose `references` are the answers of ten people."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that there are several people's answers for VQA's agreement."""
        yield from super().problems(job, layout)
        if self.agreement == "vqa" and not self.references:
            yield Problem("agreement", "'vqa' counts the answers of several people; set references to their key")

    def check(self, asked: Asked) -> None:
        """Refuses records with too few answers for VQA's agreement."""
        count = len(self.right(asked))
        if self.agreement == "vqa" and count < PEOPLE:
            message = f"{asked.place}: {self.references!r} has {count} answers, and with fewer than {PEOPLE} no answer"
            raise DataError(f'{message} is worth 1 under agreement = "vqa"; set it to "any"')

    def scores(self, said: Sequence[str], right: Sequence[Sequence[str]]) -> Mapping[str, float]:
        """Share of answers equal to a right one, or mean of VQA's accuracy, with its standard error."""
        normalise = normaliser(self.normalise)
        pairs = [(normalise(one), list(map(normalise, every))) for one, every in zip(said, right, strict=True)]
        if self.agreement == "vqa":
            values = [vqa_accuracy(one, every) for one, every in pairs]
        else:
            values = [float(one in every) for one, every in pairs]
        return dict(mean_and_error("exact_match", values))
