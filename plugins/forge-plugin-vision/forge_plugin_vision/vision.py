"""The components of `forge-plugin-vision`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import ModelComponent, default_type
from forge_core.contracts.data import BatchField
from forge_core.contracts.errors import JobError, Problem
from forge_kit.optim.fields import TRAINING_ONLY
from forge_plugin_vision.kinds import (
    BROKEN,
    GRIDS,
    PATCHES,
    SECONDS,
    AdapterComponent,
    FusionComponent,
    Grid,
    ImageFormat,
    ImageInput,
    VisionEncoderComponent,
    format_for,
    grid_problems,
    image_input,
)

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.job import Job
    from forge_plugin_vision.modules.vision import Vision


@frozen(kw_only=True)
class VisionPart:
    """`[model.vision]`: how images are seen, and how many a sequence may have."""

    encoder: VisionEncoderComponent
    """`[model.vision.encoder]`: turns patches into features; `type` is required."""
    adapter: AdapterComponent = default_type("forge-plugin-vision/mlp")
    """`[model.vision.adapter]`: turns features into vectors of the language model's width."""
    images_per_sequence: int = field(default=1, validator=ge(1), metadata=TRAINING_ONLY)
    """Images of a sequence at most."""
    patches_per_sequence: int = field(default=0, validator=ge(0), metadata=TRAINING_ONLY)
    """Patches of a sequence at most: every row has room for as many. 0: of `images_per_sequence` images of the
    encoder's size, or the largest that it takes, if there is one."""


@frozen(kw_only=True)
class VisionLanguage(ModelComponent):
    """Adds images to a language model, whose parameters keep their names and initial values."""

    built_to_check = True
    """The demands of a fusion on the language model's layers show when it is built."""
    language: ModelComponent = default_type("forge-plugin-transformer/transformer")
    """`[model.language]`: any model with an `embedding`."""
    vision: VisionPart
    """`[model.vision]`: the vision tower."""
    fusion: FusionComponent = default_type("forge-plugin-vision/joint")
    """`[model.fusion]`: how the language model sees images."""

    def image_input(self) -> ImageInput:
        """Returns the format that suits encoder and adapter, and the room of a sequence."""
        return ImageInput(
            format=self._format,
            patches_per_sequence=self._patches,
            images_per_sequence=self.vision.images_per_sequence,
            encoder=self.vision.encoder,
            adapter=self.vision.adapter,
            fusion=self.fusion,
        )

    def batch_fields(self, job: Job) -> Mapping[str, BatchField]:
        """Returns the entries of images, whose shapes follow from the keys and not from the data."""
        return {
            PATCHES: BatchField((self._patches, self._format.values), "uint8"),
            GRIDS: BatchField((self.vision.images_per_sequence, 3), "int64"),
            SECONDS: BatchField((self.vision.images_per_sequence,), "float32"),
            BROKEN: BatchField((), "int64"),
        }

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields grids that do not suit the adapter, and that the room for patches cannot be derived."""
        for problem in grid_problems(self._format, self.vision.encoder, self.vision.adapter):
            yield problem.below("vision")
        if not self._patches:
            message = "0 needs an encoder whose images have one size; say how many patches a sequence may have"
            yield Problem("vision.patches_per_sequence", message)

    @property
    def _format(self) -> ImageFormat:
        return format_for(self.vision.encoder, self.vision.adapter)

    @property
    def _patches(self) -> int:
        if self.vision.patches_per_sequence or (largest := self._format.largest) is None:
            return self.vision.patches_per_sequence
        return self.vision.images_per_sequence * largest.patches

    def build(self, context: BuildContext) -> Model:
        """Build the language model, whose width the adapter needs, then the vision part, and join them.

        Raises:
            JobError: the language model has several residual streams.
        """
        from forge_plugin_vision.modules.grafting import count_costs, embedding_width
        from forge_plugin_vision.modules.vision import Vision

        model = context.build(self.language)
        if (streams := getattr(model, "streams", 1)) > 1:
            message = f"{streams} residual streams go from layer to layer, where images are added to a single one"
            raise JobError([Problem("model.language.residual_connection", f'{message}; take type = "add"')])
        here = context.at("vision")
        encoder = here.at("encoder").build(self.vision.encoder, taps=self.fusion.taps)
        adapter = here.at("adapter").build(self.vision.adapter, width=encoder.width, dim=embedding_width(model))
        vision = Vision(encoder, adapter, self.image_input(), context)
        return count_costs(context.build(self.fusion, model=model, vision=vision), context)  # last: with all parts


@frozen(kw_only=True)
class TowerPart:
    """`[model.vision]` of a tower alone."""

    encoder: VisionEncoderComponent
    """`[model.vision.encoder]`: as in a vision-language model."""


@frozen(kw_only=True)
class VisionTower(ModelComponent):
    """A vision tower alone, with the names that its parameters have in `vision_language`. It is kept, not trained.

    `forge-run weights import` makes a checkpoint of it from a published tower, of which a vision-language model takes
    its weights.
    """

    vision: TowerPart
    """`[model.vision]`: the tower."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields, for every job, that a tower alone cannot be trained."""
        message = "a vision tower alone predicts nothing that could be learned"
        hint = (
            'take type = "vision_language", and the weights by [[checkpoint.load]] with include = ["vision.encoder.*"]'
        )
        yield Problem("", f"{message}; {hint}")

    def build(self, context: BuildContext) -> Model:
        """Build the encoder without taps."""
        from forge_plugin_vision.modules.tower import TowerModel

        encoder = context.at("vision").at("encoder").build(self.vision.encoder, taps=())
        return TowerModel(encoder, self.vision.encoder.image_format(), context.dtype)


