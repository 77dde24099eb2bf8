"""Checks that a stage changes the weights that it trains, and no bit of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache

import torch
from attrs import define, field, frozen
from torch import Tensor

from forge_core import ForgeError
from forge_core.contracts.contexts import StepContext
from forge_core.parallel.mesh import gather_objects, local_part
from forge_plugin_freeze.switch import parameters_of

CHUNK = 2**20
"""Elements that a digest reads at a time: it takes 32 bytes for each beside the weights."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""
SHOWN = 4
"""Names that a message lists."""


@frozen
class PartOfRank:
    """Facts of one rank about a part of the model that a stage trains."""

    changed: bool = False
    """Whether a bit of it has changed since the stage, or the run, began."""
    gradient: bool = False
    """Whether any of it has a gradient in the step."""
    nonzero: bool = False
    """Whether that gradient is not zero everywhere."""
    rate: float = 0.0
    """Largest learning rate."""

    def __or__(self, other: PartOfRank) -> PartOfRank:
        return PartOfRank(
            self.changed or other.changed,
            self.gradient or other.gradient,
            self.nonzero or other.nonzero,
            max(self.rate, other.rate),
        )


@define(kw_only=True)
class Audit:
    """The check of one stage.

    It looks after the first step, and if a part did not change then, for example because its rate was still 0, a
    second time after `until` (0: never). Weights are compared by digests of their bits, 8 bytes for each tensor, which
    read the weights of a rank once before the step and once after it. Ranks then agree, and the host waits for the
    device: that happens in these steps only.
    """

    stage: int
    parts: Mapping[str, frozenset[str]]
    """Parts that must change, with the names of their parameters."""
    trained: Collection[str]
    optimizer: torch.optim.Optimizer
    first: int
    """The step after which it looks first."""
    until: int
    done: bool = False
    _before: Mapping[str, Tensor] = field(init=False)
    _gradients: Mapping[str, Tensor | None] = field(init=False, factory=dict)
    """By parameter, whether its gradient is not zero, on the device; None: it has no gradient."""

    def __attrs_post_init__(self) -> None:
        self._before = self._digests()

    def is_due(self, step: int) -> bool:
        """Whether the weights are looked at after this step."""
        return step in (self.first, self.until)

    def note_gradients(self) -> None:
        """Note which parameters have gradients; called when these are complete."""
        self._gradients = {
            name: None if parameter.grad is None else local_part(parameter.grad).ne(0).any()
            for name, parameter, _ in parameters_of(self.optimizer)
        }

    def look(self, context: StepContext) -> None:
        """Compare the weights after a step with those before the stage. Collective.

        Raises:
            ForgeError: a frozen parameter has changed or has a gradient, or what the stage trains cannot train.
        """
        norm = context.grad_norm
        if context.skipped or (norm is not None and not norm.isfinite()):  # no update: look after the next one
            self.first, self.until = context.step + 1, max(self.until, context.step + 1) if self.until else 0
            return
        changed, nonzero = self._changed(), self._nonzero()
        self._refuse_changes_of_frozen(changed)
        unchanged = self._unchanged(changed, nonzero)
        last_look = context.step == self.until
        if lost := {part: facts for part, facts in unchanged.items() if last_look or not facts.gradient}:
            raise ForgeError(self._message(lost, context.step))
        own = [changed[name] for name in changed if name in self.trained]
        context.log("freeze/stage", self.stage)
        context.log("freeze/changed", sum(own) / len(own) if own else 1.0)
        self.done = not unchanged or not self.until

    def _changed(self) -> dict[str, bool]:
        after = self._digests()
        return _on_host({name: after[name] != before for name, before in self._before.items()})

    def _nonzero(self) -> dict[str, bool]:
        return _on_host({name: value for name, value in self._gradients.items() if value is not None})

    def _digests(self) -> dict[str, Tensor]:
        return {name: digest(parameter) for name, parameter, _ in parameters_of(self.optimizer)}

    def _refuse_changes_of_frozen(self, changed: Mapping[str, bool]) -> None:
        frozen = [name for name in changed if name not in self.trained]
        own = {name: "has changed" for name in frozen if changed[name]}
        own |= {name: "has a gradient" for name in frozen if self._gradients[name] is not None}
        found = {name: what for part in gather_objects(own) for name, what in part.items()}
        if found:
            facts = [f"{name} {what}" for name, what in sorted(found.items())]
            raise ForgeError(
                f"plugins.freeze: frozen parameters of stage {self.stage} are not left alone: {_some(facts)}; another "
                "plugin, a hook or the optimizer writes into them"
            )

    def _unchanged(self, changed: Mapping[str, bool], nonzero: Mapping[str, bool]) -> dict[str, PartOfRank]:
        """Parts that have not changed on any rank, with what all ranks know of them."""
        rates = {name: rate for name, _, rate in parameters_of(self.optimizer)}
        own = [
            [PartOfRank(changed[n], n in nonzero, nonzero.get(n, False), rates[n]) for n in names if n in rates]
            for names in self.parts.values()
        ]
        # One message for all parts of the stage
        everywhere = gather_objects([_together(facts) for facts in own])
        together = [_together(facts) for facts in zip(*everywhere, strict=True)]
        return {part: facts for part, facts in zip(self.parts, together, strict=True) if not facts.changed}

    def _message(self, parts: Mapping[str, PartOfRank], step: int) -> str:
        reasons = "; ".join(f"{part} {_reason(facts)}" for part, facts in parts.items())
        since = f"after step {step}" if step == self.first else f"in steps {self.first} to {step}"
        return f"plugins.freeze: stage {self.stage} does not train all that it names, {since}: {reasons}"


def _on_host(flags: Mapping[str, Tensor]) -> dict[str, bool]:
    """Returns device scalars as values, for one wait."""
    return dict(zip(flags, torch.stack(list(flags.values())).tolist(), strict=True)) if flags else {}


def _together(facts: Iterable[PartOfRank]) -> PartOfRank:
    total = PartOfRank()
    for one in facts:
        total |= one
    return total


def _reason(facts: PartOfRank) -> str:
    if not facts.gradient:
        return "has no gradient: the loss does not depend on it"
    if not facts.rate:
        return "has a learning rate of 0"
    if not facts.nonzero:
        return "has a gradient of 0: nothing in the data reaches it (`patience` is how long that may last)"
    return f"has a gradient and a rate of {facts.rate:.3g}, and does not change: see the optimizer's settings for it"


def _some(facts: list[str]) -> str:
    return ", ".join(facts[:SHOWN]) + (f" and {len(facts) - SHOWN} more" if len(facts) > SHOWN else "")


# --- digests -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Returns a digest of the bits of this rank's part of a tensor, () int64 on its device; it does not wait for it.

    Each element's bits are multiplied by a random odd number modulo 2**64, and these products added up (Dietzfelbinger
    et al. 1997): another bit in one element always makes another digest, other changes but for a chance of 2**-32.
    """
    local = local_part(tensor.detach())
    bits = local.reshape(-1).view(BITS[local.element_size()])
    factors = _factors(local.device)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for chunk in bits.split(CHUNK):
        wide = chunk.long()
        mixed = wide ^ (wide >> 29)  # or else the signs of two float64, 2**63 each, would cancel
        # The factor distinguishes chunks that have changed places
        total = total * 31 + (mixed * factors[: len(chunk)]).sum()
    return total


@cache
def _factors(device: torch.device) -> Tensor:
    # Apart from the default generator, whose draws an audit must not change
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (CHUNK,), generator=generator) | 1).to(device)
