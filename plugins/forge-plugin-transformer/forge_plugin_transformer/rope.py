"""Position encodings `plain`, `linear`, `llama3` and `yarn`: rotary embeddings, and ways to extend their range.

Each returns the angular frequency of every pair of dimensions: pair i of a head of width E turns by `frequency[i]`
radians a position. Keys are named as in `rope_parameters` of Hugging Face configurations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.errors import Problem
from forge_plugin_transformer.kinds import RopeComponent

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class PlainRope(RopeComponent):
    """Rotary position embedding (Su et al. 2021), dimension i paired with i + E/2."""

    theta: float = field(default=10000.0, validator=gt(1))
    """Base of the geometric series of wavelengths."""

    def frequencies(self, head_dim: int) -> list[float]:
        """Radians a position for each of the `head_dim / 2` pairs, fastest first."""
        return [self.theta ** (-pair / head_dim) for pair in range(0, head_dim, 2)]

    def amplitude(self) -> float:
        """Factor on cosine and sine; its square multiplies every attention score."""
        return 1.0

    def build(self, context: BuildContext, head_dim: int) -> nn.Module:
        from forge_plugin_transformer.modules.rotary import Rotary

        frequencies = self.frequencies(head_dim)
        return Rotary(frequencies, amplitude=self.amplitude(), length=context.job.train.seq_len, dtype=context.dtype)


@frozen(kw_only=True)
class LinearRope(PlainRope):
    """Positions divided by a factor (Chen et al. 2023, position interpolation)."""

    factor: float = field(validator=ge(1))
    """Ratio of the extended length to the length that the model was trained on."""

    def frequencies(self, head_dim: int) -> list[float]:
        return [frequency / self.factor for frequency in super().frequencies(head_dim)]


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
        if self.high_freq_factor <= self.low_freq_factor:
            message = f"{self.high_freq_factor} must be greater than low_freq_factor, which is {self.low_freq_factor}"
            yield Problem("high_freq_factor", message)

    def frequencies(self, head_dim: int) -> list[float]:
        return [self._stretch(frequency) for frequency in super().frequencies(head_dim)]

    def _stretch(self, frequency: float) -> float:
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
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
    """Weight of ln(factor) in the denominator of the derived attention factor; 0: no denominator. Attention that
    rotates a part of each head (`mla`) compensates for the denominator: there (0.1 mscale_all_dim ln(factor) + 1)²
    multiplies all scores."""
    truncate: bool = True
    """Whether the bounds of the ramp between kept and divided pairs are rounded outwards to whole pairs."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.beta_fast <= self.beta_slow:
            yield Problem("beta_fast", f"{self.beta_fast} must be greater than beta_slow, which is {self.beta_slow}")

    def frequencies(self, head_dim: int) -> list[float]:
        first, last = self._ramp(head_dim)
        span = (last - first) or 0.001
        plain = super().frequencies(head_dim)
        return [_interpolate(f, self.factor, 1 - (pair - first) / span) for pair, f in enumerate(plain)]

    def amplitude(self) -> float:
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpening(self.mscale) / self._sharpening(self.mscale_all_dim)
        return self._sharpening(1.0)

    def score_factor(self) -> float:
        """Returns the square of the scale by `mscale_all_dim` (DeepSeek-V2, V3); 1 without it."""
        return self._sharpening(self.mscale_all_dim) ** 2

    def _sharpening(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    def _ramp(self, head_dim: int) -> tuple[float, float]:
        """Returns the pairs between which frequencies go from kept to divided."""
        first, last = (self._pair_turning(turns, head_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        return max(first, 0), min(last, head_dim - 1)

    def _pair_turning(self, turns: float, head_dim: int) -> float:
        """Returns the (fractional) number of the pair that makes `turns` turns within the original length."""
        wavelength = self.original_max_position_embeddings / (2 * math.pi * turns)
        return head_dim * math.log(wavelength) / (2 * math.log(self.theta))


def _interpolate(frequency: float, factor: float, kept: float) -> float:
    """Returns a value between `frequency` (kept = 1) and `frequency / factor` (kept = 0); `kept` is clamped."""
    kept = min(max(kept, 0.0), 1.0)
    return frequency * (kept + (1 - kept) / factor)
