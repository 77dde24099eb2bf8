"""The evaluation `anls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen
from attrs.validators import and_, gt, le

from forge_plugin_vlm_eval.answer_evaluation import GeneratedAnswers, mean_and_error
from forge_plugin_vlm_eval.normalisation import normaliser


@frozen(kw_only=True)
class Anls(GeneratedAnswers):
    """Average normalised Levenshtein similarity of generated answers (Biten et al. 2019), as of DocVQA and TextVQA.

    An answer counts 1 - d, where d is its edit distance to a right one, divided by the longer of the two, or 0 if d is
    not below `threshold`; of several right ones the nearest counts. Case and repeated spaces do not. Logs
    `{prefix}/anls` and its standard error, `{prefix}/anls_stderr`.
    """

    threshold: float = field(default=0.5, validator=and_(gt(0), le(1)))
    """Distance from which on an answer counts nothing."""

    def scores(self, said: Sequence[str], right: Sequence[Sequence[str]]) -> Mapping[str, float]:
        """Mean over the questions of the largest similarity to a right answer, with its standard error."""
        values = [
            max(similarity(one, other, self.threshold) for other in every)
            for one, every in zip(said, right, strict=True)
        ]
        return dict(mean_and_error("anls", values))


def similarity(said: str, right: str, threshold: float) -> float:
    """Returns 1 minus the relative edit distance of two texts; 0 if that is not below the threshold."""
    from rapidfuzz.distance import Levenshtein

    normalise = normaliser("case")
    distance = Levenshtein.normalized_distance(normalise(said), normalise(right))
    return 1 - distance if distance < threshold else 0.0
