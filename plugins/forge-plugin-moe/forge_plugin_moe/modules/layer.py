"""The feed-forward part with experts.

Shapes: B sequences, S positions, D model width, E experts, K experts of a token, T = B x S tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.model import Role
from forge_kit.nn.modules import Linear
from forge_kit.nn.taps import TapPoint, tap_points
from forge_plugin_moe.modules.capacity import refuse_documents, within_capacity
from forge_plugin_moe.modules.experts import Experts, GEGLUForm, SwiGLUForm, runs_grouped
from forge_plugin_moe.modules.sequences import Sequences, tally
from forge_plugin_transformer import GEGLU, InitStd, SquaredReLU, SwiGLU, default_hidden
from forge_plugin_transformer.modules.parts import last_parameters

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_plugin_moe.moe import MoE

LOAD = "moe/load"
"""Count of the tokens that each expert has computed."""
SHARED: Mapping[str, Any] = {"swiglu": SwiGLU, "geglu": GEGLU, "relu2": SquaredReLU}
"""The component of shared experts, by `activation`."""
NORMS = ("routed_norm", "routed_post_norm", "shared_norm", "shared_post_norm")
"""With `branch_norm`."""
DROPPED = "moe/dropped"
"""Fraction of the choices that capacity dropped, summed over layers."""


class MoELayer(nn.Module):
    """See `forge_plugin_moe.MoE`."""

    routed_norm: nn.Module
    routed_post_norm: nn.Module
    shared_norm: nn.Module
    shared_post_norm: nn.Module

    def __init__(self, component: MoE, context: BuildContext, dim: int, init: InitStd) -> None:
        super().__init__()
        hidden = component.hidden or default_hidden(dim)
        assert context.layer is not None
        self._auxiliary = context.auxiliary
        self._load = context.auxiliary.counter(LOAD, context.layer)
        self._number, self._capacity = component.experts, component.capacity_factor
        self._sequences, self._on_gpu = Sequences.of(context), context.device.type != "cpu"
        self.backend, self._why = choose_backend(component.backend, context)
        self.router = context.at("router").build(component.router, dim=dim, experts=component.experts)
        self._sets: Mapping[str, int] = getattr(self.router, "expert_sets", {})
        context.auxiliary.summarise(LOAD, functools.partial(summarise_load, sets=self._sets))
        self.experts = Experts(
            component.experts,
            dim,
            hidden,
            init=init,
            grouped=self.backend == "grouped_mm",
            bias=component.bias,
            swiglu=_form(component),
            weight_input=component.apply_router_weight_on_input,
        )
        self.shared = self.shared_gate = None
        if component.shared_experts:
            shared = SHARED[component.activation](hidden=component.shared_experts * hidden)
            self.shared = context.at("shared").build(shared, dim=dim, init=init)
        if component.branch_norm is not None:
            for name in NORMS:
                setattr(self, name, context.at(name).build(component.branch_norm, dim=dim))
        self.has_norms = component.branch_norm is not None
        if component.shared_gate:
            self.shared_gate = Linear(dim, 1, bias=False, std=init.inner)
        self.routed = nn.Identity()
        """The sum over routed experts passes through here, for taps."""
        self.output = nn.Identity()
        """The sum over all experts passes through here: with tensor parallelism, a part of a sum."""

    @property
    def mixes_positions(self) -> bool:
        """Whether tokens of a sequence compete for the capacity; see `forge_kit.nn.position_probe`."""
        return bool(self._capacity)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(B, S, D) to (B, S, D). Capacity limits experts in training mode only.

        Raises:
            ForgeError: with a capacity, the batch has `document_ids`.
        """
        weights, chosen = self.router(x, batch)
        # Without -1 the number of choices is known, so that the host need not wait to count them
        rows = None if getattr(self.router, "leaves_out", False) else chosen.numel()
        if self._capacity and self.training:
            refuse_documents(batch)
            sets = tuple(self._sets.values())
            kept = within_capacity(weights, chosen, self._capacity, self._number, self._sequences, batch, sets)
            self._count_dropped(chosen, kept)
            chosen, rows = chosen.where(kept, -1), None
        # After capacity: the load is what experts compute, the router's own count is what was chosen.
        self._load.add(tally(chosen, self._number).sum(0))
        # Handed to the experts, so that expert parallelism computes the shared ones while tokens are in flight.
        shared: list[Tensor] = []
        overlap_fn = None if self.shared is None else lambda: shared.append(self._shared_output(x, batch))
        read = self.routed_norm(x) if self.has_norms else x
        tokens = (tensor.flatten(0, 1) for tensor in (read, weights, chosen))
        y = self.routed(self.experts(*tokens, rows=rows, overlap_fn=overlap_fn).view_as(x))
        if self.has_norms:
            y = self.routed_post_norm(y)
        return self.output(y if self.shared is None else y + shared[0])

    def _shared_output(self, x: Tensor, batch: Batch) -> Tensor:
        assert self.shared is not None
        if self.has_norms:
            normed: Tensor = self.shared_post_norm(self.shared(self.shared_norm(x), batch))
            return normed
        y = self.shared(x, batch)
        return y if self.shared_gate is None else y * torch.sigmoid(self.shared_gate(x))

    def _count_dropped(self, chosen: Tensor, kept: Tensor) -> None:
        wanted = chosen >= 0
        # Each rank counts its piece of a sequence; divided by the pieces, the sum over ranks is their mean
        shares = (wanted & ~kept).sum((1, 2)) / (wanted.sum((1, 2)).clamp(min=1) * self._sequences.pieces)
        self._auxiliary.metric(DROPPED, shares.double().sum(), unit="sequence")

    # --- protocols of the model -------------------------------------------------------------------------------------

    def flops(self, seq_len: int) -> float:
        """6 per weight that a token is multiplied by: weights of its experts, of shared experts, and of the router."""
        # Of one expert: dimension 0 of a stack counts experts
        expert = sum(parameter[0].numel() for parameter in self.experts.parameters() if parameter.ndim > 2)
        others = [self.router, self.shared, self.shared_gate]
        always = sum(p.numel() for module in others if module is not None for p in module.parameters() if p.ndim > 1)
        per_token: Any = self.router.experts_per_token
        return 6.0 * (float(per_token) * expert + always)

    def parameter_roles(self) -> Mapping[str, Role]:
        """Router and shared gate are routers; a bias of a stack, (E, n), is no matrix. Shared experts go by shape."""
        roles: dict[str, Role] = {f"router.{name}": "router" for name, _ in self.router.named_parameters()}
        if self.shared_gate is not None:
            roles["shared_gate.weight"] = "router"
        return roles | {
            f"experts.{name}": "stack" if parameter.ndim > 2 else "bias"
            for name, parameter in self.experts.named_parameters()
        }

    def stream_writers(self) -> Sequence[str]:
        """Names the parameters that the sum over experts is proportional to: the last ones of both branches."""
        routed, shared = ("routed_post_norm", "shared_post_norm") if self.has_norms else ("experts.down", "shared.down")
        return [*last_parameters(self, routed), *([] if self.shared is None else last_parameters(self, shared))]

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Ranks divide the hidden features of each expert, route all tokens alike, and sum once, at `output`.

        With norms behind both branches, each is summed before its norm.
        """
        plan: dict[str, Any] = {"": "whole_input", "output": "partial_output"}
        plan |= dict.fromkeys(("router", "router.*"), "replicate")
        for name in ("gate", "up") if self.experts.swiglu else ("up",):
            plan[f"experts.{name}"] = "column_stack"
            if self.shared is not None:
                plan[f"shared.{name}"] = "column"
        plan["experts.down"] = "partial_row"
        if self.shared is not None:
            plan["shared.down"] = "partial_row"
        if self.shared_gate is not None:
            plan["shared_gate"] = "replicate"
        if not self.has_norms:
            return plan
        # Norms of sums, which are made before them: behind a sum, a rank has its positions, though all are around it
        norms = {name: "behind_sum" if name.endswith("_post_norm") else "replicate" for name in NORMS}
        way = plan.pop("output")
        return plan | norms | {"routed": way, "shared.down": "row"}

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns what the router decides, and the sums over routed and over shared experts.

        `router_logits` are only there for routers that have logits: before noise, masks and biases that only balance.
        """
        points = tap_points(self.router, "router")
        points["router_weights"] = TapPoint("router", axes="whole", size=self._number)
        points["router_choices"] = TapPoint("router", "output", 1, "whole", differentiable=False)
        axes: Any = {} if self.has_norms else {"axes": "partial"}
        points["expert_out"] = TapPoint("routed", **axes)
        if self.shared is not None:
            points["shared_out"] = TapPoint("shared", **axes)
            hidden = tap_points(self.shared, "shared")
            points |= {name.replace("mlp", "shared"): point for name, point in hidden.items()}
        return points

    def expert_stacks(self) -> Sequence[str]:
        """Names the routed experts; with expert parallel, every rank has the shared ones whole."""
        return ["experts"]

    def float8_exempt(self) -> Sequence[str]:
        """Exempts router and shared gate: a rounded score may send a token to another expert."""
        # `named_modules` begins with the router itself, whose name is empty
        routing = [f"router.{name}".rstrip(".") for name, _ in self.router.named_modules()]
        return routing if self.shared_gate is None else [*routing, "shared_gate"]

    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Returns the backend of the experts' products, and with it why the host waits on a GPU."""
        return [("experts", self.backend, f"{self._why}{self._waits()}")]

    def _waits(self) -> str:
        """Returns why the host waits on a GPU, for the plan: shapes that depend on numbers of rows."""
        if not self._on_gpu:
            return ""
        if self.backend == "loop":
            return "; the host waits in every layer, for the rows of each expert"
        leaves_out = self._capacity or getattr(self.router, "leaves_out", False)
        return "; the host waits in every layer, for how many choices are left" if leaves_out else ""


