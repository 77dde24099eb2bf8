"""Rules: how a key of the job follows from parameters, tokens and batch. Kind `rule`."""

from __future__ import annotations

import math
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import gt

from forge_core import Component


@frozen(kw_only=True)
class Scale:
    """What a rule is a function of."""

    parameters: float
    """Without embedding and head."""
    parameters_total: float
    tokens: float
    """That the run is trained on."""
    batch_tokens: float
    """Tokens of a step; NaN for the rule of the batch itself."""
    seq_len: int


@frozen(kw_only=True)
class Rule(Component):
    """The value of a key of the job at a scale."""

    kind = "rule"

    source: ClassVar[str] = ""
    """Paper and equation; empty: none."""

    def value(self, scale: Scale) -> float:
        """Returns the value of the key."""
        raise NotImplementedError

    def warning(self, scale: Scale) -> str:
        """Returns why the rule is doubtful at this scale, as it was measured elsewhere; empty if it was not."""
        return ""


@frozen(kw_only=True)
class Fixed(Rule):
    """The same value at every scale."""

    to: float
    """The value, in the key's own unit."""

    def value(self, scale: Scale) -> float:
        return self.to


@frozen(kw_only=True)
class Power(Rule):
    """`at_reference` times powers of what the scale is relative to a reference."""

    at_reference: float = field(validator=gt(0))
    """Value at the reference's sizes."""
    parameters: float = field(default=1.0, validator=gt(0))
    """Parameters of the reference, without embedding and head."""
    tokens: float = field(default=1.0, validator=gt(0))
    """Tokens of the reference."""
    batch_tokens: float = field(default=1.0, validator=gt(0))
    """Tokens a step of the reference."""
    by_parameters: float = 0.0
    """Exponent of parameters."""
    by_tokens: float = 0.0
    """Exponent of tokens."""
    by_batch: float = 0.0
    """Exponent of tokens a step."""

    def value(self, scale: Scale) -> float:
        # Exponents of 0 are left out: the batch's own rule has no batch, and NaN ** 0 is 1 but hides the mistake
        factors = (
            (scale.parameters / self.parameters, self.by_parameters),
            (scale.tokens / self.tokens, self.by_tokens),
            (scale.batch_tokens / self.batch_tokens, self.by_batch),
        )
        return self.at_reference * math.prod(ratio**exponent for ratio, exponent in factors if exponent)


@frozen(kw_only=True)
class SqrtBatch(Rule):
    """`at_reference` times the square root of the batch relative to a reference: for rates of Adam's kind."""

    source = "Malladi et al. 2022 (arXiv:2205.10287), square root scaling rule"

    at_reference: float = field(validator=gt(0))
    """Value at the reference."""
    batch_tokens: float = field(validator=gt(0))
    """Tokens a step of the reference."""

    def value(self, scale: Scale) -> float:
        return self.at_reference * math.sqrt(scale.batch_tokens / self.batch_tokens)


@frozen(kw_only=True)
class PowerLines(Rule):
    """Sequences a step that grow with tokens ** 0.383, whatever the model's size."""

    source = "Bergsma et al. 2025 (arXiv:2505.13738)"

    at_reference: float = field(validator=gt(0))
    """Sequences a step at the reference."""
    tokens: float = field(validator=gt(0))
    """Tokens of the reference."""

    def value(self, scale: Scale) -> float:
        return self.at_reference * (scale.tokens / self.tokens) ** 0.383


class _StepLaw(Rule):
    """Where the Step Law was measured."""

    source = "Li et al. 2025 (arXiv:2503.04715), Step Law"

    def warning(self, scale: Scale) -> str:
        # Both ends as the paper's tables have them
        if 6e7 <= scale.parameters <= 1.1e9 and 2e9 <= scale.tokens <= 1e11:
            return ""
        return "the Step Law was measured from 60M to 1B parameters and from 2B to 100B tokens"


@frozen(kw_only=True)
class StepLawRate(_StepLaw):
    """1.79 N^-0.713 D^0.307: peak rates of AdamW, by parameters without embeddings and tokens."""

    def value(self, scale: Scale) -> float:
        return 1.79 * scale.parameters**-0.713 * scale.tokens**0.307


@frozen(kw_only=True)
class StepLawBatch(_StepLaw):
    """0.58 D^0.571 tokens a step, as sequences."""

    def value(self, scale: Scale) -> float:
        return 0.58 * scale.tokens**0.571 / scale.seq_len
