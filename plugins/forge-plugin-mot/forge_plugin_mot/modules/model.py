"""The language model of fusion `mot`. Shapes: B sequences, S positions, M features of a row, D model width."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forge_core.contracts.model import Role
from forge_kit.nn.derived_class import derived
from forge_kit.nn.taps import TapPoint
from forge_plugin_mot.modules.modality_weights import (
    MODALITIES,
    Merge,
    UntiedAttention,
    UntiedBlock,
    UntiedFeedForward,
    copies,
    overlaid,
)
from forge_plugin_mot.modules.routing import TEXT_ONLY, with_routes
from forge_plugin_transformer.modules.block import PARTS as BLOCK
from forge_plugin_vision.modules.grafting import VisionLanguageModel

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry

    Base = VisionLanguageModel
else:
    # As for `VisionLanguageModel`: the class that this is put before has all of its methods.
    Base = object

SHARED_IN_ATTENTION = ("rotary", "sinks", "core", "qkv", "mixed")
"""Children of attention that all modalities share with the text; not every attention has all of them."""
MIXINS: Mapping[str, Any] = {"attention": UntiedAttention, "ffn": UntiedFeedForward}


class UntiedModel(Base):
    """Mixin of a model with fusion `joint`; see `forge_plugin_mot.MixtureOfTransformers`."""

    norm: nn.Module
    normed: nn.Module
    """States after the norms of all modalities pass through here, for taps."""
    codes: Mapping[str, int]
    """Entry of `input_ids` for each modality with its own weights."""
    slots: int
    """M, positions of a row's images at most."""
    share: tuple[int, int] = (0, 1)
    """See `with_routes`."""

    def prepare(self, batch: Batch) -> Batch:
        """Adds the routes of all modalities, then the language model's entries."""
        return super().prepare(with_routes(batch, self.codes, self.slots, self.share))

    def decode(self, batch: Batch, cache: Any) -> Tensor:
        """Adds routes where the new positions have images; a call of text alone runs the text's weights alone."""
        ids = batch["input_ids"]
        # Generated tokens are text. The host waits here, as it does for each token, and saves the other weights.
        if bool((ids < 0).any()):
            batch = with_routes(batch, self.codes, self.slots, self.share)
        else:
            batch = {**batch, TEXT_ONLY: ids.new_empty(0)}
        return super().decode(batch, cache)

    def finish(self, carry: Carry, batch: Batch) -> Tensor:
        """Applies the last norm, at positions of other modalities their own one if `norm` is untied."""
        normed: Tensor = self.normed(overlaid(self.norm, carry[0], super().finish(carry, batch), batch))
        return normed

    # --- names -------------------------------------------------------------------------------------------------------

    def untied(self) -> dict[str, list[str]]:
        """Returns the modalities of each untied part on this rank, by the part's name."""
        parts = ((name, copies(module)) for name, module in self.named_modules())
        return {name: list(own) for name, own in parts if own}

    def text_names(self, names: Iterable[str]) -> dict[str, str]:
        """Returns {name for another modality: name}, for the names of the text's modules, parameters or buffers.

        Of what all modalities share, such as the sinks of attention, there is no other name.
        """
        untied = self.untied()
        copied = {copy: name for name in names for copy in _copies_of(name, untied)}
        # A glob cannot be looked up; one that matches nothing is harmless.
        return {copy: name for copy, name in copied.items() if "*" in copy or _has(self, copy)}

    # --- queries of the engine and the stages --------------------------------------------------------------------

    def parameter_roles(self) -> Mapping[str, Role]:
        """Returns the roles of the text's parameters, and the same for their copies of each modality."""
        roles = super().parameter_roles()
        return {**roles, **{copy: roles[name] for copy, name in self.text_names(roles).items()}}

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the points with `final_norm` after the norms of all modalities; none if there are no others."""
        own: Mapping[str, TapPoint] = getattr(super(), "tap_points", dict)()
        return {**own, "final_norm": TapPoint("normed")} if own else own

    def float8_exempt(self) -> Sequence[str]:
        """Returns the exemptions of the text's modules, and the same for their copies."""
        exempt = super().float8_exempt()
        return [*exempt, *self.text_names(exempt)]

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """Returns the plan with copies split as the text's modules are, and one sum for all modalities of a part."""
        plan = dict(super().tensor_parallel_plan())
        for part in self.untied() if plan else ():
            plan |= self._split_part(part, plan)
        return plan

    def _split_part(self, part: str, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the plan of an untied part: sums over ranks are made once, behind all modalities."""
        own = {name: way for name, way in plan.items() if name == part or name.startswith(f"{part}.")}
        whole = own.get(part) == "whole_input"
        # A row-parallel matrix of each modality would sum on its own; their parts are merged first, and `merge` sums
        # once.
        inner = {name: _without_sum(way) if whole else way for name, way in own.items() if name != part or not whole}
        inner |= {copy: inner[name] for copy, name in self.text_names(inner).items()}
        return {**inner, f"{part}.merge": "partial_output"} if whole else inner


def _has(model: nn.Module, name: str) -> bool:
    """Whether there is a module, parameter or buffer of this name."""
    part: Any = model
    for key in name.split("."):
        part = getattr(part, key, None)
    return part is not None


def _copies_of(name: str, untied: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields the names for other modalities of a module or parameter in an untied part of the text."""
    for part, modalities in untied.items():
        rest = name.removeprefix(part)
        # Copies are below the part as well, and have no copies.
        if name.startswith(part) and rest[:1] in ("", ".") and not rest.startswith(f".{MODALITIES}."):
            yield from (f"{part}.{MODALITIES}.{modality}{rest}" for modality in modalities)


def _without_sum(way: Any) -> Any:
    return "partial_row" if way == "row" else way


def untie(model: Any, twins: Mapping[str, Any], parts: Collection[str], *, norm_after: bool) -> Any:
    """Adds `parts` of other modalities, which `twins` have, to a model with fusion `joint`. Returns the model."""
    _mix(model, UntiedModel)
    model.normed = nn.Identity()
    for name, layer in model.layers.items():
        _mix(layer, UntiedBlock)
        layer.norm_after = norm_after
        # For shared parts, too, so that tap points have the same names whatever is untied
        layer.updates = nn.ModuleDict({part: nn.Identity() for part in MIXINS})
        for part in _part_names(layer, parts):
            _untie_part(layer, part, {modality: getattr(twin.layers[name], part) for modality, twin in twins.items()})
    if "norm" in parts:
        model.norm.modalities = nn.ModuleDict({modality: twin.norm for modality, twin in twins.items()})
    return model


def _part_names(layer: nn.Module, parts: Iterable[str]) -> Iterator[str]:
    """Yields the parts of a layer by name, all of its norms for `norm`."""
    for part in parts:
        if part != "norm":
            yield part
            continue
        # A norm that the layer does not have is an `nn.Identity`, which needs no copy.
        norms = (name for name in BLOCK if name.endswith("norm"))
        yield from (name for name in norms if next(getattr(layer, name).parameters(), None) is not None)


def _untie_part(layer: nn.Module, name: str, others: Mapping[str, nn.Module]) -> None:
    part: Any = getattr(layer, name)
    part.modalities = nn.ModuleDict(others)
    if name not in MIXINS:
        return
    _mix(part, MIXINS[name])
    part.merge = Merge()
    for other in others.values() if name == "attention" else ():
        for key in SHARED_IN_ATTENTION:  # positions of all modalities meet in the text's
            if hasattr(other, key):
                delattr(other, key)


def _mix(module: Any, mixin: Any) -> None:
    base: Any = type(module)
    module.__class__ = derived(mixin, base)
