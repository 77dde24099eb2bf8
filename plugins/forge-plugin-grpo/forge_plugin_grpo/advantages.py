"""Advantages of completions over the others of their group. Shapes: P prompts, G completions of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from forge_plugin_grpo.grpo import Algorithm

EPSILON = 1e-4
"""Added to standard deviations, as in TRL."""


def standardised(rewards: Tensor) -> Tensor:
    """(r - mean) / (standard deviation + epsilon) of each group (Shao et al. 2024, section 4.1.2): (P, G) to (P, G)."""
    return centred(rewards) / (rewards.std(1, keepdim=True) + EPSILON)


def centred(rewards: Tensor) -> Tensor:
    """Rewards minus the mean of their group, without weight for its spread (Dr. GRPO, Liu et al. 2025)."""
    return rewards - rewards.mean(1, keepdim=True)


def left_out(rewards: Tensor) -> Tensor:
    """Rewards minus the mean of the others of their group (RLOO, Ahmadian et al. 2024, equation 7)."""
    # r - (sum - r) / (G - 1) is (r - mean) G / (G - 1)
    size = rewards.shape[1]
    return centred(rewards) * (size / (size - 1))


ADVANTAGES: Mapping[Algorithm, Callable[[Tensor], Tensor]] = {
    "grpo": standardised,
    "dapo": standardised,
    "gspo": standardised,
    "dr_grpo": centred,
    "rloo": left_out,
}
