"""The components `moe` (kind `ffn`), `softmax_topk`, `sigmoid_topk`, `expert_choice` and `hash` (kind `router`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import RouterComponent, default_type, when_resumed
from forge_core.contracts.errors import Problem
from forge_kit.optim.fields import TRAINING_ONLY
from forge_plugin_transformer import FFNComponent, InitStd, NormComponent

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


LEFT_CHOICES = "the host waits for how many choices are left"
"""Why a router or a capacity that leaves tokens out breaks the graph of a block."""


def isolation_problem(choice: str) -> str:
    """Returns the message for a choice among the tokens of a sequence whose documents are isolated."""
    reason = f"{choice} over a whole sequence, so documents that data.packing isolates would change each other"
    return f'{reason}; set data.packing.type = "concatenate", or let tokens choose without a capacity'


@frozen(kw_only=True)
class LinearRouter(RouterComponent):
    """The keys of routers that score experts by a linear function of the token, in float32 or wider.

    In the losses below, p are a token's scores, divided by their sum; P is their mean over a sequence; f is the share
    of a sequence's choices that fall on an expert, times E. The reported loss contains none of them.
    """

    z_loss: float = field(default=0.0, validator=ge(0), metadata=TRAINING_ONLY)
    """Weight of the mean of log(Σ exp(logits))², which keeps logits from growing (Zoph et al. 2022, ST-MoE). Logged as
    `moe/z_loss`."""
    init_std: float = field(default=0.02, validator=gt(0), metadata=TRAINING_ONLY)
    """Standard deviation of initial weights."""


@frozen(kw_only=True)
class BalancedRouter(LinearRouter):
    """The keys of losses that balance the load of experts."""

    sequence_balance: float = field(default=0.0, validator=ge(0), metadata=TRAINING_ONLY)
    """Weight of Σ f P of each sequence (DeepSeek-V3, equations 17 to 20), its mean over sequences. 1 where all experts
    are used alike. Logged as `moe/sequence_balance`."""
    batch_balance: float = field(default=0.0, validator=ge(0), metadata=TRAINING_ONLY)
    """Weight of Σ f P, with f of the whole batch of the step before: balance is asked of batches and not of each
    sequence, under every layout alike. Logged as `moe/batch_balance`."""
    micro_batch_balance: float = field(default=0.0, validator=ge(0), metadata=TRAINING_ONLY)
    """Weight of Σ f P of each micro-batch of each rank (Fedus et al. 2021, Switch Transformer, equation 4). Its value,
    and so the curve, depends on `micro_batch_size` and the layout. Logged as `moe/micro_batch_balance`."""


@frozen(kw_only=True)
class TopKRouter(BalancedRouter):
    """The keys of routers in which tokens choose experts."""

    replays_routes: ClassVar[bool] = True
    """See `forge_kit.nn.routes.RouteReplay`."""

    top_k: int = field(default=2, validator=gt(0))
    """Experts of a token, K."""
    scaling: float = field(default=1.0, validator=gt(0))
    """Factor on the weights (DeepSeek-V3: 2.5)."""
    groups: int = field(default=1, validator=gt(0))
    """Groups of equally many experts, of which a token goes to only some: such as one group per node, to reduce
    communication."""
    top_groups: int = field(default=1, validator=gt(0))
    """Groups that a token may go to: those with the largest score."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that a token may go to no more groups than there are."""
        if self.top_groups > self.groups:
            yield Problem("top_groups", f"{self.top_groups} of {self.groups} groups; lower it, or raise groups")

    def expert_problems(self, experts: int) -> Iterable[Problem]:
        """Checks that the groups are equal, and that the best `top_groups` of them have K experts."""
        open_to = experts // self.groups * self.top_groups
        if experts % self.groups:
            yield Problem("groups", f"{self.groups} groups do not divide {experts} experts equally")
        elif self.top_k > open_to:
            of = f" in {self.top_groups} groups" if self.groups > 1 else ""
            yield Problem("top_k", f"{self.top_k} of {open_to} experts{of}; lower it")


