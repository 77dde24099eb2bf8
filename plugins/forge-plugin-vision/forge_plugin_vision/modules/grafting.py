"""Adds vision to a language model in place.

A fusion derives a class from `VisionLanguageModel`, and `graft` puts it before the language model's own class. The
language model keeps its methods, and so the names and initial values of its parameters; the fusion's class overrides
what images change and calls `super()` for the rest.

Shapes: B sequences, S positions, D model width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.model import Model, Role
from forge_kit.nn.derived_class import derived
from forge_kit.nn.taps import TapPoint, tap_points
from forge_plugin_vision.modules.cost import LayerCost, StepCost
from forge_plugin_vision.modules.vision import Vision

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch

    Base = Model
else:
    # Not `Model`: its defaults would come before what a language model on plain nn.Module has.
    Base = object

PLACES = "image_places"
"""Batch entry (B, S): number of a position among the row's positions of images, and so of the feature (or the image,
where the fusion gives it one position) that stands there; -1 where there is a token."""


class VisionLanguageModel(Base):
    """Mixin of a language model with `vision`: declares the tower's modules, and numbers the positions of images."""

    vision: Vision
    step_cost: StepCost | None = None
    """Counts the FLOPs of each step; None: the language model's FLOPs are unknown."""

    def prepare_sequences(self, batch: Batch) -> Batch:
        """Adds `PLACES`, while rows are whole: later, no rank can tell how many features come before its part."""
        batch = super().prepare_sequences(batch)
        if PLACES in batch:
            return batch
        images = batch["input_ids"] < 0
        return {**batch, PLACES: (images.cumsum(1) - 1).where(images, -1)}

    def sequence_entries(self) -> Collection[str] | None:
        """Returns the entries with `PLACES`, which has a value for each position; None: unknown."""
        entries = super().sequence_entries()
        return None if entries is None else [*entries, PLACES]

    def prepare(self, batch: Batch) -> Batch:
        """Counts the FLOPs of the micro-batch, and adds `PLACES` unless a stage has done so on whole rows."""
        # Here and not in `embed`: each rank of a pipeline can tell which of its layers are trained.
        if self.step_cost is not None:
            self.step_cost.count(self, batch)
        return super().prepare(self.prepare_sequences(batch))

    def decode(self, batch: Batch, cache: Any) -> Tensor:
        """Adds `PLACES`, which number the features of this call's images alone."""
        decoded: Tensor = super().decode(self.prepare_sequences(batch), cache)  # type: ignore[misc]
        return decoded

    # --- queries of the engine and the stages --------------------------------------------------------------------

    def flops(self, seq_len: int) -> float | None:
        """Returns the FLOPs with the vision part's, for rows full of patches; None: unknown."""
        own = super().flops(seq_len)
        return None if own is None else own + self.vision.flops() / seq_len

    def embed_flops(self, seq_len: int) -> float:
        """Returns the FLOPs of `embed`, which runs the encoder and the adapters."""
        return super().embed_flops(seq_len) + self.vision.flops() / seq_len

    def layer_costs(self, seq_len: int) -> Sequence[LayerCost] | None:
        """Returns the cost of each layer, followed by the cost of everything behind the layers; None: unknown.

        For a language model without `layer_flops`, this is only the cost of the whole model. A fusion that adds to
        layers adds to their costs.
        """
        language: Any = super()
        lengths = (1, 2, seq_len)  # see `LayerCost.of`
        flops = [language.flops(length) for length in lengths]
        if None in flops:
            return None
        layers = [language.layer_flops(length) for length in lengths]
        # A model states `layer_flops` for all lengths or for none.
        inside = [] if None in layers else [LayerCost.of(*each) for each in zip(*layers, strict=True)]
        whole = LayerCost.of(*flops)
        behind = (total - sum(part) for total, part in zip(whole, zip(*inside, strict=True), strict=True))
        return [*inside, LayerCost(*behind) if inside else whole]

    def ends(self) -> tuple[Sequence[str], Sequence[str]] | None:
        """Returns the ends with `vision` in the first, so that one rank of a pipeline has it; None: unknown."""
        ends = super().ends()
        return None if ends is None else ([*ends[0], "vision"], ends[1])

    def encoder_blocks(self) -> list[str]:
        """Names of the tower's blocks on this rank of a pipeline."""
        blocks = getattr(getattr(self.vision, "encoder", None), "blocks", ())
        return [f"vision.encoder.blocks.{number}" for number in range(len(blocks))]

    def further_blocks(self) -> Sequence[str]:
        """Returns the tower's blocks, then further blocks of the language model."""
        return [*self.encoder_blocks(), *super().further_blocks()]

    def fsdp_units(self) -> Sequence[Sequence[str]]:
        """Returns each block of the tower, the rest of `vision`, and then the language model's units."""
        blocks = self.encoder_blocks()
        # A language model may make units of all `further_blocks`, of which the tower's are some.
        language = [[name for name in unit if name not in blocks] for unit in super().fsdp_units()]
        return [*([name] for name in blocks), ["vision"], *(unit for unit in language if unit)]

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """Returns the plan with vision whole on each rank, which encodes some of the rows."""
        plan = super().tensor_parallel_plan()
        # An empty plan declares that the language model cannot be split, and stays empty
        return {**plan, "vision.*": "partial"} if plan else plan

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the language model's points, and the vision part's under names that begin with `vision.`."""
        own: Mapping[str, TapPoint] = getattr(super(), "tap_points", dict)()
        return {**own, **tap_points(self.vision, "vision", "vision")}

    def float8_exempt(self) -> Sequence[str]:
        """Returns the exemptions with the whole vision part among them."""
        return [*super().float8_exempt(), "vision.*"]

    def parameter_roles(self) -> Mapping[str, Role]:
        """Returns the roles with those declared by encoder and adapter, on ranks of a pipeline that have them."""
        roles = dict(super().parameter_roles())
        for part in ("encoder", "adapter"):
            own: Mapping[str, Role] = getattr(getattr(self.vision, part, None), "parameter_roles", dict)()
            roles |= {f"vision.{part}.{name}": role for name, role in own.items()}
        return roles


def graft(model: Model, mixin: Any, vision: Vision) -> Any:
    """Adds `vision` to a language model in place, and `mixin` before its class. Returns the model.

    Raises:
        JobError: the model has no `embedding` whose `weight` is (V, D).
    """
    embedding_width(model)
    cls: Any = type(model)
    # Not a wrapper, which would put a prefix before the names of all parameters
    model.__class__ = derived(mixin, cls)
    model.vision = vision
    return model


def count_costs(model: Model, context: BuildContext) -> Model:
    """Lets a model, with all that its fusion adds, count the FLOPs of each training step. Returns the model."""
    if isinstance(model, VisionLanguageModel):
        costs = model.layer_costs(context.job.train.seq_len)
        model.step_cost = None if costs is None else StepCost(model, costs, context)
    return model


def embedding_width(model: Model) -> int:
    """Returns the width D of a language model.

    Raises:
        JobError: it has no `embedding` whose `weight` is (V, D).
    """
    embedding = getattr(model, "embedding", None)
    weight = getattr(embedding, "weight", None)
    if not isinstance(embedding, nn.Module) or not isinstance(weight, Tensor) or weight.ndim != 2:
        message = f"{type(model).__name__} has no module `embedding` with a table `weight` (vocabulary, width)"
        raise JobError([Problem("model.language", f"{message}, to which images could be added")])
    return weight.shape[1]


class TokensOnly(nn.Module):
    """Mixin of an embedding: a negative id is no token, and becomes zeros."""

    def forward(self, ids: Tensor) -> Tensor:
        """Maps ids (B, S) to (B, S, D), with zeros where features are to be added."""
        # Row 0 is looked up for images, and has no gradient from there: it is multiplied by 0.
        rows: Tensor = super().forward(ids.clamp(min=0))
        return rows * (ids >= 0).unsqueeze(-1).to(rows.dtype)
