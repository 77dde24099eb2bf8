"""Position encodings: rotary embeddings (`plain`), ways to extend their range, and none (`none`).

Each returns the angular frequency of every pair of dimensions: pair i of the R rotated dimensions of a head turns by
`frequency[i]` radians a position. Keys are named as in `rope_parameters` of Hugging Face configurations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt, le

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_transformer.kinds import RopeComponent

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class PlainRope(RopeComponent):
    """Rotary position embedding (Su et al. 2021), dimension i paired with i + R/2 of the R that are rotated."""

    theta: float = field(default=10000.0, validator=gt(1))
    """Base of the geometric series of wavelengths."""
    partial_rotary_factor: float = field(default=1.0, validator=[gt(0), le(1)])
    """Share of a head's dimensions that is rotated, the first ones; the others do not depend on the position (0.25 in
    GPT-NeoX and Pythia, 0.4 in Phi-2, 0.75 in Phi-4-mini). Rounded down to whole dimensions, which must be even."""

    def rotated(self, head_dim: int) -> int:
        """Returns R, the number of rotated dimensions of a head."""
        return int(head_dim * self.partial_rotary_factor)

    def width_problems(self, head_dim: int) -> Iterable[Problem]:
        """Checks that the rotated share of a head is an even number of dimensions, 2 or more."""
        rotated = self.rotated(head_dim)
        # Of a whole head that is odd, the attention reports the width
        if self.partial_rotary_factor < 1 and (rotated < 2 or rotated % 2):
            message = f"{self.partial_rotary_factor} of {head_dim} dimensions are {rotated}, which are no pairs"
            yield Problem("partial_rotary_factor", f"{message}; take a share that is an even number of dimensions")

    def frequencies(self, head_dim: int) -> list[float]:
        """Radians a position for each of the `head_dim / 2` pairs, fastest first; `head_dim` is the rotated width R."""
        return [self.theta ** (-pair / head_dim) for pair in range(0, head_dim, 2)]

    def amplitude(self) -> float:
        """Factor on cosine and sine; its square multiplies the rotated dimensions' part of every attention score."""
        return 1.0

    def build(self, context: BuildContext, head_dim: int) -> nn.Module:
        """Returns tables for the R rotated dimensions only; `rotate` leaves the others as they are."""
        return self._tables(context, self.rotated(head_dim))

    def _tables(self, context: BuildContext, rotated: int) -> nn.Module:
        from forge_plugin_transformer.modules.rotary import Rotary

        return Rotary(self.frequencies(rotated), amplitude=self.amplitude(), **_of_job(context))


@frozen(kw_only=True)
class LinearRope(PlainRope):
    """Positions divided by a factor (Chen et al. 2023, position interpolation)."""

    factor: float = field(validator=ge(1))
    """Ratio of the extended length to the length that the model was trained on."""

    def frequencies(self, head_dim: int) -> list[float]:
        """Divides all frequencies by `factor`, which equals dividing all positions by it."""
        return [frequency / self.factor for frequency in super().frequencies(head_dim)]


