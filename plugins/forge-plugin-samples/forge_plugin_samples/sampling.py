"""Generation from the model that is being trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from forge_plugin_generate.generate import Sampling, generate

if TYPE_CHECKING:
    from forge_core.contracts.contexts import TrainContext
    from forge_core.contracts.model import Model
    from forge_plugin_samples.samples import Samples


def continuations(settings: Samples, context: TrainContext) -> list[str]:
    """Returns a continuation of each prompt by the model, drawn with a generator of its own."""
    tokenizer = context.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.encode(prompt) or [tokenizer.end_of_text] for prompt in settings.prompts]
    sampling = Sampling(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    rows = generate(context.model, ids, settings.max_tokens, tokenizer.end_of_text, sampling, seed=settings.seed)
    return [tokenizer.decode(row) for row in rows]


@contextmanager
def evaluation_mode(model: Model, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context with model and optimizer in evaluation mode: some optimizers swap in other weights for it.

    Each module returns to its own mode afterwards.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    try:
        yield
    finally:
        if hasattr(optimizer, "train"):
            optimizer.train()
        for module in training:
            module.training = True
