"""Losses over pairs: `dpo`, `ipo`, `simpo`, `orpo`. In the formulas, y+ is the chosen answer to x and y- the rejected.

r(y) = log p(y|x) - log p_reference(y|x), |y| the tokens of an answer, and σ the logistic function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import and_, ge, gt, lt

from forge_plugin_preference.base import PairLoss, ReferencePairLoss

if TYPE_CHECKING:
    from torch import Tensor

    from forge_plugin_preference.answers import Answers


@frozen(kw_only=True)
class DPO(ReferencePairLoss):
    """Direct preference optimisation: -log σ(β (r(y+) - r(y-))) (Rafailov et al. 2023, equation 7).

    With label smoothing ε it is -(1 - ε) log σ(z) - ε log σ(-z), z the argument above (conservative DPO, Mitchell
    2023). `nll_weight` adds the cross-entropy of the chosen answer by token (Pang et al. 2024, equation 1), logged as
    `loss/nll`. The first loss is ln 2. Rewards are β r.
    """

    beta: float = field(default=0.1, validator=gt(0))
    """β, per nat: how strongly the model is held to the reference."""
    label_smoothing: float = field(default=0.0, validator=and_(ge(0.0), lt(0.5)))
    """ε: the share of pairs that are assumed to be labelled the wrong way round."""
    nll_weight: float = field(default=0.0, validator=ge(0))
    """Weight of the cross-entropy of the chosen answer, in nats a token, averaged over pairs."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        from torch.nn.functional import logsigmoid

        margins = self.rewards(chosen) - self.rewards(rejected)
        losses = -logsigmoid(margins)
        return losses.lerp(-logsigmoid(-margins), self.label_smoothing) if self.label_smoothing else losses

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.log_ratio

    def further(self, chosen: Answers, rejected: Answers) -> Mapping[str, tuple[float, Tensor]]:
        return {"loss/nll": (self.nll_weight, -chosen.mean_log_p)} if self.nll_weight else {}

    def first_loss(self, metrics: Mapping[str, float]) -> float:
        return math.log(2)


@frozen(kw_only=True)
class IPO(ReferencePairLoss):
    """Identity preference optimisation: (r(y+) - r(y-) - 1 / 2β)² (Azar et al. 2023, equation 17, β there τ).

    r is divided by |y| (`by_token`), which the paper does not write, and which its authors confirmed to the authors of
    TRL as what they had computed. The first loss is 1 / 4β². Rewards are β r.
    """

    beta: float = field(default=0.1, validator=gt(0))
    """β, per nat (a token): the smaller, the larger the margin of 1 / 2β that is aimed at."""
    by_token: bool = True
    """Whether r is the mean over the tokens of an answer; false: their sum."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        return (self._ratio(chosen) - self._ratio(rejected) - 1 / (2 * self.beta)).square()

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * self._ratio(answers)

    def _ratio(self, answers: Answers) -> Tensor:
        return answers.mean_log_ratio if self.by_token else answers.log_ratio

    def first_loss(self, metrics: Mapping[str, float]) -> float:
        return 1 / (4 * self.beta**2)


@frozen(kw_only=True)
class SimPO(PairLoss):
    """Simple preference optimisation: -log σ(β log p(y+)/|y+| - β log p(y-)/|y-| - γ) (Meng et al. 2024, equation 6).

    It needs no reference. Rewards are β log p(y)/|y|.
    """

    beta: float = field(default=2.0, validator=gt(0))
    """β, per nat a token: scale of the rewards; the paper takes 2 to 10."""
    gamma: float = field(default=1.0, validator=ge(0))
    """γ: the margin between the two rewards that is aimed at; the paper takes 0.3 to 1.6. TRL's `simpo_gamma`."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        from torch.nn.functional import logsigmoid

        return -logsigmoid(self.rewards(chosen) - self.rewards(rejected) - self.gamma)

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.mean_log_p


@frozen(kw_only=True)
class ORPO(PairLoss):
    """Odds ratio preference optimisation: NLL(y+) - λ log σ(log odds(y+) - log odds(y-)) (Hong et al. 2024, eq. 6, 7).

    odds(y) = P / (1 - P) with log P = log p(y|x)/|y|, and NLL(y+) = -log P(y+), of the answer alone: TRL also learns
    the prompt. It needs no reference and no supervised fine-tuning before it. `loss/nll` and `loss/odds_ratio` are
    logged apart. Rewards are λ log P.
    """

    beta: float = field(default=0.1, validator=gt(0))
    """λ: weight of the odds ratio beside the cross-entropy. Called β in TRL."""

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        return -chosen.mean_log_p + self.beta * self._odds_ratio(chosen, rejected)

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.mean_log_p

    def further(self, chosen: Answers, rejected: Answers) -> Mapping[str, tuple[float, Tensor]]:
        # Weight 0: both are in `losses` already, and are only logged
        odds_ratio = self._odds_ratio(chosen, rejected)
        return {"loss/nll": (0.0, -chosen.mean_log_p), "loss/odds_ratio": (0.0, odds_ratio)}

    def _odds_ratio(self, chosen: Answers, rejected: Answers) -> Tensor:
        from torch.nn.functional import logsigmoid

        return -logsigmoid(_log_odds(chosen.mean_log_p) - _log_odds(rejected.mean_log_p))


def _log_odds(log_p: Tensor) -> Tensor:
    """log(P / (1 - P)), finite also where P rounds to 1."""
    # expm1 keeps the digits of 1 - P where P is near 1; P = 1 itself has no finite odds
    log_p = log_p.clamp(max=-_epsilon(log_p))
    return log_p - (-log_p.expm1()).log()


def _epsilon(values: Tensor) -> float:
    import torch

    return torch.finfo(values.dtype).eps