@frozen(kw_only=True)
class SoftmaxTopK(TopKRouter):
    """Each token's K experts with the largest probabilities (Shazeer et al. 2017; Mixtral, Qwen3-MoE)."""

    normalise: Literal["after", "before"] = "after"
    """Weights are the softmax over the chosen experts (after), or over all experts (before), in which case the weights
    of the chosen ones do not add up to 1."""
    bias: bool = False
    """Whether the linear function has a learned bias for each expert, which takes part in choice and weights
    (gpt-oss)."""
    input_norm: bool = False
    """Whether what it reads is RMS-normalised first, and multiplied by a learned factor for each feature and by
    1 / sqrt(`dim`) (Gemma 4)."""
    input_norm_eps: float = field(default=1e-6, validator=gt(0))
    """Added to the mean square in that normalisation."""
    expert_scale: bool = False
    """Whether the weights of each expert have a learned factor (Gemma 4)."""

    def build(self, context: BuildContext, dim: int, experts: int) -> nn.Module:
        """Returns a router with parameters (E, dim) and, if `bias` is set, (E,)."""
        from forge_plugin_moe.modules.topk import SoftmaxRouter

        return SoftmaxRouter(self, context, dim, experts)


@frozen(kw_only=True)
class SigmoidTopK(TopKRouter):
    """Each token's K experts with the largest sigmoid + bias (DeepSeek-V3, section 2.1.2).

    The bias takes no part in the weights. After each update it rises by `bias_rate` for experts with fewer tokens than
    the mean of the whole batch, and falls for those with more, so that balance needs no loss (Wang et al. 2024).

    State: a bias for each expert, saved and never touched by the optimizer.
    """

    score_function: Literal["sigmoid", "softmax"] = "sigmoid"
    """What scores are of the logits, in choice and weights: softmax in ERNIE 4.5."""
    normalise: bool = True
    """Whether the weights of a token are divided by their sum."""
    normalise_eps: float = field(default=1e-20, validator=gt(0))
    """Added to that sum. The default is DeepSeek-V3's; LFM2 has 1e-6."""
    bias_rate: float = field(default=0.001, validator=ge(0), metadata=TRAINING_ONLY)
    """Change of a bias after an update. 0: never."""
    correction_bias: bool = True
    """Whether there is that bias. false: the choice goes by the sigmoid alone (Llama 4), and `bias_rate` has no
    effect."""

    def build(self, context: BuildContext, dim: int, experts: int) -> nn.Module:
        """Returns a router with a parameter (E, dim); a bias (E,) is a buffer, so that no optimizer changes it."""
        from forge_plugin_moe.modules.topk import SigmoidRouter

        return SigmoidRouter(self, context, dim, experts)


@frozen(kw_only=True)
class ExpertChoice(LinearRouter):
    """Experts choose tokens: of each sequence, those with the largest probability (Zhou et al. 2022).

    All experts have equally many tokens, and a token has any number of experts. A position's experts depend on later
    positions, so such a model cannot generate as it was trained; it is a baseline.
    """

    capacity_factor: float = field(default=2.0, validator=gt(0))
    """Mean number of experts of a token: an expert takes this times the positions of a sequence / E."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Refuses packings that isolate documents: an expert chooses among all tokens of a sequence."""
        if job.data.packing.isolates:
            yield Problem("type", isolation_problem("experts choose"))

    def build(self, context: BuildContext, dim: int, experts: int) -> nn.Module:
        """Returns a router with E choices for each token: -1 for each expert that skips it."""
        from forge_plugin_moe.modules.expert_choice import ExpertChoiceRouter

        return ExpertChoiceRouter(self, context, dim, experts)

    def graph_break(self, precision: str, device: str, backend: str) -> str:
        """The wait for a count of choices; see `forge_plugin_compile.compile.HasGraphBreak`."""
        return LEFT_CHOICES


