"""What a model says to questions about images, by all ranks of a run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_core.contracts.errors import ForgeError
from forge_core.data.reading import collate
from forge_core.parallel.mesh import gather_objects, sample_rank
from forge_kit.generation import Generates, generates_jointly
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_generate.prompts import stop_ids

if TYPE_CHECKING:
    from forge_core.contracts.contexts import EvaluationContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_plugin_vlm_eval.asked import Asked, Questions

AT_A_TIME = 16
"""Questions of one batch."""


def generated(context: EvaluationContext, questions: Questions, max_tokens: int) -> list[str]:
    """Returns the model's answer to each question, of the likeliest tokens; the same on every rank. Collective.

    Ranks with different sequences divide the questions, those that share a sequence or the model generate together.

    Raises:
        ForgeError: the model, or a stage that splits it, does not generate.
    """
    check_generates(context.model, context.build.layout)
    layout, tokenizer = context.build.layout, context.build.tokenizer
    assert tokenizer is not None
    ranks, rank = layout.data_parallel, sample_rank(context.build.mesh, layout)
    share = -(-len(questions.asked) // ranks)
    # Ranks that shard parameters gather them for each other: all have equally many batches, if need be of question 0.
    numbers = list(range(rank, len(questions.asked), ranks))
    numbers += [0] * (share - len(numbers))
    texts: dict[int, str] = {}
    for start in range(0, share, AT_A_TIME):
        part = numbers[start : start + AT_A_TIME]
        answers = _of_batch(context, questions, [questions.asked[number] for number in part], max_tokens)
        texts |= {number: tokenizer.decode(answer) for number, answer in zip(part, answers, strict=True)}
    every = {number: text for own in gather_objects(texts) for number, text in own.items()}
    return [every[number] for number in range(len(questions.asked))]


def _of_batch(
    context: EvaluationContext, questions: Questions, asked: Sequence[Asked], max_tokens: int
) -> list[list[int]]:
    tokenizer = context.build.tokenizer
    assert tokenizer is not None
    rows = [one.question.entries(questions.row(one)) for one in asked]
    entries = {name: tensor.to(context.build.device) for name, tensor in collate(rows).items()}
    prompts = [one.question.prompt.tolist() for one in asked]
    end, stop = tokenizer.end_of_text, stop_ids(tokenizer)
    return generate(context.model, prompts, max_tokens, end, Sampling(temperature=0), stop=stop, entries=entries)


def check_generates(model: Model, layout: Layout) -> None:
    """Raise `ForgeError` if a model does not generate, or no stage of its layout lets ranks do it together."""
    if not isinstance(model, Generates):
        message = f"{type(model).__name__} cannot generate: it has no new_cache and decode"
        raise ForgeError(f"{message}; leave the evaluation out; multiple_choice needs losses alone")
    if layout.replicate != layout.world_size and not generates_jointly(model):
        message = f"no stage of the layout ({layout}) lets its ranks generate together (forge_kit.generation)"
        raise ForgeError(f"{message}; leave the evaluation out; multiple_choice works under every layout")
