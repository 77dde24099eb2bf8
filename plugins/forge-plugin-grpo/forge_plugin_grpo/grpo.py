"""The loss `grpo`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, min_len

from forge_core import LossComponent, Problem, TrainingHook
from forge_core.config.keys import walk_components
from forge_core.contracts.components import FilePath, RouterComponent, when_resumed
from forge_plugin_grpo.kinds import RewardComponent, RolloutComponent
from forge_plugin_grpo.prompts import Prompts
from forge_plugin_grpo.rollout import EngineRollout
from forge_plugin_losses.reference_path import ADAPTERS_OFF, reference_problems

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import LossFunction
    from forge_core.job import Job


Algorithm = Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo"]


@frozen(kw_only=True)
class GRPO(LossComponent):
    """Reinforcement learning from rewards of completions that the model draws in training (Shao et al. 2024).

    Each row of the global batch is a prompt, of a source of type `prompts`. Before a step, `group` completions of each
    are drawn and scored, and take the place of the row: document g of a row is prompt and completion g, in a slot of
    `train.seq_len / group` positions.
    """

    draws_completions: ClassVar[bool] = True
    """Informs sources of prompts that completions of them are learned."""

    rewards: Mapping[str, RewardComponent] = field(validator=min_len(1))
    """`[loss.rewards.NAME]`: what scores completions; the weighted sum of all is learned, and each is logged."""
    rollout: RolloutComponent = field(factory=EngineRollout)
    """What draws completions."""
    algorithm: Algorithm = "grpo"
    """`grpo`: standardised advantages, means over the tokens of a completion. `dr_grpo` (Liu et al. 2025): advantages
    that are only centred, sums over tokens divided by `max_tokens`. `dapo` (Yu et al. 2025): the mean over all tokens.
    `gspo` (Zheng et al. 2025): one ratio for a completion. `rloo` (Ahmadian et al. 2024): REINFORCE, against the mean
    of the others."""
    group: int = field(default=8, validator=ge(2))
    """Completions of a prompt; divides `train.seq_len`."""
    max_tokens: int = field(default=64, validator=ge(1))
    """Tokens of a completion at most, the one that ends it included."""
    updates: int = field(default=1, validator=ge(1))
    """Steps on the same completions. With 1, the weights that learn from one have drawn it, and nothing is clipped."""
    clip_low: float = field(default=0.2, validator=gt(0))
    """Ratios of probabilities below 1 - clip_low are not learned; not used by `rloo`."""
    clip_high: float = field(default=0.2, validator=gt(0))
    """Ratios above 1 + clip_high are not learned; DAPO takes 0.28."""
    dynamic_sampling: int = field(default=0, validator=ge(0))
    """Further draws at most in place of groups whose completions all have one reward, from which nothing is learned
    (Yu et al. 2025, section 3.2). Each takes another line of the row's source, drawn by the seed of the job, the step,
    and the row's place in the global batch; the position in the data stays. 0: such groups are kept."""
    check_first_log_p: bool = field(default=True, metadata=when_resumed("safe"))
    """Stop the run in its first step if the log-probabilities of `rollout` differ from those in training by more than
    rounding: a mean of 1e-9 nats a token in float64, 1e-3 in float32, and 2e-2 in bfloat16 or TF32."""
    replay_routes: bool = False
    """Of a model with experts: train each token with the experts that it had when it was drawn. Otherwise rounding
    sends some to other ones, and ratios compare two models (R3, Ma et al. 2025)."""
    kl_weight: float = field(default=0.0, validator=ge(0))
    """Weight (β) of the KL divergence from `reference` in the objective, by the estimator k3 of each token (Shao et al.
    2024, equation 4), summed over tokens and completions as `algorithm` sums, with `rloo` over all tokens of a
    completion. 0: no such term; a `reference` then is there for the metric `kl` alone."""
    reference: FilePath = ""
    """A frozen model: a checkpoint, or a run folder or job file whose newest checkpoint is taken. Ranks divide it as
    `[parallel]` divides the model, but for a pipeline's stages. `adapters_off`: the model in training with its adapters
    off, in a forward pass before the first update on completions. Empty: none."""
    check_first_kl: bool = field(default=True, metadata=when_resumed("safe"))
    """Stop the run in its first step if `kl` is not 0 up to rounding, where `[checkpoint.load]` has the checkpoint of
    `reference`, or adapters begin at zero."""
    chunk_tokens: int = field(default=0, validator=ge(0), metadata=when_resumed("safe"))
    """Positions whose logits exist at a time; 0: as many as `chunked_cross_entropy` takes."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that groups fit into rows, that all sources give prompts, and that the layout can draw completions."""
        if job.train.seq_len % self.group:
            message = (
                f"{self.group} does not divide train.seq_len = {job.train.seq_len}, of which each has an equal part"
            )
            yield Problem("group", message)
        elif self.max_tokens >= job.train.seq_len // self.group:
            slot = job.train.seq_len // self.group
            yield Problem(
                "max_tokens", f"{self.max_tokens} leaves no room for a prompt in the {slot} positions of a slot"
            )
        for number, source in enumerate(job.data.sources):
            if not isinstance(source, Prompts):
                message = (
                    f"draws completions of prompts, and data.sources.{number} ({type(source).__name__}) gives none"
                )
                yield Problem("", f'{message}; take type = "prompts"')
        if self.kl_weight and not self.reference:
            message = f"{self.kl_weight:g} weighs the KL divergence from a reference, and there is none"
            hint = f'set loss.reference to a checkpoint, or to "{ADAPTERS_OFF}" if adapters alone are trained'
            yield Problem("kl_weight", f"{message}; {hint}")
        yield from reference_problems(self.reference, job)
        if self.replay_routes:
            yield from route_problems(job)

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Hooks that draw and score completions, compare the sampler with training, and keep the reference the same."""
        from forge_plugin_grpo.agreement import FirstKL, SamplerAgrees
        from forge_plugin_grpo.hook import Rollouts
        from forge_plugin_losses.resumed_models import SameReference

        yield Rollouts(loss=self)
        if self.check_first_log_p:
            yield SamplerAgrees()
        # With its adapters off, the reference is in the checkpoints of the run itself
        if self.reference not in ("", ADAPTERS_OFF):
            yield SameReference(reference=self.reference)
        if self.reference and self.check_first_kl:
            yield FirstKL()

    def plan_lines(self, job: Job) -> Iterable[tuple[str, str]]:
        """Yields that a plan leaves out the drawing of completions."""
        often = "a step" if self.updates == 1 else f"every {self.updates} steps"
        count = f"{job.train.global_batch_size * self.group:,} completions of up to {self.max_tokens:,} tokens {often}"
        yield "rollouts", f"{count}; their time and their memory are not counted"

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Yields the reference, and whether the first KL divergence is known."""
        from forge_plugin_grpo.objective import policy_loss_of

        if not self.reference:
            return
        built = policy_loss_of(context.auxiliary)
        path = "the model with its adapters off" if built.reference is None else str(built.reference.checkpoint)
        yield "reference", path, "loss.reference"
        if built.starts_as_reference:
            yield "first kl", "0", "the model starts as the reference; another one ends the run"

    def build(self, context: BuildContext) -> LossFunction:
        """Returns the loss; loads the reference, if there is one. Collective.

        Of rows without advantages, as in evaluations, it is the cross-entropy of labels.
        """
        from forge_plugin_grpo.objective import policy_loss

        return policy_loss(self, context)


def route_problems(job: Job) -> Iterator[Problem]:
    """Why the routes of a job's model cannot be replayed."""
    routers = [(path, each) for path, each in walk_components(job.model, "model") if isinstance(each, RouterComponent)]
    if not routers:
        yield Problem("replay_routes", "is for models with experts, and [model] has no router; leave it out")
    for path, router in routers:
        if not getattr(router, "replays_routes", False):
            message = f"{path} ({type(router).__name__}) does not take recorded experts"
            yield Problem("replay_routes", f'{message}; take type = "softmax_topk" or "sigmoid_topk"')