@frozen(kw_only=True)
class Hash(RouterComponent):
    """Experts by a hash of the token's id, the same throughout training (Roller et al. 2021, "Hash Layers").

    A baseline without parameters. Weights are 1 / K.
    """

    replays_routes: ClassVar[bool] = True  # there is nothing to replay: a token always has the same experts

    top_k: int = field(default=1, validator=gt(0))
    """Experts of a token, K."""

    def expert_problems(self, experts: int) -> Iterable[Problem]:
        """Checks that there are K experts."""
        if self.top_k > experts:
            yield Problem("top_k", f"{self.top_k} of {experts} experts; lower it")

    def build(self, context: BuildContext, dim: int, experts: int) -> nn.Module:
        """Returns a router without parameters, whose hash depends on the number of the layer."""
        from forge_plugin_moe.modules.hashing import HashRouter

        return HashRouter(self.top_k, context.layer or 0, experts)


@frozen(kw_only=True)
class MoE(FFNComponent):
    """Σ weight x expert(x) over the experts that a router chooses for each token, plus shared experts.

    Each expert is a separate feed-forward part, by default SwiGLU; every token goes through the shared ones (Shazeer et
    al. 2017; Dai et al. 2024, "DeepSeekMoE").

    Weights of the routed experts are stacked: `experts.gate.weight` and `experts.up.weight` (E, hidden, dim),
    `experts.down.weight` (E, dim, hidden); likewise their biases, (E, hidden) and (E, dim). No expert is padded to the
    fullest one.
    """

    experts: int = field(default=8, validator=gt(0))
    """Routed experts, E."""
    hidden: int = field(default=0, validator=ge(0))
    """Width between the matrices of an expert; 0: 8/3 of `dim`, rounded up to a multiple of 256. Fine-grained experts
    have a fraction of it."""
    activation: Literal["swiglu", "geglu", "relu2"] = "swiglu"
    """What an expert computes, routed or shared. swiglu: down(silu(gate(x)) * up(x)). geglu: down(gelu(gate(x)) *
    up(x)), by the tanh approximation (Gemma 4). relu2: down(relu(up(x))²), which has no `gate` (Nemotron 3)."""
    bias: bool = False
    """Whether the matrices of a routed expert have biases (gpt-oss)."""
    swiglu_alpha: float = field(default=1.0, validator=gt(0), metadata=when_resumed("flag"))
    """Factor a in gate * sigmoid(a * gate) of routed experts. 1: silu; 1.702 in gpt-oss, nearly gelu."""
    swiglu_limit: float = field(default=0.0, validator=ge(0), metadata=when_resumed("flag"))
    """Bound c > 0 of routed experts before that: min(gate, c), and `up` between -c and c (7 in gpt-oss). 0: none."""
    swiglu_offset: float = field(default=0.0, metadata=when_resumed("flag"))
    """Added to `up` of routed experts, after the bound (1 in gpt-oss)."""
    router: RouterComponent = default_type("forge-plugin-moe/softmax_topk")
    """`[model.ffn.router]`: chooses the experts of a token, and their weights."""
    apply_router_weight_on_input: bool = False
    """Whether an expert reads the token times its weight, so that outputs are added as they are (Llama 4), and not
    weight x expert(token)."""
    capacity_factor: float = field(default=0.0, validator=ge(0))
    """In each sequence, an expert takes at most this times its even share of the tokens, those with the largest
    weights; the others skip it, and are counted as `moe/dropped`. 0: no limit. In training only: a position's output
    would depend on later ones. Refused with a packing that isolates documents."""
    shared_experts: int = field(default=0, validator=ge(0))
    """Experts that every token goes through, with weight 1: one of N times `hidden`."""
    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied by the sigmoid of a linear function of the token
    (Qwen2-MoE)."""
    branch_norm: NormComponent | None = None
    """`[model.ffn.branch_norm]`: norms before and after the routed experts, and before and after the shared ones, four
    in all; the layer then has no norm before this part, and the router reads the residual stream (Gemma 4 26B-A4B).
    Without the table there are none."""
    first_dense: int = field(default=0, validator=ge(0))
    """The first N layers use `dense` (DeepSeek-V3: 3)."""
    every: int = field(default=1, validator=gt(0))
    """From there on, every n-th layer is a MoE layer, the last of each group of n; the others use `dense`."""
    dense: FFNComponent = default_type("forge-plugin-transformer/swiglu")
    """`[model.ffn.dense]`: the feed-forward part of layers without experts."""
    backend: Literal["auto", "grouped_mm", "loop"] = field(default="auto", metadata=when_resumed("safe"))
    """grouped_mm: torch's product of all experts in one kernel. loop: a product for each expert, after waiting for
    their sizes. auto: the first where it runs."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the shared gate, capacity with isolated documents, and the router with this number of experts."""
        if self.activation != "swiglu":
            for name, absent in (("swiglu_alpha", 1.0), ("swiglu_limit", 0.0), ("swiglu_offset", 0.0)):
                if getattr(self, name) != absent:
                    message = f"has no effect on experts of {self.activation}"
                    yield Problem(name, f'{message}; leave it out, or take activation = "swiglu"')
        if self.branch_norm is not None:
            yield from self._norm_problems()
        if self.shared_gate and not self.shared_experts:
            yield Problem("shared_gate", "is for shared experts, and there are none; set shared_experts")
        if self.capacity_factor and job.data.packing.isolates:
            yield Problem("capacity_factor", isolation_problem("an expert's capacity is filled"))
        yield from (problem.below("router") for problem in self.router.expert_problems(self.experts))

    def graph_break(self, precision: str, device: str, backend: str) -> str:
        """The wait for counts of tokens; see `forge_plugin_compile.compile.HasGraphBreak`."""
        if self.capacity_factor:
            return LEFT_CHOICES
        grouped = ("bf16", "fp32") if device == "cpu" else ("bf16",)  # as `modules.experts.runs_grouped`
        if backend != "inductor" or self.backend == "grouped_mm" or (self.backend == "auto" and precision in grouped):
            return ""  # other backends take sizes that are not known yet
        where = "" if precision == "fp64" else f" on {device}"
        why = "" if self.backend == "loop" else f", as grouped_mm cannot compute {precision}{where}"
        return f"the host waits for the sizes of experts{why}"

    def _norm_problems(self) -> Iterable[Problem]:
        """Checks that there are both branches, and nothing that is between them or in their place."""
        if not self.shared_experts:
            yield Problem("branch_norm", "there are no shared experts beside the routed ones; set shared_experts")
        if self.shared_gate:
            yield Problem("shared_gate", "with branch_norm there is none between shared experts and their norm")
        for name, value in (("first_dense", 0), ("every", 1)):
            if getattr(self, name) != value:
                message = "layers without experts would have no norm before them, as the model has branch_norm"
                yield Problem(name, f"{message}; leave it out, or take a pattern of feed-forward parts")

    def normalises_input(self, layer: int) -> bool:
        """Returns whether there is `branch_norm`, in the place of a norm before this part."""
        return self.branch_norm is not None

    def _is_dense(self, layer: int) -> bool:
        # Counted from the first layer that may have experts, so that `every` does not depend on `first_dense`
        return layer < self.first_dense or (layer - self.first_dense + 1) % self.every != 0

    def left_out(self, layer: int) -> bool:
        """Returns whether a layer without experts has no `dense` part either."""
        return self._is_dense(layer) and self.dense.left_out(layer)

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns a `MoELayer`, or `dense` in the layers that `first_dense` and `every` exclude."""
        assert context.layer is not None
        if self._is_dense(context.layer):
            return context.build(self.dense, dim=dim, init=init)
        from forge_plugin_moe.modules.layer import MoELayer

        return MoELayer(self, context, dim, init)
