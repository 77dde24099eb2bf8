"""Generation from the model that is being trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_generate.prompts import prompt_ids
from forge_plugin_generate.stops import Stops

if TYPE_CHECKING:
    from forge_core.contracts.contexts import TrainContext
    from forge_plugin_generate.samples.samples import Samples


def continuations(settings: Samples, context: TrainContext) -> list[str]:
    """Returns a continuation of each prompt by the model, drawn with a separate random generator."""
    tokenizer = context.tokenizer
    assert tokenizer is not None
    ids = [prompt_ids(tokenizer, prompt) for prompt in settings.prompts]
    stops = Stops.of(tokenizer, settings.stop)
    sampling = Sampling(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    rows = generate(
        context.model,
        ids,
        settings.max_tokens,
        tokenizer.end_of_text,
        sampling,
        stop=stops.ids,
        until=stops.reached,
        seed=settings.seed,
    )
    return [stops.decode(row) for row in rows]
