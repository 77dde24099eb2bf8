"""Vision whose tower runs for images only whose features are not kept yet.

Shapes: B rows, N images of a row at most, P patches of a row, V values of a patch, W width of the tower, K taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge_core import ForgeError
from forge_core.auxiliary import Auxiliary
from forge_kit.nn.derived_class import derived
from forge_plugin_vision import GRIDS, PATCHES, Grid, VisionLanguage
from forge_plugin_vision.features.eligibility import training
from forge_plugin_vision.features.files import FeatureFiles
from forge_plugin_vision.features.identity import ImageKey, describe_tower, digest_of_weights, image_keys, is_compiled
from forge_plugin_vision.modules.images import Images
from forge_plugin_vision.modules.vision import Vision

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model

COUNTS = "features"
"""Name of the counts of a step: images, of those found, damaged files, images for which there was no space."""


@frozen(kw_only=True)
class Tower:
    """Facts of a tower that its features depend on, or are stored by."""

    description: Mapping[str, Any]
    dtype: torch.dtype
    """Compute dtype, in which features are stored."""
    outputs: int
    """1 + K: the features, and the features of each tap."""
    auxiliary: Auxiliary


class CachedVision(Vision):
    """Mixin of a `Vision`: features of images that the tower has seen before come from files.

    Until `open`, as in the dry run, the tower runs for every micro-batch.
    """

    tower: Tower
    files: FeatureFiles | None = None
    groups: Sequence[dist.ProcessGroup] = ()
    """Ranks that gather the tower's weights together."""
    all_rows: bool = False
    """Whether the tower always runs on all rows of a micro-batch: compiled graphs are of one shape."""

    def open(self, root: Path, keep_free: int) -> None:
        """Open the features of this tower with its present weights below `root`. Collective.

        Args:
            root: folder of all towers.
            keep_free: bytes to be left free on the file system.
        """
        self.groups, self.all_rows = _gathering_groups(self.encoder), is_compiled(self.encoder)
        known = {"compiled": self.all_rows, "weights": digest_of_weights(self.encoder)}
        self.files = FeatureFiles(root, {**self.tower.description, **known}, keep_free)

    def encoder_flops(self, grid: Grid) -> float:
        """Returns the FLOPs of the encoder until the files are opened, then 0."""
        # None in a run, for `flops_per_token`: not of the images either for which the tower has to run once.
        return super().encoder_flops(grid) * (self.files is None)

    def encode(self, batch: Batch) -> tuple[Images, Sequence[Tensor]]:
        """As `Vision.encode`, but the tower runs only for rows with features that are not kept. Collective.

        Raises:
            ForgeError: the tower trains by now, or returns another dtype than the compute dtype.
        """
        if self.files is None:
            return super().encode(batch)
        if trained := training(self.encoder):  # whatever the job promised: a hook may have changed it
            raise ForgeError(
                f"plugins.features: {trained[0]} trains in the midst of a run, so that its features change"
            )
        # The host waits for the device here: it needs the bytes for their digests.
        rows, (patches, grids) = len(batch[PATCHES]), (batch[name].cpu() for name in (PATCHES, GRIDS))
        images = image_keys(patches, grids)
        kept = self._read(images, self.files)
        missing = [image for image in images if image.key not in kept]
        computed = self._rows_to_encode(sorted({image.row for image in missing}), rows)
        if len(computed) == rows:
            places, outputs = self._compute(batch)
        else:
            # Places of patches are places of features: `problems_of` refuses towers in which they differ.
            places = Images.of(batch[GRIDS], patches.shape[1])
            outputs = self._assemble(images, kept, batch)
            if computed:
                part = torch.tensor(computed, device=batch[PATCHES].device)
                _, own = self._compute({name: batch[name][part] for name in (PATCHES, GRIDS)})
                for output, of_rows in zip(outputs, own, strict=True):
                    output[part] = of_rows  # whole rows, features that were found included
        unwritten = self._write(missing, outputs, self.files)
        self._count(len(images), len(images) - len(missing), unwritten)
        return places, outputs

    def _compute(self, batch: Batch) -> tuple[Images, Sequence[Tensor]]:
        """Run the tower on all rows of `batch`; see `encode`."""
        places, outputs = super().encode(batch)
        if (dtype := outputs[0].dtype) != self.tower.dtype:
            message = f"the vision encoder returns {dtype}, and the compute dtype is {self.tower.dtype}"
            raise ForgeError(
                f"plugins.features: {message}; features can be kept of encoders only that return the latter"
            )
        return places, outputs

    def _read(self, images: Sequence[ImageKey], files: FeatureFiles) -> dict[str, Tensor]:
        """Returns the features that are kept, by key, in the host's memory."""
        kept: dict[str, Tensor] = {}
        width: Any = self.encoder.width
        for image in images:
            shape = (self.tower.outputs, image.stop - image.start, width)
            # Once for an image that occurs several times in a micro-batch
            if image.key not in kept and (found := files.read(image.key, shape, self.tower.dtype)) is not None:
                kept[image.key] = found
        return kept

    def _rows_to_encode(self, missing: Sequence[int], rows: int) -> Sequence[int]:
        """Returns the numbers of the rows that the tower runs on, given those that lack features. Collective."""
        # Blocks that `fsdp` has sharded are gathered when they run. So the very ranks that would gather agree first, in
        # every call and whatever their rows hold, and all of them run the tower if one has to.
        if self.groups:
            any_missing = torch.tensor([bool(missing)], dtype=torch.uint8)  # on the CPU, where the host decides
            for group in self.groups:
                dist.all_reduce(any_missing, op=dist.ReduceOp.MAX, group=group)
            if any_missing.item() and not missing:
                missing = [0]  # any row: it is computed for the collectives in it, not for its features
        return list(range(rows)) if missing and self.all_rows else missing

    def _assemble(self, images: Sequence[ImageKey], kept: Mapping[str, Tensor], batch: Batch) -> Sequence[Tensor]:
        """Returns (B, P, W) for each output of the tower: features that are kept at their patches, zeros elsewhere."""
        rows, patches, device = *batch[PATCHES].shape[:2], batch[PATCHES].device
        sizes = (self.tower.outputs, rows, patches, self.encoder.width)
        # Pinned, so that the host continues during the copy to the device
        outputs = torch.zeros(sizes, dtype=self.tower.dtype, pin_memory=device.type != "cpu")  # type: ignore[arg-type]
        for image in images:
            if image.key in kept:
                outputs[:, image.row, image.start : image.stop] = kept[image.key]
        return outputs.to(device, non_blocking=True).unbind()

    def _write(self, missing: Sequence[ImageKey], outputs: Sequence[Tensor], files: FeatureFiles) -> int:
        """Keep features of images, each once; returns the number of those for which there was no space."""
        if not missing:
            return 0
        rows = sorted({image.row for image in missing})
        # In one copy, as the host waits for each
        features = torch.stack([output.detach()[rows] for output in outputs]).cpu()
        once = {image.key: image for image in missing}.values()
        return sum(
            not files.write(image.key, features[:, rows.index(image.row), image.start : image.stop]) for image in once
        )

    def _count(self, images: int, found: int, unwritten: int) -> None:
        assert self.files is not None
        counts = [images, found, self.files.damaged, unwritten]
        self.files.damaged = 0  # counted in this micro-batch; sums over steps are made elsewhere
        device = self.tower.auxiliary.device
        self.tower.auxiliary.count(COUNTS, 0, torch.tensor(counts, dtype=torch.float64, device=device))


