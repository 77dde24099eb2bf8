"""The edit `sae`: reconstructions in place of activations, and latents set by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import min_len

from forge_core.contracts.components import FilePath
from forge_core.contracts.errors import ForgeError, Problem
from forge_plugin_taps import EditComponent, shares_tokens

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_kit.nn.taps import TapPoint
    from forge_plugin_taps import Edit, TapsInfo


@frozen(kw_only=True)
class SAEEdit(EditComponent):
    """Puts an autoencoder's reconstruction in place of activations, with some latents set to values."""

    folder: FilePath = field(validator=min_len(1))
    """Folder with one autoencoder for each point, as the sink and the command `inside sae` write them, or SAELens."""
    latents: Mapping[str, float] = field(factory=dict)
    """Values of latents by number (`latents = {"17" = 4.0}`), at every position; the others are as encoded."""
    keep_error: bool = True
    """Whether what the autoencoder does not explain is added again, so that only what `latents` change changes."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the numbers of latents, that the edit changes anything, and that the folder is there."""
        if wrong := [number for number in self.latents if not number.isdecimal()]:
            yield Problem("latents", f"{wrong[0]!r} is no number of a latent; they count from 0")
        if self.keep_error and not self.latents:
            yield Problem(
                "latents", "none is set, so that with keep_error nothing changes; set some, or keep_error = false"
            )
        if not Path(self.folder).is_dir():
            yield Problem("folder", f"{self.folder} does not exist; the sink sae writes RUN/sae when a run ends")

    def point_problems(self, points: Mapping[str, TapPoint], layout: Layout) -> Iterable[Problem]:
        """Checks that no rank has only a part of a point's features, of which latents are computed."""
        divided = [
            name for name, point in points.items() if shares_tokens(layout) and point.axes in ("heads", "hidden")
        ]
        if divided:
            yield Problem("point", f"ranks divide {divided[0]}; choose points between blocks")

    def build(self, context: BuildContext, taps: TapsInfo) -> Edit:
        """Reads no file: the autoencoder of a point is loaded when the point is first reached."""
        from forge_plugin_sae.reconstruction import Steer

        return Steer(self, context.device)


def folder_of(folder: Path, point: str) -> Path:
    """Where the autoencoder of a point is.

    Raises:
        ForgeError: it is not there.
    """
    path = folder / point
    if not (path / "cfg.json").is_file():
        there = sorted(each.parent.name for each in folder.glob("*/cfg.json"))
        raise ForgeError(f"{folder} has no autoencoder of {point}; it has {', '.join(there) or 'none'}")
    return path