@frozen(kw_only=True)
class ProportionalRope(PlainRope):
    """Whole heads in which only the fastest pairs turn (p-RoPE, Barbero et al. 2024; Gemma 4).

    Dimension i is paired with i + E/2 of a head of width E, and pair i turns by theta^(-2i / E), as if all did. With
    `plain`, the pairs of a share are within that share, and have all wavelengths.
    """

    partial_rotary_factor: float = field(default=1.0, validator=[gt(0), le(1)])
    """Share of the pairs that turn, the fastest ones; the others do not depend on the position (0.25 in Gemma 4).
    Rounded down to whole pairs."""
    factor: float = field(default=1.0, validator=ge(1))
    """Divisor of all frequencies: the ratio of an extended length to the length that the model was trained on."""

    def rotated(self, head_dim: int) -> int:
        """Returns the width of the head: pairs that do not turn have a place in the tables."""
        return head_dim

    def width_problems(self, head_dim: int) -> Iterable[Problem]:
        """Checks that a pair turns."""
        if not self._turning(head_dim):
            message = f"{self.partial_rotary_factor} of {head_dim} dimensions are no pair"
            yield Problem("partial_rotary_factor", f'{message}; raise it, or take type = "none"')

    def frequencies(self, head_dim: int) -> list[float]:
        """Computes what `_compute_proportional_rope_parameters` of transformers does."""
        turning = self._turning(head_dim)
        return [
            frequency / self.factor if pair < turning else 0.0
            for pair, frequency in enumerate(super().frequencies(head_dim))
        ]

    def _turning(self, head_dim: int) -> int:
        return int(self.partial_rotary_factor * head_dim // 2)


@frozen(kw_only=True)
class Llama3Rope(PlainRope):
    """Slow frequencies divided by a factor, fast ones kept, those between interpolated (Llama 3.1)."""

    factor: float = field(default=8.0, validator=ge(1))
    """Divisor of the slow frequencies."""
    low_freq_factor: float = field(default=1.0, validator=gt(0))
    """Pairs that turn fewer times than this within the original length are slow."""
    high_freq_factor: float = field(default=4.0, validator=gt(0))
    """Pairs that turn more times than this within the original length are fast."""
    original_max_position_embeddings: int = field(default=8192, validator=gt(0))
    """Sequence length, in tokens, that the model was first trained on."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the order of the bounds."""
        if self.high_freq_factor < self.low_freq_factor:
            message = f"{self.high_freq_factor} must not be less than low_freq_factor, which is {self.low_freq_factor}"
            yield Problem("high_freq_factor", message)

    def frequencies(self, head_dim: int) -> list[float]:
        """Computes what `_compute_llama3_parameters` of transformers does."""
        return [self._stretch(frequency) for frequency in super().frequencies(head_dim)]

    def _stretch(self, frequency: float) -> float:
        # Turns and not wavelengths, as the two bounds are given; transformers' comparison of wavelengths is equivalent
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        if self.high_freq_factor == self.low_freq_factor:  # nothing is between the bounds (Llama 4)
            return frequency if turns >= self.low_freq_factor else frequency / self.factor
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _interpolate(frequency, self.factor, kept)


@frozen(kw_only=True)
class YarnRope(PlainRope):
    """Frequencies divided the more the slower they are, and sharpened attention (Peng et al. 2023, YaRN)."""

    factor: float = field(validator=ge(1))
    """Ratio of the extended length to the original length."""
    original_max_position_embeddings: int = field(validator=gt(0))
    """Sequence length, in tokens, that the model was first trained on."""
    beta_fast: float = field(default=32.0, validator=gt(0))
    """Pairs that turn more often than this within the original length keep their frequency."""
    beta_slow: float = field(default=1.0, validator=gt(0))
    """Pairs that turn less often than this within the original length are divided by the whole factor."""
    attention_factor: float = field(default=0.0, validator=ge(0))
    """Factor on cosine and sine; 0: from `factor` and, if both are set, `mscale` and `mscale_all_dim`."""
    mscale: float = field(default=0.0, validator=ge(0))
    """Weight of ln(factor) in the numerator of the derived attention factor; 0: 1, without a denominator."""
    mscale_all_dim: float = field(default=0.0, validator=ge(0))
    """Weight of ln(factor) in the denominator of the derived attention factor; 0: no denominator. Attention with a
    separate part for positions (`mla`) compensates for the denominator: there (0.1 mscale_all_dim ln(factor) + 1)²
    multiplies all scores."""
    truncate: bool = True
    """Whether the bounds of the ramp between kept and divided pairs are rounded outwards to whole pairs."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that kept pairs turn more often than divided ones, so that the ramp between them ascends."""
        if self.beta_fast <= self.beta_slow:
            yield Problem("beta_fast", f"{self.beta_fast} must be greater than beta_slow, which is {self.beta_slow}")

    def frequencies(self, head_dim: int) -> list[float]:
        """Computes what `_compute_yarn_parameters` of transformers does: a linear ramp over the pairs."""
        first, last = self._ramp(head_dim)
        # Equal bounds would divide by 0; the same number as in transformers
        span = (last - first) or 0.001
        plain = super().frequencies(head_dim)
        return [_interpolate(f, self.factor, 1 - (pair - first) / span) for pair, f in enumerate(plain)]

    def amplitude(self) -> float:
        """Returns the attention factor: as set, else 0.1 ln(factor) + 1, or its ratio for both `mscale` keys."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpening(self.mscale) / self._sharpening(self.mscale_all_dim)
        return self._sharpening(1.0)

    def score_factor(self) -> float:
        """Returns the square of the scale by `mscale_all_dim` (DeepSeek-V2, V3); 1 without it."""
        return self._sharpening(self.mscale_all_dim) ** 2

    def _sharpening(self, weight: float) -> float:
        # The paper's fit: attention is sharper the further the length is extended
        return 0.1 * weight * math.log(self.factor) + 1.0

    def _ramp(self, head_dim: int) -> tuple[float, float]:
        """Returns the pairs between which frequencies go from kept to divided."""
        first, last = (self._pair_turning(turns, head_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # By dimensions and not by pairs, as in transformers, whose checkpoints are trained with it
        return max(first, 0), min(last, head_dim - 1)

    def _pair_turning(self, turns: float, head_dim: int) -> float:
        """Returns the (fractional) number of the pair that makes `turns` turns within the original length."""
        # Pair i turns once in 2 pi theta^(2 i / R) positions: solved for i
        wavelength = self.original_max_position_embeddings / (2 * math.pi * turns)
        return head_dim * math.log(wavelength) / (2 * math.log(self.theta))


@frozen(kw_only=True)
class LongRope(PlainRope):
    """One divisor per frequency, with a second set for long sequences (Ding et al. 2024, LongRoPE).

    A sequence of more than `original_max_position_embeddings` positions is long, all of it. In training that is
    `train.seq_len`, whatever the lengths of packed documents; in generation it is what a row has reached, and the cache
    is recomputed when it becomes long, as in Phi-3.
    """

    short_factor: tuple[float, ...] = field(validator=deep_iterable(gt(0)))
    """Divisor of each pair's frequency in short sequences, fastest pair first: as many as there are pairs."""
    long_factor: tuple[float, ...] = field(validator=deep_iterable(gt(0)))
    """The same for long sequences."""
    original_max_position_embeddings: int = field(validator=gt(1))
    """Sequence length, in tokens, that the model was first trained on; longer sequences are long."""
    factor: float = field(validator=ge(1))
    """Ratio of the extended length to the original length: `max_position_embeddings` divided by
    `original_max_position_embeddings` of Phi-3's configurations."""
    attention_factor: float = field(default=0.0, validator=ge(0))
    """Factor on cosine and sine at any length; 0: sqrt(1 + ln(factor) / ln(original length))."""

    def width_problems(self, head_dim: int) -> Iterable[Problem]:
        """Checks that both lists have one factor for each rotated pair."""
        yield from super().width_problems(head_dim)
        pairs = self.rotated(head_dim) // 2
        for key in ("short_factor", "long_factor"):
            if (count := len(getattr(self, key))) != pairs:
                message = f"has {count} factors, but {2 * pairs} rotated dimensions of {head_dim} are {pairs} pairs"
                yield Problem(key, f"{message}; give one for each pair")

    def frequencies(self, head_dim: int, length: int = 0) -> list[float]:
        """As `PlainRope.frequencies`, for sequences of `length` positions; 0: short ones."""
        # One set for all positions: scores depend on distances only if query and key turn by the same frequencies
        factors = self.long_factor if length > self.original_max_position_embeddings else self.short_factor
        return [plain / factor for plain, factor in zip(super().frequencies(head_dim), factors, strict=True)]

    def amplitude(self) -> float:
        """Returns the attention factor, as set or derived: the same for short and for long sequences."""
        if self.attention_factor:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))

    def build(self, context: BuildContext, head_dim: int) -> nn.Module:
        """Returns tables of both ranges; raises `JobError` where a list has another number of factors."""
        if problems := list(self.width_problems(head_dim)):  # an import builds a model that no check has seen
            raise JobError(problem.below("model.attention.rope") for problem in problems)
        return super().build(context, head_dim)

    def _tables(self, context: BuildContext, rotated: int) -> nn.Module:
        from forge_plugin_transformer.modules.rotary import TwoRangeRotary

        limit, at = self.original_max_position_embeddings, partial(self.frequencies, rotated)
        return TwoRangeRotary(at, limit=limit, amplitude=self.amplitude(), **_of_job(context))


