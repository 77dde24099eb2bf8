"""The component `moma` (kind `router`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, optional

from forge_core.contracts.errors import Problem
from forge_kit.optim.fields import TRAINING_ONLY
from forge_plugin_moe.moe import BalancedRouter, SigmoidTopK, isolation_problem

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

MODALITIES = ("text", "image", "video", "sound")
"""Modalities by name. `input_ids` of at least 0 are text; n below 0, the n-th of the others."""
PATCHES = "patches"
"""Entry of batches that a model takes whose sequences have positions of images or videos."""
BALANCE = ("sequence_balance", "batch_balance", "micro_batch_balance")
OF_TOKENS = ("top_k", "normalise", "bias_rate", *BALANCE)
"""Keys for tokens that choose."""
OF_EXPERTS = ("capacity_factor", "auxiliary_weight")
"""Keys for experts that choose."""


@frozen(kw_only=True)
class MoMa(BalancedRouter):
    """Experts in groups, one for each modality, that compute positions of their modality only (MoMa, arXiv 2407.21770).

    The weight of an expert is the sigmoid of its score (equation 1). `input_ids` tell a position's modality: at least 0
    is text, -1 an image, -2 a video, -3 sound. A position of a modality without experts goes through no routed expert.

    tokens: each position chooses the `top_k` experts of its group with the largest scores. What decides is the position
    alone, so the model generates as it was trained.

    experts: each expert takes the positions of its modality with the largest scores, as many as the other experts of
    its group (section 2.2), within a sequence; the paper chooses within a batch. The choice depends on later positions,
    so evaluation and generation follow auxiliary routers, which learn to predict it from the position alone (section
    2.4): an expert computes the positions for which they predict more than 0.5. They are trained along with the model,
    and their gradients flow nowhere else.

    State: with `choose = "tokens"`, a bias for each expert, saved and never touched by the optimizer.
    """

    experts: Mapping[str, int]
    """Number of experts of each modality (`{text = 4, image = 4}`), of `text` and any of `image`, `video` and `sound`;
    together the experts of the layer, numbered in this order."""
    choose: Literal["tokens", "experts"] = "tokens"
    """Who chooses: tokens their experts, or experts their tokens."""
    gumbel_noise: bool = field(default=False, metadata=TRAINING_ONLY)
    """Whether scores are sigmoid(logit + G' - G'') in training, with Gumbel noise (equation 5), which the paper has for
    experts that start as copies of one."""

    top_k: int | None = field(default=None, validator=optional(gt(0)))
    """Experts of a token, for `choose = "tokens"`. None: 1."""
    normalise: bool = False
    """Whether the weights of a token are divided by their sum, for `choose = "tokens"`."""
    bias_rate: float = field(default=0.0, validator=ge(0), metadata=TRAINING_ONLY)
    """Change of a bias on the choice after an update, as in `sigmoid_topk`, towards the mean load of a group's experts,
    for `choose = "tokens"`. 0: never."""
    capacity_factor: float | None = field(default=None, validator=optional(gt(0)))
    """Mean number of experts of a token, for `choose = "experts"`: in each sequence, an expert takes this times the
    positions of its modality / experts of the group, rounded up. None: 1, as in the paper."""
    auxiliary_weight: float | None = field(default=None, validator=optional(gt(0)), metadata=TRAINING_ONLY)
    """Weight of the auxiliary routers' binary cross-entropy, for `choose = "experts"`, its mean over the positions of a
    sequence and the experts of their groups. Logged as `moma/auxiliary`. None: 1."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields groups that do not fit the model, keys without effect, and isolated documents if experts choose."""
        yield from self._group_problems()
        if PATCHES in job.model.batch_fields(job) and not {"image", "video", "sound"} & {*self.experts}:
            message = f"has none for images, and the model sees images (its batches have `{PATCHES}`)"
            yield Problem("experts", f"{message}; add image = 4")
        others = OF_EXPERTS if self.choose == "tokens" else OF_TOKENS
        for name in others:
            if getattr(self, name):  # set, as defaults are None, 0 or False
                other = "experts" if self.choose == "tokens" else "tokens"
                yield Problem(name, f'is for choose = "{other}", and choose is "{self.choose}"; leave it out')
        if self.choose == "tokens" and self.normalise and self.top_k in (None, 1):
            message = "makes a token's only weight 1, so that the router learns nothing; set top_k above 1"
            yield Problem("normalise", message)
        if self.choose == "experts" and job.data.packing.isolates:
            yield Problem("choose", isolation_problem("experts choose"))

    def _group_problems(self) -> Iterator[Problem]:
        for name, size in self.experts.items():
            if name not in MODALITIES:
                yield Problem(f"experts.{name}", f"is no modality; there are {', '.join(MODALITIES)}")
            elif size < 1:
                yield Problem(f"experts.{name}", f"{size} experts; set 1 or more, or leave the modality out")
        if "text" not in self.experts:
            yield Problem("experts", "has none for text, which every job has; add text = 4")

    def expert_problems(self, experts: int) -> Iterable[Problem]:
        """Yields that the groups are not `experts` together, or that a token would need more than the smallest has."""
        total = sum(self.experts.values())
        if total != experts:
            groups = " + ".join(f"{name} {size}" for name, size in self.experts.items())
            yield Problem("experts", f"{groups} = {total}, and the layer has {experts} experts; make them equal")
        smallest = min(self.experts.values(), default=0)
        key, wanted = ("top_k", self.top_k) if self.choose == "tokens" else ("capacity_factor", self.capacity_factor)
        if wanted is not None and wanted > smallest:
            yield Problem(key, f"{wanted:g} of the {smallest} experts of the smallest group; lower it")

    def build(self, context: BuildContext, dim: int, experts: int) -> nn.Module:
        from forge_plugin_moma.modules import expert_choice, token_choice

        if self.choose == "experts":
            return expert_choice.ModalityExpertChoice(self, context, dim)
        return token_choice.ModalityTokenChoice(self, context, dim)

    def sigmoid_topk(self) -> SigmoidTopK:
        """Returns the router that chooses within a group as tokens do here."""
        same = ("z_loss", "init_std", "normalise", "bias_rate", *BALANCE)
        # `top_k` is None by default, so that `problems` can detect a key that has no effect.
        return SigmoidTopK(top_k=self.top_k or 1, **{name: getattr(self, name) for name in same})