@frozen(kw_only=True)
class Joint(FusionComponent):
    """Features replace token embeddings, and the language model runs as usual (LLaVA, Liu et al. 2023)."""

    deepstack: tuple[int, ...] = ()
    """Numbers of encoder blocks, ascending from 0, whose outputs are added at the places of images after the first
    language layers, one block after each (DeepStack, Meng et al. 2024); Qwen3-VL: `[8, 16, 24]`."""
    deepstack_adapter: AdapterComponent | None = None
    """`[model.fusion.deepstack_adapter]`: each of those blocks has its own. Without the table: like
    `[model.vision.adapter]`."""
    bidirectional: bool = False
    """Whether positions of an image (or of a video, all its frames, unless text stands between them) attend to each
    other in both directions, as in Gemma 3; everything else is causal. The language model's attention must be able to:
    `gqa` is."""
    bidirectional_in_windows: bool = False
    """With `bidirectional`: only layers with a window attend so, within the window, as in Gemma 4."""
    prefix: bool = False
    """Whether all positions of a document before its first learned token attend to each other in both directions, as in
    PaliGemma: images and the prompt, of which nothing is learned. What follows is causal. In generation the prompt is
    the prefix. It has the same requirement for the language model as `bidirectional`."""

    @property
    def taps(self) -> Sequence[int]:
        """The blocks of `deepstack`."""
        return self.deepstack

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields keys that exclude each other or context parallel, and DeepStack blocks or adapters that do not fit."""
        for key in ("bidirectional", "prefix"):
            if getattr(self, key) and layout.cp > 1:
                message = f"cp of degree {layout.cp} divides sequences, and its attention is causal over the ranks"
                yield Problem(key, f"{message}; leave [parallel.cp] out, or set {key} = false")
        if self.bidirectional_in_windows and not self.bidirectional:
            message = "true has no meaning without bidirectional; set that, or leave this out"
            yield Problem("bidirectional_in_windows", message)
        if self.bidirectional and self.prefix:
            yield Problem(
                "prefix", "bidirectional is set as well, and a prefix has its images within; keep one of the two"
            )
        if list(self.deepstack) != sorted({*self.deepstack}) or any(number < 0 for number in self.deepstack):
            yield Problem("deepstack", f"{list(self.deepstack)} are not numbers of blocks in ascending order from 0")
        if self.deepstack_adapter is None:
            return
        if not self.deepstack:
            yield Problem("deepstack_adapter", "it has no use without deepstack; set that, or leave the table out")
        adapter, side = image_input(job).adapter, image_input(job).format.multiple
        # A clip with different rows, columns and frames, so that adapters which treat one of them otherwise differ
        grid = image_input(job).encoder.feature_grid(Grid(2, 2 * side, 3 * side))
        counts = [each.positions(grid) for each in (adapter, self.deepstack_adapter)]
        if counts[0] != counts[1] or side % self.deepstack_adapter.multiple:
            message = f"it makes {counts[1]} features where [model.vision.adapter] makes {counts[0]}"
            yield Problem("deepstack_adapter", f"{message}; they must be as many, as they take the same places")

    def build(self, context: BuildContext, model: Model, vision: Vision) -> Model:
        """Build it; coordinates are added if the language model has an `mrope`.

        Raises:
            JobError: the language model, the encoder or the adapter lacks what a key requires.
        """
        from forge_kit.nn.derived_class import derived
        from forge_plugin_vision.modules.deepstack import DeepStackModel, StackedVision, add_deepstack
        from forge_plugin_vision.modules.grafting import TokensOnly, embedding_width, graft
        from forge_plugin_vision.modules.image_spans import add_image_spans
        from forge_plugin_vision.modules.joint import JointInputsModel, JointModel, PlacedVision
        from forge_plugin_vision.modules.prefix_spans import add_prefix_spans
        from forge_plugin_vision.modules.spatial_positions import add_spatial_positions

        with_inputs = getattr(model, "per_layer_inputs", None) is not None
        if with_inputs and self.deepstack:
            message = "the language model has per_layer_inputs, which are made of one feature a position"
            raise JobError([Problem("model.fusion.deepstack", f"{message}; leave one of the two out")])
        plain = JointInputsModel if with_inputs else JointModel
        grafted: Any = graft(model, DeepStackModel if self.deepstack else plain, vision)
        embedding: Any = type(grafted.embedding)
        # Before features are added: ids of images are negative, and their embeddings must be zeros.
        grafted.embedding.__class__ = derived(TokensOnly, embedding)
        # The vision part is built before its fusion, which alone determines the class
        vision.__class__ = StackedVision if self.deepstack else PlacedVision
        if context.layout.tp > 1 and context.mesh is not None:  # no mesh: the job is only checked
            grafted.vision.share = (context.mesh["tp"].get_local_rank(), context.layout.tp)
        adapter = vision.image_input.adapter
        if self.deepstack:
            component, here = self.deepstack_adapter or adapter, context.at("vision.deepstack")
            sizes = {"width": vision.encoder.width, "dim": embedding_width(model)}
            add_deepstack(grafted, [here.at(str(n)).build(component, **sizes) for n in range(len(self.deepstack))])
        # Each puts a mixin before the class so far, whose `prepare_sequences` runs first.
        add_spatial_positions(grafted, vision.image_input)
        if self.bidirectional:
            add_image_spans(grafted, in_windows=self.bidirectional_in_windows)
        if self.prefix:
            add_prefix_spans(grafted)
        return grafted
