"""Self-speculation: a model's own modules propose tokens, which the model then reads at once (Leviathan et al. 2023).

Each token is drawn from the logits of the model itself, and a proposal only counts if it is that token. So the text is
the one without proposals, whatever the temperature, up to the rounding of logits of several positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_kit.nn.generation import (
    AsksForPrompt,
    DraftsTokens,
    ForgetsPositions,
    Generates,
    WholeModel,
    joint_generation,
    whole_logits,
)
from forge_plugin_generate.generate import Draws, Sampling, check_cache
from forge_plugin_generate.running_rows import RowEnd


@define
class Speculated:
    """What was generated, and how often the model was called for it."""

    rows: list[list[int]] = field(factory=list)
    """New tokens of each prompt."""
    calls: int = 0
    """Of the model, one for each prompt included."""
    proposed: int = 0
    accepted: int = 0
    """Proposals that were the tokens of the model."""

    @property
    def accepted_length(self) -> float:
        """Tokens that a call of the model gives on average: 1 without accepted proposals."""
        return 1 + self.accepted / self.calls if self.calls else 1.0

    def facts(self) -> dict[str, float]:
        """Returns the numbers by name, for JSON."""
        counts = {"calls": self.calls, "proposed": self.proposed, "accepted": self.accepted}
        return {**counts, "accepted_length": self.accepted_length}

    def __str__(self) -> str:
        share = f"{self.accepted} of {self.proposed} proposals accepted"
        return f"{self.accepted_length:.2f} tokens a call of the model ({self.calls} calls, {share})"


@torch.no_grad()
def speculate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stops: Sequence[int],
    sampling: Sampling | None = None,
    *,
    until: Callable[[Sequence[int]], bool] | None = None,
    seed: int | None = None,
) -> Speculated:
    """Continue each prompt by itself, as `forge_plugin_generate.generate.generate` does, with fewer calls of the model.

    Args:
        model: a `forge_kit.nn.generation.DraftsTokens` in evaluation mode, in one process.
        prompts: token ids, none empty; several only at temperature 0, as draws of a batch are made together.
        max_tokens: upper bound of the new tokens of each.
        stops: ids at which a row ends, which do not belong to it.
        sampling: settings of the draws; by default `Sampling()`.
        until: is called with the new tokens of a row after each, and returns whether it ends with them.
        seed: seed of the draws; None: torch's default generator.

    Raises:
        ForgeError: the model has no modules that propose tokens, ranks share it, its caches cannot forget a token, it
            reads images, or several prompts are drawn.
    """
    sampling = sampling or Sampling()
    _check(model, prompts, sampling)
    check_cache(model)
    result, end = Speculated(), RowEnd(stops, max_tokens, until)
    for prompt in prompts:
        draws = Draws(sampling, seed, 1, next(model.parameters()).device)
        result.rows.append(_Row(model, prompt, end, draws, result).run())
    return result


def _check(model: Any, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    name = type(model).__name__
    if not prompts or not all(prompts):
        raise ForgeError("there is no prompt, or an empty one; pass at least one token")
    if not isinstance(model, Generates) or not isinstance(model, DraftsTokens) or not model.draft_length:
        message = f"{name} has no modules that predict tokens after the next, and so proposes none"
        raise ForgeError(f"{message}; train with [model.mtp], or generate without speculation")
    joint = joint_generation(model)
    if not isinstance(joint, WholeModel):
        raise ForgeError("ranks that share a model do not propose tokens together; use one process")
    if isinstance(model, AsksForPrompt):
        raise ForgeError(f"{name} attends differently to a prompt than to what follows, which proposals do not know of")
    if joint.cache_limits():
        raise ForgeError("the encoding of positions voids caches (dynamic), whose last token could not be forgotten")
    if len(prompts) > 1 and sampling.temperature:
        raise ForgeError("several prompts are drawn together, and proposals belong to one: use temperature 0, or one")


class _Row:
    """The generation of one row."""

    def __init__(self, model: Any, prompt: Sequence[int], end: RowEnd, draws: Draws, counts: Speculated) -> None:
        self._model, self._end, self._draws, self._counts = model, end, draws, counts
        self._ids, self._start = list(prompt), len(prompt)
        length = len(prompt) + end.max_tokens
        self._cache, self._drafter = model.new_cache(1, length), model.new_drafter(length)
        if not isinstance(self._cache, ForgetsPositions):
            raise ForgeError(f"{type(self._cache).__name__} of {type(model).__name__} cannot forget a token")
        if self._cache.forgets:
            message = f"a proposal that is not accepted must be forgotten, and {self._cache.forgets}"
            raise ForgeError(f"{message}; generate without speculation")

    def run(self) -> list[int]:
        read, drafts, device = 0, list[int](), next(self._model.parameters()).device
        while self._end.max_tokens:
            new = [*self._ids[read:], *drafts]
            positions = torch.arange(read, read + len(new), device=device)[None]
            hidden = self._model.decode(
                {"input_ids": torch.tensor([new], device=device), "positions": positions}, self._cache
            )
            self._counts.calls += 1
            # From the last known token on: logits for each proposal, and for one token more
            accepted = self._take(whole_logits(self._model.head, hidden[:, -1 - len(drafts) :]), drafts)
            if accepted is None:
                break
            self._cache.forget(len(drafts) - accepted)
            # The last token was drawn just now, and no cache has its position
            read = len(self._ids) - 1
            # Behind the last token that may be written, none counts
            room = self._end.max_tokens - (len(self._ids) - self._start) - 1
            states = hidden[:, : len(new) - (len(drafts) - accepted)]
            drafts = self._drafter(states, self._ids)[:room] if room else []
            self._counts.proposed += len(drafts)
        return self._ids[self._start :]

    def _take(self, logits: Tensor, drafts: Sequence[int]) -> int | None:
        """Draw tokens from logits (1, 1 + K, V) as long as they are the K proposals, and one more.

        Returns how many were proposals; None: the row has ended.
        """
        for place in range(logits.shape[1]):
            token = int(self._draws(logits[:, place], [0]))
            proposed = place < len(drafts) and token == drafts[place]
            if token in self._end.stops:
                return None
            self._ids.append(token)
            self._counts.accepted += proposed
            if self._end.is_reached(self._ids[self._start :]):
                return None
            # What follows was computed behind a token that was not drawn
            if not proposed:
                break
        return place
