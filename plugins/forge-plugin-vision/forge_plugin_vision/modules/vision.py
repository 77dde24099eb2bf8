"""Images of a batch to features for the language model.

Shapes: B rows, N images of a row at most, P patches of a row, V values of a patch, M features of a row, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_kit.nn.taps import TapPoint, tap_points
from forge_plugin_vision.kinds import BROKEN, GRIDS, PATCHES, Grid
from forge_plugin_vision.modules.images import Images, plain_grids

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_plugin_vision.kinds import ImageFormat, ImageInput, VisionEncoderComponent


class Normalise(nn.Module):
    """Bytes of patches (…, V) to normalised values in the compute dtype."""

    # On the device: bytes are a quarter of the values that would be sent there otherwise.
    scale: Tensor
    offset: Tensor

    def __init__(self, form: ImageFormat, dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.dtype = form, dtype
        for name in ("scale", "offset"):
            self.register_buffer(name, torch.empty(form.values), persistent=False)

    def init_parameter(self, name: str, fill: object) -> None:
        """There are none."""

    def init_buffers(self, device: torch.device) -> None:
        """Recomputes scale and offset of each value, so that (byte / 255 - mean) / std = byte scale + offset."""
        # In float64, so that values are rounded once, by `copy_`
        mean, std = (torch.tensor(each, dtype=torch.float64) for each in (self.form.mean, self.form.std))
        repeats = self.form.values // self.form.channels
        for buffer, values in ((self.scale, 1 / (255 * std)), (self.offset, -mean / std)):
            buffer.copy_(values.repeat_interleave(repeats))  # values of a patch are in order of channels

    def forward(self, patches: Tensor) -> Tensor:
        """Maps bytes (…, V) to (…, V), computed in the buffers' dtype and then rounded to the compute dtype."""
        return (patches.to(self.scale.dtype) * self.scale + self.offset).to(self.dtype)


