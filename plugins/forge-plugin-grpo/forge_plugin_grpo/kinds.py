"""The kinds `reward` and `rollout`: what scores completions, and what draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from forge_core import Component

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model


@frozen(kw_only=True)
class Completion:
    """A text that the model has written after a prompt."""

    prompt: str
    text: str
    """Without the token that ended it."""
    ids: Sequence[int]
    """Its tokens as they were drawn, the one that ended it included."""
    ended: bool
    """Whether such a token ended it, and not the greatest length."""
    row: Mapping[str, Any]
    """The line of the data that the prompt is from, with all of its keys: an answer to compare with, for instance."""


@frozen(kw_only=True)
class RewardComponent(Component["RewardComponent"]):
    """Scores completions. Derive, add keys, and write `score`; no other method is needed.

        @frozen(kw_only=True)
        class Short(RewardComponent):
            \"\"\"1 for a text that ends within `most` characters.\"\"\"

            most: int = 80

            def score(self, completion):
                return float(completion.ended and len(completion.text) <= self.most)

    It may depend on its completion and keys alone: ranks that share a prompt each compute it, and must agree.
    """

    kind = "reward"
    resumes_as = "flag"

    weight: float = 1.0
    """Factor of its scores in the sum over all rewards."""

    def score(self, completion: Completion) -> float:
        """Returns a finite number, larger for better completions."""
        raise NotImplementedError

    def scores(self, completions: Sequence[Completion]) -> Sequence[float]:
        """Returns the score of each; by default `score` of one after the other. Override it to score them together.

        All completions that a rank draws at a time are given at once, in the order of their prompts.
        """
        return [self.score(completion) for completion in completions]

    def row_fault(self, row: Mapping[str, Any]) -> str:
        """Returns what a line of the data lacks to be scored; empty if nothing. Called for each before training."""
        return ""


class Drawn(Protocol):
    """Tokens of a completion, each with the log-probability by which it was drawn, in the sampler's own precision.

    `loss.replay_routes` also reads `routes`, the experts of its tokens: see `forge_plugin_generate.sample.Sampled`.
    """

    @property
    def ids(self) -> Sequence[int]:
        """With the one that ended it, if one did."""
        ...

    @property
    def log_p(self) -> Sequence[float]:
        """By the model itself, at temperature 1 and among all tokens."""
        ...


class Sampler(Protocol):
    """Draws completions."""

    def __call__(self, model: Model, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Sequence[Drawn]:
        """Returns a completion of each prompt (token ids), drawn by its seed: token ids, never text again.

        Every rank calls this at the same time: ranks that share samples with the same prompts and seeds, and they must
        return the same. `model` is in evaluation mode.
        """
        ...


@frozen(kw_only=True)
class RolloutComponent(Component["Sampler"]):
    """Builds a `Sampler`: the engine's own generation by default, or a client of a server."""

    kind = "rollout"
    resumes_as = "flag"

    def build(self, context: BuildContext, max_tokens: int, stops: Sequence[int]) -> Sampler:  # type: ignore[override]
        """Returns a sampler of completions of at most `max_tokens` tokens, that one of `stops` ends."""
        raise NotImplementedError
