"""The component `engine` of kind `rollout`: the model in training draws its own completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt, le

from forge_plugin_grpo.kinds import Drawn, RolloutComponent, Sampler

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model


@frozen(kw_only=True)
class EngineRollout(RolloutComponent):
    """Completions by the model in training, in this process, with its cache; under `fsdp`, `tp` and `pp` too."""

    temperature: float = field(default=1.0, validator=gt(0))
    """Divides the logits; other than 1, it biases the gradient likewise."""
    top_k: int = field(default=0, validator=ge(0))
    """Only the k most likely tokens; 0: all. Like `top_p`, it makes completions
    come from another distribution than the one that is trained, which biases the gradient."""
    top_p: float = field(default=1.0, validator=[gt(0), le(1)])
    """Only the most likely tokens that together have this probability."""

    def build(self, context: BuildContext, max_tokens: int, stops: Sequence[int]) -> Sampler:  # type: ignore[override]
        """See `RolloutComponent.build`."""
        from forge_plugin_generate.generate import Sampling
        from forge_plugin_generate.sample import sample

        settings = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        routes = getattr(context.job.loss, "replay_routes", False)

        def draw(model: Model, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Sequence[Drawn]:
            return sample(model, prompts, max_tokens, stops, settings, seeds, routes)

        return draw
