"""Scores of completions by a trained reward model. Shapes: B completions, S positions, D model width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from attrs import frozen
from torch import Tensor

from forge_core.contracts.errors import ForgeError, JobError
from forge_plugin_grpo.prompts import encode_prompt
from forge_plugin_losses.teacher import TrainedModel, load_trained

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Tokenizer
    from forge_plugin_grpo.kinds import Completion
    from forge_plugin_grpo.reward_model import RewardModel


@frozen(eq=False)
class ModelScorer:
    """A reward model that is loaded."""

    trained: TrainedModel
    tokenizer: Tokenizer
    batch_size: int

    def scores(self, completions: Sequence[Completion]) -> list[float]:
        """Returns the score of each completion."""
        documents = [self._document(completion) for completion in completions]
        # Of like lengths together, so that little is padding; the order depends on the completions alone
        order = sorted(range(len(documents)), key=lambda number: len(documents[number]))
        scores = [0.0] * len(documents)
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            values = self._at_ends([documents[number] for number in chosen]).tolist()
            for number, value in zip(chosen, values, strict=True):
                scores[number] = value
        return scores

    def _document(self, completion: Completion) -> list[int]:
        """The tokens of prompt and completion as a reward model has learned them from the dataset `pairs`."""
        prompt, end = completion.row["prompt"], self.tokenizer.end_of_text
        if not isinstance(prompt, str):
            chats: Any = self.tokenizer
            return list(chats.chat([*prompt, {"role": "assistant", "content": completion.text}]).ids)
        answer = completion.ids[:-1] if completion.ended else completion.ids
        # Another token may have ended it, such as the end of a turn
        return [*encode_prompt(self.tokenizer, prompt), *answer, end]

    @torch.no_grad()
    def _at_ends(self, documents: Sequence[Sequence[int]]) -> Tensor:
        """(B,): the score at the last token of each."""
        model = self.trained.model
        device = next(model.parameters()).device
        lengths = torch.tensor([len(document) for document in documents])
        # Padding behind the end changes nothing before it, as positions see earlier ones alone
        ids = torch.zeros(len(documents), int(lengths.max()), dtype=torch.int64)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = torch.tensor(document)
        hidden = model({"input_ids": ids.to(device)})
        ends = hidden[torch.arange(len(documents), device=device), (lengths - 1).to(device)]
        # In float32 or wider, as in training
        wide = ends.to(torch.promote_types(ends.dtype, torch.float32))
        with model.head.whole(wide.dtype):
            scores: Tensor = model.head.logits(wide)
        return scores[:, 0]


_LOADED: WeakKeyDictionary[RewardModel, ModelScorer] = WeakKeyDictionary()
"""By the component, which has no other access to what a hook has loaded for it."""


def load_scorer(reward: RewardModel, context: BuildContext, table: str) -> Path:
    """Load the model of a reward on this rank.

    Args:
        reward: the component.
        context: the build of the run.
        table: of the job, for errors.

    Returns:
        Its checkpoint.

    Raises:
        CheckpointError: there is no intact checkpoint.
        JobError: it is no reward model, has another tokenizer, or needs components that are not installed.
    """
    trained, tokenizer = load_trained(Path(reward.path), context), context.tokenizer
    assert tokenizer is not None, "Prompts.problems refuses jobs without a tokenizer"
    outputs = getattr(getattr(trained.model.head, "weight", None), "shape", (0,))[0]
    if outputs != 1:
        message = f"{trained.checkpoint} is no reward model: its head has {outputs} outputs"
        raise JobError.at(f"{table}.path", f"{message}; take a run with [plugins.reward_head]")
    fingerprint = trained.manifest["provenance"].get("tokenizer")
    if fingerprint not in (None, tokenizer.fingerprint()):
        message = f"{trained.checkpoint} was trained with another tokenizer: its ids mean other texts"
        raise JobError.at(f"{table}.path", f"{message}; take a reward model with the tokenizer of this job")
    _LOADED[reward] = ModelScorer(trained, tokenizer, reward.batch_size)
    return trained.checkpoint


def scorer_of(reward: RewardModel) -> ModelScorer:
    """Returns what was loaded for a reward.

    Raises:
        ForgeError: nothing was.
    """
    if reward not in _LOADED:
        raise ForgeError(f"the reward model {reward.path} is loaded when a run begins, and none has begun")
    return _LOADED[reward]
