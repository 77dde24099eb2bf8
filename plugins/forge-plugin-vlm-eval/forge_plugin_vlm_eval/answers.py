"""The evaluation `answers`: the model's answers to held-out images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import EvaluationComponent
from forge_core.contracts.contexts import EvaluationContext
from forge_core.contracts.errors import ForgeError, Problem
from forge_plugin_vision import HasImageInput, image_input
from forge_plugin_vlm_eval.question_rows import NO_TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class Answers(EvaluationComponent):
    """Lets the model continue held-out rows with images, where the first learned text begins, and compares with it.

    Logs `{prefix}/exact`, the share of answers that are right to the letter, and `{prefix}/letters`, one minus the edit
    distance relative to the longer text, on average. The likeliest token is taken each time. `answers.png` in the run
    folder shows the images, what the model said of them, and the bits that it took from each: how much less
    likely the right text is when the model sees the next row's image.

    Rows with clips are answered twice more, where each frame is the first one and where frames are shuffled, the same
    way at each evaluation: `{prefix}/still_exact` and `{prefix}/shuffled_exact`. Answers that are right
    with these frames were not learned from the motion. The picture shows clips as film strips, with all three answers.
    """

    sequences: int = field(default=64, validator=gt(0))
    """Rows with images, evenly spread over the held-out ones."""
    shown: int = field(default=24, validator=ge(0))
    """How many of them `answers.png` shows; 0: it is not drawn."""
    max_tokens: int = field(default=32, validator=gt(0))
    """Upper bound of the tokens of an answer."""
    prefix: str = "answers"
    """Prefix of the names of the metrics."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the model takes images, and that a tokenizer can decode its answers."""
        if not isinstance(job.model, HasImageInput):
            yield Problem("", f"{type(job.model).__name__} sees no images; leave this evaluation out")
        if job.data.tokenizer is None:
            yield Problem("", NO_TOKENIZER)

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        """Returns the metrics that the class docstring describes; none if no held-out row has an image.

        Raises:
            ForgeError: ranks split the model, and no stage lets them generate together.
        """
        # Imported here: they need torch, and a component is read without it
        from forge_core.parallel.mesh import global_rank
        from forge_kit.nn.generation import generates_jointly
        from forge_plugin_vlm_eval.gallery import draw_answers
        from forge_plugin_vlm_eval.row_answers import ORDERS, answered

        layout = context.build.layout
        if layout.replicate != layout.world_size and not generates_jointly(context.model):
            raise ForgeError(f"no stage of the layout ({layout}) lets its ranks generate together; leave `answers` out")
        answers = answered(self, context)
        if not answers:
            return {}
        # Every rank has all answers: they are few, and equal on all of them.
        if self.shown and context.build.folder is not None and global_rank() == 0:
            form = image_input(context.job).format
            count = min(self.shown, len(answers))
            # The same rows each time, so that pictures after several steps can be compared
            spread = [answers[number * len(answers) // count] for number in range(count)]
            draw_answers(spread, form, context.build.folder / "answers.png", context.step)
        metrics = {
            "exact": sum(answer.is_right for answer in answers) / len(answers),
            "letters": sum(answer.letters for answer in answers) / len(answers),
        }
        if clips := [answer for answer in answers if answer.without_motion]:
            # Over rows with clips only: images have no motion to take away
            for order in ORDERS:
                metrics[f"{order}_exact"] = sum(answer.is_right_with(order) for answer in clips) / len(clips)
        return {f"{self.prefix}/{name}": value for name, value in metrics.items()}