class Vision(nn.Module):
    """Encoder and adapter: maps a batch with `patches` and `grids` to features (B, M, D).

    The first features of a row belong to its images; the remaining ones are arbitrary but finite.
    """

    def __init__(self, encoder: nn.Module, adapter: nn.Module, image_input: ImageInput, context: BuildContext) -> None:
        super().__init__()
        self.normalise = Normalise(image_input.format, context.dtype)
        self.encoder, self.adapter = encoder, adapter
        self.image_input = image_input
        self._auxiliary = context.auxiliary
        # Ranks that share the positions of a row (`cp`) all have its images, and what they count is summed.
        self._counted_by = context.layout.token_ranks // context.layout.data_parallel

    def forward(self, batch: Batch) -> Tensor:
        """Returns features (B, M, D) of the encoder's last output, and counts patches for metrics."""
        self.count(batch)
        features, *_ = self.features(batch)
        return features

    def features(self, batch: Batch) -> Sequence[Tensor]:
        """Returns (B, M, D) of the encoder's features; with taps, a fusion appends the outputs of further adapters."""
        images, (encoded, *_) = self.encode(batch)
        return (self.adapter(encoded, images),)

    def encode(self, batch: Batch) -> tuple[Images, Sequence[Tensor]]:
        """Returns the places of features, and (B, F, W) each: the encoder's features, then its taps' features.

        All fusions call the encoder here, so a mixin that overrides this method may bring features from elsewhere.
        """
        images = Images.of(batch[GRIDS], batch[PATCHES].shape[1])
        encoded: Sequence[Tensor] = self.encoder(self.normalise(batch[PATCHES]), images)
        return places_of_features(self.image_input.encoder, images), encoded

    def count(self, batch: Batch) -> None:
        """Count the patches of a micro-batch for the metrics `vision/…`, and the documents that it lacks."""
        filled = plain_grids(batch[GRIDS]).prod(-1).sum(1).double()
        metrics = {
            "vision/patches_per_sequence": filled.sum(),
            "vision/fill": filled.sum() / batch[PATCHES].shape[1],
            "vision/sequences_without_images": (filled == 0).sum().double(),
        }
        for name, value in metrics.items():
            self._auxiliary.metric(name, value / self._counted_by, "sequence")
        if BROKEN in batch:
            self._auxiliary.metric("data/unreadable", batch[BROKEN].sum().double() / self._counted_by)

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Returns the points of the encoder, and the outputs of the encoder and the adapter."""
        ends = {f"{name}_out": TapPoint(name, axes="images") for name in ("encoder", "adapter")}
        return tap_points(self.encoder, "encoder") | ends

    def flops(self) -> float:
        """Returns FLOPs of a row full of patches, forward and backward, if all trains.

        Images have the size that the encoder states, or else are squares that share the room equally.
        """
        form, patches = self.image_input.format, self.image_input.patches_per_sequence
        side = max(isqrt(patches // self.image_input.images_per_sequence) // form.multiple, 1) * form.multiple
        image = form.largest or Grid(1, side, side)
        return (self.encoder_flops(image) + self.adapter_flops(image)) * patches / image.patches

    def encoder_flops(self, grid: Grid) -> float:
        """Returns FLOPs of the encoder for an image, forward and backward; of many for a `Grid` of tensors."""
        return flops_of(self.encoder, grid.plain)

    def adapter_flops(self, grid: Grid) -> float:
        """Returns FLOPs of all adapters likewise."""
        return flops_of(self.adapter, self.image_input.encoder.feature_grid(grid))


def places_of_features(encoder: VisionEncoderComponent, images: Images) -> Images:
    """Returns where the features of an encoder stand in their images, of which these are the places of patches."""
    grids: Any = images.grids.unbind(-1)
    # By identity: `==` of two grids would compare their tensors
    if (seen := encoder.feature_grid(before := Grid(*grids))) is before:
        return images
    sides: Any = seen
    return Images.of(torch.stack(tuple(sides), -1), encoder.feature_room(images.number.shape[1]))


class SharedVision(Vision):
    """Vision of which ranks of tensor parallel, who see the same rows, each encode a share of the rows.

    What it returns is a part of a sum over those ranks: the rows of others are zeros in it.
    """

    share: tuple[int, int] = (0, 1)
    """Number of this rank among those that share the rows, and their number."""

    def own_rows(self, batch: Batch, *names: str) -> Batch:
        """Returns entries of this rank's rows, as many on every rank: those past the last are zeros."""
        rank, ranks = self.share
        count = -(-len(batch[names[0]]) // ranks)  # rounded up: all ranks run the same collectives
        parts = {name: batch[name][rank * count : (rank + 1) * count] for name in names}
        return {name: self._rows(part, 0, count - len(part)) for name, part in parts.items()}

    def among_all(self, own: Tensor, rows: int) -> Tensor:
        """Returns `rows` rows: the results for `own_rows`, and zeros for the rows of other ranks."""
        rank, ranks = self.share
        every = self._rows(own, rank * len(own), (ranks - 1 - rank) * len(own))
        return every if len(every) == rows else every[:rows].clone()  # no view: FSDP hooks into the output

    @staticmethod
    def _rows(tensor: Tensor, before: int, after: int) -> Tensor:
        if not before and not after:
            return tensor
        return F.pad(tensor, (*[0] * (2 * tensor.ndim - 2), before, after))  # the last pair is dimension 0


def flops_of(part: nn.Module, grid: Grid) -> float:
    """Returns a part's own count for an image, or 6 for each element of its matrices and patch."""
    own: Any = getattr(part, "flops", None)
    if own is not None:
        flops: float = own(grid)
        return flops
    return 6.0 * grid.patches * sum(p.numel() for p in part.parameters() if p.ndim > 1)


def feature_count(vision: Vision) -> int:
    """Returns M, the features of a row, of a bare model: from shapes alone."""
    sizes = vision.image_input
    room = sizes.encoder.feature_room(sizes.patches_per_sequence)
    features = torch.empty(1, room, vision.encoder.width, device="meta")  # type: ignore[call-overload]
    grids = torch.empty(1, sizes.images_per_sequence, 3, dtype=torch.int64, device="meta")
    # Not by `Images.of`: torch computes shapes of arithmetic on "meta" in Python, which takes longer than all the rest.
    place = torch.empty(1, room, dtype=torch.int64, device="meta")
    with torch.no_grad():
        adapted: Tensor = vision.adapter(features, Images(grids, place, place, place, place))
    return adapted.shape[1]