def _form(component: MoE) -> SwiGLUForm | GEGLUForm | None:
    """Returns what routed experts compute between their matrices; None: a squared ReLU."""
    if component.activation == "swiglu":
        return SwiGLUForm(component.swiglu_alpha, component.swiglu_limit, component.swiglu_offset)
    return GEGLUForm() if component.activation == "geglu" else None


def summarise_load(rows: Mapping[int, Tensor], sets: Mapping[str, int] | None = None) -> Mapping[str, Tensor]:
    """Returns metrics of the load balance, from the tokens of each expert of each layer.

    Args:
        rows: (E,) by layer.
        sets: sizes of the sets of consecutive experts that have separate tokens, by name: balance is measured within
            each set, and is also logged for each.
    """
    if not sets:
        return _load_metrics("moe", list(rows.values()))
    by_set = zip(*(load.split(list(sets.values())) for load in rows.values()), strict=True)
    parts = {f"moe/{name}": list(loads) for name, loads in zip(sets, by_set, strict=True)}
    metrics = _load_metrics("moe", [load for loads in parts.values() for load in loads])
    for name, loads in parts.items():
        metrics |= _load_metrics(name, loads)
    return metrics


def _load_metrics(name: str, loads: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns metrics of loads, (n,) each; one without a token counts in none of them."""
    dead, fullest, entropies, used = [], [], [], []
    for load in loads:
        shares = load / load.sum().clamp(min=1)
        used.append(load.any())
        # Tensors throughout: the host would wait for a number
        dead.append((load == 0).sum() * used[-1])
        fullest.append(shares.max() * len(load))
        # Relative to the entropy of equal shares, so that 1 is balance for any number of experts
        entropy = -torch.xlogy(shares, shares).sum()
        # The logarithm of 1 is 0: a single expert is balanced as soon as it is used
        entropies.append(entropy / math.log(len(load)) if len(load) > 1 else used[-1].to(entropy))
    return {
        f"{name}/dead_experts": torch.stack(dead).sum(),
        f"{name}/fullest_expert": torch.stack(fullest).max(),
        f"{name}/entropy": torch.stack(entropies).sum() / torch.stack(used).sum().clamp(min=1),
    }


def choose_backend(asked: str, context: BuildContext) -> tuple[str, str]:
    """Returns the backend for the products of experts, and the reason.

    Raises:
        JobError: the backend that was asked for cannot run.
    """
    runs = runs_grouped(context.device, context.dtype)
    where = f"{context.dtype} on {context.device.type}".removeprefix("torch.")
    if asked == "grouped_mm" and not runs:
        message = f'"grouped_mm" cannot compute {where}'
        hint = 'take "loop", or "auto", which takes the first that runs'
        raise JobError([Problem("model.ffn.backend", f"{message}; {hint} (building {context.path})")])
    if asked != "auto":
        return asked, "asked for"
    return ("grouped_mm" if runs else "loop"), f"grouped_mm {'computes' if runs else 'cannot compute'} {where}"
