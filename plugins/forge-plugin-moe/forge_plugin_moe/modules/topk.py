"""Routers in which tokens choose experts.

Shapes: B sequences, S positions, D model width, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.routes import RouteReplay
from forge_plugin_moe.modules.balance import CHOSEN, Balance, set_means
from forge_plugin_moe.modules.scores import LinearScores

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Fill
    from forge_plugin_moe.moe import SigmoidTopK, SoftmaxTopK, TopKRouter


BIAS = "moe/bias"
"""Counter of the bias of each expert."""


class TopKModule(LinearScores):
    """Base of the softmax and sigmoid top-k routers."""

    def __init__(
        self,
        component: TopKRouter,
        context: BuildContext,
        dim: int,
        experts: int,
        counted: bool = False,
        sets: Sequence[int] = (),
    ) -> None:
        super().__init__(component, context, dim, experts)
        self.component = component
        self.experts_per_token = component.top_k
        self.balance = Balance(component, context, experts, counted, sets)
        self.replay = RouteReplay(context)

    def select(self, preferences: Tensor) -> Tensor:
        """(B, S, E) to the K preferred experts in a token's best groups, (B, S, K)."""
        groups, best = self.component.groups, self.component.top_groups
        if best < groups:
            members = preferences.unflatten(-1, (groups, -1))
            chosen = self.group_scores(members).topk(best, dim=-1).indices
            closed = torch.ones(members.shape[:-1], dtype=torch.bool, device=members.device).scatter(-1, chosen, False)
            preferences = members.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)
        return preferences.topk(self.component.top_k, dim=-1).indices

    def group_scores(self, members: Tensor) -> Tensor:
        """(B, S, G, E / G) to (B, S, G)."""
        raise NotImplementedError


class SoftmaxRouter(TopKModule):
    """See `forge_plugin_moe.SoftmaxTopK`."""

    component: SoftmaxTopK
    bias: Tensor | None

    def __init__(
        self,
        component: SoftmaxTopK,
        context: BuildContext,
        dim: int,
        experts: int,
        counted: bool = False,
        sets: Sequence[int] = (),
    ) -> None:
        super().__init__(component, context, dim, experts, counted, sets)
        self.bias = nn.Parameter(torch.empty(experts)) if component.bias else None
        self.scale = nn.Parameter(torch.empty(dim)) if component.input_norm else None
        self.expert_scale = nn.Parameter(torch.empty(experts)) if component.expert_scale else None

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fills the bias with 0, and factors with 1."""
        if name == "weight":
            super().init_parameter(name, fill)
        else:
            fill.constant(0.0 if name == "bias" else 1.0)

    def linear(self, x: Tensor) -> Tensor:
        """Adds the learned bias, which is rounded to the dtype of x like the weight."""
        if self.scale is not None:
            scale = self.scale.to(x.dtype) * x.shape[-1] ** -0.5
            x = F.rms_norm(x, x.shape[-1:], eps=self.component.input_norm_eps) * scale
        logits = super().linear(x)
        return logits if self.bias is None else logits + self.bias.to(x.dtype)  # rounded like the weight

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns weights and numbers of each token's K experts, (B, S, K), with the losses attached."""
        logits = self.logits(x)
        probabilities = logits.softmax(-1)
        chosen = self.replay(self.select(probabilities.detach()), batch)
        # The softmax over the chosen logits equals their probabilities divided by their sum, and is more exact
        if self.component.normalise == "after":
            weights = logits.gather(-1, chosen).softmax(-1)
        else:
            weights = probabilities.gather(-1, chosen)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale.to(x.dtype)[chosen]
        weights = self.penalise(weights * self.component.scaling, logits)
        return self.balance(weights, probabilities, chosen), chosen

    def group_scores(self, members: Tensor) -> Tensor:
        """The best member's score (DeepSeek-V2)."""
        return members.amax(-1)


class SigmoidRouter(TopKModule):
    """See `forge_plugin_moe.SigmoidTopK`.

    Args:
        component: the keys.
        context: of the router.
        dim: D.
        experts: E.
        sets: sizes of the sets of consecutive experts that are balanced each by itself; by default there is one.
    """

    component: SigmoidTopK
    bias: Tensor | None

    def __init__(
        self, component: SigmoidTopK, context: BuildContext, dim: int, experts: int, sets: Sequence[int] = ()
    ) -> None:
        moves = component.correction_bias and component.bias_rate > 0
        super().__init__(component, context, dim, experts, moves, sets)
        self.moves = moves
        self.register_buffer("bias", torch.empty(experts) if component.correction_bias else None)
        if component.correction_bias:
            context.auxiliary.summarise(BIAS, summarise_bias)
            self._biases = context.auxiliary.counter(BIAS, self.layer, unit="layer")

    def init_buffers(self, device: torch.device) -> None:
        """Starts with biases of 0."""
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns weights and numbers of each token's K experts, (B, S, K), with the losses attached."""
        logits = self.logits(x)
        soft = self.component.score_function == "softmax"
        return self.route(logits, logits.softmax(-1) if soft else logits.sigmoid(), batch)

    def route(
        self, logits: Tensor, scores: Tensor, batch: Batch, closed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the weights and numbers of each token's K experts, (B, S, K), with the losses attached.

        Args:
            logits: (B, S, E), for the z-loss.
            scores: (B, S, E), sigmoid of the logits; 0 where closed.
            batch: may have recorded choices.
            closed: (B, S, E), bool, experts that a token does not choose; None: there are none. A token with fewer than
                K others has closed ones too, with weights of 0, which no loss and no bias counts.
        """
        preferences = scores.detach()
        if self.bias is not None:
            self._biases.add(self.bias)
            # The bias takes part in the choice only: weights are gathered from the scores
            preferences = preferences + self.bias
        if closed is not None:
            preferences = preferences.masked_fill(closed, -torch.inf)
        chosen = self.replay(self.select(preferences), batch)
        weights = scores.gather(-1, chosen)
        if self.component.normalise:
            # Sigmoids may all round to 0
            weights = weights / (weights.sum(-1, keepdim=True) + self.component.normalise_eps)
        weights = self.penalise(weights * self.component.scaling, logits)
        shares = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
        counted = chosen if closed is None else chosen.masked_fill(closed.gather(-1, chosen), -1)
        return self.balance(weights, shares, counted), chosen

    def group_scores(self, members: Tensor) -> Tensor:
        """The sum of the two best members' scores (DeepSeek-V3)."""
        return members.topk(min(2, members.shape[-1]), dim=-1).values.sum(-1)

    def after_update(self) -> None:
        """Raise the bias of experts with less than the mean load of their set, and lower the bias of others."""
        if self.moves:
            assert self.bias is not None
            load = self.auxiliary.counted(CHOSEN, self.layer)
            # By the sign, so that a step does not depend on the number of tokens (Wang et al. 2024)
            missing = set_means(load, self.balance.sets) - load
            self.bias += self.component.bias_rate * missing.sign().to(self.bias.dtype)


def summarise_bias(rows: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
    """Returns the largest range of the biases of a layer."""
    return {"moe/bias_range": torch.stack([bias.max() - bias.min() for bias in rows.values()]).max()}
