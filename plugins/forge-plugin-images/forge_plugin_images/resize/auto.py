"""The type `auto`: as the encoder has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from forge_plugin_images.resize.any_size import NativeResize
from forge_plugin_images.resize.joined import AnyResolutionResize, CanvasResize
from forge_plugin_images.resize.kinds import ResizeComponent, Resizer
from forge_plugin_images.resize.one_size import StretchResize

if TYPE_CHECKING:
    from forge_core.contracts.errors import Problem
    from forge_plugin_vision import ImageFormat, ImageInput


@frozen(kw_only=True)
class AutoResize(ResizeComponent):
    """`native`, `stretch`, `canvas` or `any_resolution`, whichever suits encoder and adapter, with their defaults.

    For frames of clips, `native` or `stretch`.
    """

    suits_frames: ClassVar[bool] = True

    def build(self, seen: ImageInput, patches: float | None = None) -> Resizer:
        """Builds the chosen type's."""
        return self.chosen(seen.format, of_frames=patches is not None).build(seen, patches)

    def chosen(self, form: ImageFormat, *, of_frames: bool = False) -> ResizeComponent:
        """Returns the type that suits an encoder's format."""
        if form.joins_tiles and not of_frames:
            return AnyResolutionResize()
        if form.arrangements and not form.grid:
            return CanvasResize()
        return StretchResize() if form.grid else NativeResize()

    def size_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Returns the problems of the chosen type, which names no key that is at its default."""
        return self.chosen(seen.format).size_problems(seen)

    def share_problems(self, seen: ImageInput) -> Iterable[Problem]:
        """Likewise."""
        return self.chosen(seen.format).share_problems(seen)
