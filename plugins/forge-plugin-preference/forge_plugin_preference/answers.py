"""What a preference loss is a function of, and the entries of batches that it is read from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

KINDS = "answers"
"""Entry of a batch, (B, 1, E) int64: what the document with each id is, see the constants below. E is odd: the last id
is of the padding, and a pair has the ids 2p (chosen) and 2p + 1 (rejected)."""
CHOSEN, REJECTED, ABSENT = 1, -1, 0
REFERENCE = "reference_log_p"
"""Entry (B, 1, E) float64: log-probabilities of the answers under the reference, where the data have them."""
MISMATCHED = "mismatched"
"""Entry (B, 4, S) int64: `input_ids`, `labels`, `document_ids` and `positions` of prompts with answers to others."""
BASELINE = "kto_baseline"
"""Entry (B,) that `kto` adds: the reference point of this step."""

MARGINS = "margins"
"""Entry (B, 1, E) float64: of each chosen answer, by how much it is better, where the loss takes it from the data."""
LOSSES = '"dpo", "ipo", "simpo", "orpo", "kto" or "bradley_terry"'
"""The losses that learn from answers, for errors."""

# Entries of documents have a dimension of 1 at the place of positions: a stage that divides sequences finds by their
# length which entries it must divide.


@frozen(eq=False)
class Answers:
    """N answers, one for each example. All tensors are (N,), float32 or wider.

    Where there are fewer answers than places for them, their values are arbitrary finite numbers, and what a loss makes
    of them is left out.
    """

    log_p: Tensor
    """log p of the whole answer under the policy: the sum over its tokens, in nats; differentiable."""
    tokens: Tensor
    """How many tokens that are, at least 1; the end of the answer is one of them."""
    reference: Tensor | None = None
    """As `log_p`, under the reference; None of a loss without one."""

    @property
    def log_ratio(self) -> Tensor:
        """The difference log p - log p_reference, in nats."""
        assert self.reference is not None, "a loss that uses the reference derives from ReferencePairLoss"
        return self.log_p - self.reference

    @property
    def mean_log_p(self) -> Tensor:
        """The mean of log p over the tokens of the answer, in nats."""
        return self.log_p / self.tokens

    @property
    def mean_log_ratio(self) -> Tensor:
        """The mean of log p - log p_reference over the tokens of the answer, in nats."""
        return self.log_ratio / self.tokens
