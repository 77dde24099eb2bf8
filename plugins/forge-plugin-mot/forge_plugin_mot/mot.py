"""The fusion `mot`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import attrs
from attrs import field, frozen
from attrs.validators import min_len

from forge_core.contracts.components import TrainingHook, when_resumed
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_mot.requirements import check_layers, component_problems
from forge_plugin_mot.warm_start import WarmStart
from forge_plugin_vision import IMAGE, SOUND, VIDEO, FusionComponent, Joint, VisionLanguage

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.job import Job
    from forge_plugin_vision.modules.vision import Vision

Part = Literal["attention", "ffn", "norm"]
Modality = Literal["image", "video", "sound"]
CODES: Mapping[str, int] = {"image": IMAGE, "video": VIDEO, "sound": SOUND}
"""Entry of `input_ids` at the positions of each modality."""


@frozen(kw_only=True)
class MixtureOfTransformers(FusionComponent):
    """Each modality has its own weights, and attention is over all positions (Liang et al. 2024, arXiv 2411.04996).

    Features take the places of token embeddings, as in the fusion `joint`. In each layer, positions of a modality go
    through its own attention projections, feed-forward part and norms, which have the shapes of the text's; the text's
    keep their names and initial values. For language models with the layers of `transformer`.
    """

    untie: tuple[Part, ...] = field(default=("attention", "ffn", "norm"), validator=min_len(1))
    """Parts that each modality has its own of. `attention`: the four projections, and the norms of queries and keys.
    `ffn`: the feed-forward part. `norm`: the norms of layers, and the last one."""
    norm: Literal["before", "after"] = "before"
    """Where a layer normalises: as the language model does, by default the input of attention and feed-forward part
    (before), or their output (after), as the paper's code and Chameleon do."""
    modalities: tuple[Modality, ...] = field(default=("image",), validator=min_len(1))
    """Modalities with their own weights, in addition to text. Positions of others go through the text's weights."""
    warm_start: bool = field(default=True, metadata=when_resumed("safe"))
    """Whether the weights of a modality start as copies of the text's, loaded by `[checkpoint.load]` or initial.
    Weights of a modality that `[checkpoint.load]` has are kept."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields names listed twice and, for a `transformer`, parts that cannot have weights for each modality."""
        for key, listed in (("untie", self.untie), ("modalities", self.modalities)):
            if len({*listed}) < len(listed):
                yield Problem(key, f"{list(listed)} names one twice; leave it out")
        if isinstance(job.model, VisionLanguage):
            yield from component_problems(job.model.language, self.untie, norm_after=self.norm == "after")

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Returns the hook that copies the text's weights, if `warm_start`."""
        return [WarmStart()] if self.warm_start else []

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Reports in the summary of the run that weights start as copies."""
        if self.warm_start:
            yield "weights of modalities", "copies of the text's", "model.fusion.warm_start, in a new run"

    def build(self, context: BuildContext, model: Model, vision: Vision) -> Model:
        """Adds the parts of one further language model for each modality to a model with fusion `joint`.

        Raises:
            JobError: a layer of the language model has no parts that can be untied.
        """
        from forge_plugin_mot.modules.model import untie
        from forge_plugin_vision.modules.vision import feature_count

        check_layers(model, self.untie, norm_after=self.norm == "after")
        # Weights have shapes, roles and initial spread of the text's because the same components build them.
        twins: dict[str, Model] = {name: self._twin(context) for name in self.modalities}
        placed = context.build(Joint(), model=model, vision=vision)
        untied = untie(placed, twins, self.untie, norm_after=self.norm == "after")
        untied.codes = {name: CODES[name] for name in self.modalities}
        # Each modality has room for all features of a row, whichever modality its images are.
        untied.slots = feature_count(vision)
        if context.layout.tp > 1 and context.mesh is not None:  # no mesh: the job is only checked
            untied.share = (context.mesh["tp"].get_local_rank(), context.layout.tp)
        return untied

    def _twin(self, context: BuildContext) -> Model:
        """Returns another language model as the job's, on the meta device."""
        import torch

        from forge_core.auxiliary import Auxiliary

        component = context.job.model
        if not isinstance(component, VisionLanguage):
            message = f'fusion "mot" is built within vision_language only, but the model is {type(component).__name__}'
            raise JobError([Problem("model", message)])
        # What a part counts would be added to the text's counts of the same layer.
        silent = attrs.evolve(context, auxiliary=Auxiliary(torch.device("cpu")))
        return silent.build(component.language)