def add_cache(model: Model, component: VisionLanguage, context: BuildContext) -> None:
    """Let the `vision` of a model keep features, from when it is opened."""
    vision: Any = model.get_submodule("vision")
    own: Any = type(vision)
    taps = component.fusion.taps
    vision.__class__ = derived(CachedVision, own)
    vision.tower = Tower(
        description=describe_tower(component.vision.encoder, context, taps),
        dtype=context.dtype,
        outputs=1 + len(taps),
        auxiliary=context.auxiliary,
    )
    context.auxiliary.summarise(COUNTS, _metrics)


def _metrics(counts: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
    images, found, damaged, unwritten = counts[0]
    hits = torch.where(
        images > 0, found / images.clamp(min=1), 1.0
    )  # where nothing was looked for, nothing was missing
    return {"features/hits": hits, "features/damaged": damaged, "features/unwritten": unwritten}


def _gathering_groups(encoder: nn.Module) -> Sequence[dist.ProcessGroup]:
    """Groups of this rank along which parameters are sharded."""
    groups: dict[str, dist.ProcessGroup] = {}
    for parameter in encoder.parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        for dimension, placement in enumerate(parameter.placements):
            if not placement.is_replicate() and mesh.size(dimension) > 1:
                group = mesh.get_group(dimension)
                groups[group.group_name] = group
    return list(groups.values())
