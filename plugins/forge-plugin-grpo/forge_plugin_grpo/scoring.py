"""Scores completions by the rewards of a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_plugin_grpo.kinds import Completion, Drawn, RewardComponent

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_plugin_grpo.grpo import GRPO


@frozen
class Scorer:
    """Scores what a sampler has drawn."""

    loss: GRPO
    tokenizer: Tokenizer
    stops: Sequence[int]

    def __call__(self, drawn: Sequence[Drawn], lines: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns (N,) float64: the scores of N completions, by the name of the reward.

        Args:
            drawn: completions.
            lines: of the data, that the prompt of each is from.

        Raises:
            ForgeError: a reward fails, or its score is not finite; names it and the completion.
        """
        completions = [self.completion(one, line) for one, line in zip(drawn, lines, strict=True)]
        return {
            name: torch.tensor(_scored(name, reward, completions), dtype=torch.float64)
            for name, reward in self.loss.rewards.items()
        }

    def completion(self, drawn: Drawn, line: Mapping[str, Any]) -> Completion:
        """Returns what rewards score."""
        ended = self.ended(drawn)
        text = self.tokenizer.decode(list(drawn.ids[:-1] if ended else drawn.ids))
        prompt = line["prompt"] if isinstance(line["prompt"], str) else line["prompt"][-1]["content"]
        return Completion(prompt=prompt, text=text, ids=drawn.ids, ended=ended, row=line)

    def ended(self, drawn: Drawn) -> bool:
        """Whether a token ended a completion, and not the greatest length."""
        return bool(drawn.ids) and drawn.ids[-1] in self.stops


def weighted(loss: GRPO, scores: Mapping[str, Tensor]) -> Tensor:
    """Returns the sum of the scores of all rewards, times their weights, in the shape of each."""
    return torch.stack([loss.rewards[name].weight * values for name, values in scores.items()]).sum(0)


def _scored(name: str, reward: RewardComponent, completions: Sequence[Completion]) -> list[float]:
    # Apart where a reward scores them apart: the message about a failure then names the completion
    apart = type(reward).scores is RewardComponent.scores
    groups = [[completion] for completion in completions] if apart else [completions]
    scores = [score for group in groups for score in _scored_together(name, reward, group)]
    for score, completion in zip(scores, completions, strict=True):
        if not math.isfinite(score):
            raise ForgeError(f"loss.rewards.{name} scores {completion.text!r:.60} as {score}; rewards are finite")
    return scores


def _scored_together(name: str, reward: RewardComponent, group: Sequence[Completion]) -> list[float]:
    try:
        # `float` inside of the try: what is no number is reported with its completion, like a failure
        scores = [float(score) for score in reward.scores(group)]
    except Exception as error:
        place = f"the completion {group[0].text!r:.60} of {group[0].prompt!r:.60}"
        if len(group) > 1:
            place = f"{len(group)} completions, the first one {place.removeprefix('the completion ')}"
        raise ForgeError(f"loss.rewards.{name} fails on {place}: {type(error).__name__}: {error}") from error
    if len(scores) != len(group):
        raise ForgeError(f"loss.rewards.{name} gives {len(scores)} scores for {len(group)} completions")
    return scores
