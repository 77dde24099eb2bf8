"""Edits that put what autoencoders make of activations in their place.

Shapes: B sequences, s positions of this rank, … the dimensions of a feature.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import ForgeError
from forge_plugin_sae.edits import folder_of
from forge_plugin_sae.model import SparseCoder, load
from forge_plugin_sae.quality import Quality
from forge_plugin_taps import Edit

if TYPE_CHECKING:
    from forge_plugin_sae.edits import SAEEdit
    from forge_plugin_taps import Where


class Steer(Edit):
    """See `SAEEdit`. One object for all points of the edit."""

    def __init__(self, settings: SAEEdit, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.coders: dict[str, SparseCoder] = {}

    def apply(self, x: Tensor, where: Where) -> Tensor:
        """Encodes x (B, s, …), sets the latents, and decodes; with `keep_error`, adds only what this changes."""
        refuse_parts(where)
        if where.point not in self.coders:
            # By the first use, as one edit may match many points of which a rank has few
            self.coders[where.point] = self._load(where.point)
        coder, flat = self.coders[where.point], x.flatten(2)
        latents = coder.encode(flat)
        # A copy: with `keep_error`, the error is what the unchanged latents leave out
        changed = latents.clone()
        for number, value in self.settings.latents.items():
            changed[..., int(number)] = value
        out = coder.decode(changed)
        if self.settings.keep_error:
            # In the coder's dtype: a small change would be lost in the rounding of bfloat16.
            out = flat.to(out.dtype) + out - coder.decode(latents)
        return out.to(x.dtype).view_as(x)

    def _load(self, point: str) -> SparseCoder:
        coder = load(folder_of(Path(self.settings.folder), point), self.device)
        if coder.transcodes:
            raise ForgeError(
                f"{self.settings.folder}/{point} is a transcoder, whose output stands in for another point"
            )
        for number in self.settings.latents:
            if int(number) >= len(coder.b_enc):
                raise ForgeError(f"edit sae: {point} has {len(coder.b_enc)} latents, and latents has number {number}")
        return coder


class Remember(Edit):
    """Keeps the input of a transcoder until its output point is reached, in the same layer."""

    def __init__(self) -> None:
        self.x: Tensor | None = None

    def apply(self, x: Tensor, where: Where) -> Tensor:
        """Returns x unchanged, and keeps it for the transcoder's output point."""
        self.x = x
        return x


class Reconstruct(Edit):
    """What a coder makes of its input in place of its target, measured on the way."""

    def __init__(self, coder: SparseCoder, source: Remember | None) -> None:
        self.coder, self.source = coder, source
        width = coder.W_dec.shape[1]
        self.quality = Quality(width, coder.W_dec.device)

    def apply(self, x: Tensor, where: Where) -> Tensor:
        """Returns the reconstruction of x (B, s, …), and adds it to `quality`."""
        refuse_parts(where)
        source = x if self.source is None else self.source.x
        if source is None:
            raise ForgeError(f"the input of the transcoder for {where.point} is computed after its output")
        out, target = self.coder(source.flatten(2)), x.flatten(2)
        # Sequences that only fill up a batch have nothing but ignored labels
        rows = (where.batch["labels"] != IGNORED_LABEL).any(1).nonzero().squeeze(1)
        latents = self.coder.encode(source.flatten(2)[rows]).flatten(0, 1)
        kept, error = target[rows].flatten(0, 1), (target - out)[rows].flatten(0, 1)
        self.quality.add(kept, error, latents)
        return out.to(x.dtype).view_as(x)


class Zero(Edit):
    """Zeros: what a point is worth without anything in its place."""

    def apply(self, x: Tensor, where: Where) -> Tensor:
        """Returns zeros of the shape of x."""
        return torch.zeros_like(x)


def refuse_parts(where: Where) -> None:
    """Raise if this rank has some of the features only, from which no latent can be computed."""
    if where.split is not None:
        raise ForgeError(f"edit sae: tensor parallel divides {where.point}; choose a point between blocks")