@frozen(kw_only=True)
class DynamicRope(PlainRope):
    """Wavelengths whose base grows with the length of a sequence beyond the original one (dynamic NTK scaling).

    In training the length is `train.seq_len`, whatever the lengths of packed documents. In generation it is what a row
    has reached; as in transformers, keys in the cache keep the base that they were computed with.
    """

    factor: float = field(validator=ge(1))
    """How fast the base grows: a sequence n times as long as the original one has the base
    theta x (factor n - (factor - 1)) ^ (R / (R - 2))."""
    original_max_position_embeddings: int = field(validator=gt(0))
    """Sequence length, in tokens, that the model was trained on: `max_position_embeddings` of configurations. Shorter
    sequences are encoded as by `plain`."""

    def width_problems(self, head_dim: int) -> Iterable[Problem]:
        """Checks that R > 2: the exponent R / (R - 2) of the base has no value for a single pair."""
        yield from super().width_problems(head_dim)
        if self.rotated(head_dim) <= 2:
            message = f"{self.rotated(head_dim)} rotated dimensions have one wavelength, which no base changes"
            yield Problem("", f"{message}; use plain, or wider heads")

    def frequencies(self, head_dim: int, length: int = 0) -> list[float]:
        """As `PlainRope.frequencies`, for sequences of `length` positions; 0: short ones."""
        base = self._base(head_dim, max(length, self.original_max_position_embeddings))
        return [base ** (-pair / head_dim) for pair in range(0, head_dim, 2)]

    def base_at(self, head_dim: int, lengths: Tensor) -> Tensor:
        """Returns the base for sequences of `lengths` (B,) positions."""
        # Up to the length of training, nothing is stretched
        return self._base(head_dim, lengths.clamp(min=self.original_max_position_embeddings))

    def _base(self, head_dim: int, length: Any) -> Any:
        # `length` is a number in training and a tensor (B,) in generation
        stretch = self.factor * length / self.original_max_position_embeddings - (self.factor - 1)
        return self.theta * stretch ** (head_dim / (head_dim - 2))

    def _tables(self, context: BuildContext, rotated: int) -> nn.Module:
        from forge_plugin_transformer.modules.rotary import GrowingBaseRotary

        at, base_at = partial(self.frequencies, rotated), partial(self.base_at, rotated)
        return GrowingBaseRotary(at, base_at, **_of_job(context))


@frozen(kw_only=True)
class NoRope(RopeComponent):
    """No encoding: only the causal mask conveys the order of positions (NoPE, Kazemnejad et al. 2023).

    For models with learned positions, and for single layers, as every fourth of SmolLM3.
    """

    def build(self, context: BuildContext, head_dim: int) -> nn.Module:
        """Returns an encoding without frequencies, whose tables of width 0 make `rotate` return its input."""
        from forge_plugin_transformer.modules.rotary import Rotary

        return Rotary((), amplitude=1.0, **_of_job(context))


def _of_job(context: BuildContext) -> dict[str, Any]:
    """Returns the arguments of `Rotary` that the job determines."""
    return {"length": context.job.train.seq_len, "dtype": context.dtype}


def _interpolate(frequency: float, factor: float, kept: float) -> float:
    """Returns a value between `frequency` (kept = 1) and `frequency / factor` (kept = 0); `kept` is clamped."""
    kept = min(max(kept, 0.0), 1.0)
    return frequency * (kept + (1 - kept) / factor)
