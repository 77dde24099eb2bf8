"""The sink `sae`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import matches_re

from forge_core.contracts.components import WhenResumed, when_resumed
from forge_core.contracts.errors import Problem
from forge_plugin_sae.settings import Training
from forge_plugin_taps import SinkComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_taps import Sink, TapsInfo


@frozen(kw_only=True)
class SAE(Training, SinkComponent):
    """Trains a sparse autoencoder, or a transcoder, for each of its points on the activations that the run samples.

    Every autoencoder has one rank that trains it; activations go to that rank only. State, weights and order of rows
    are the same under every layout. At the end of the run they are in `RUN/FOLDER/POINT`, in SAELens' layout.

    Metrics, for each point and over its updates since the line before: `sae/NAME/POINT/explained_variance`, `l0`,
    `loss`, `dead` (share of latents) and `updates` (in all).
    """

    resumes_as: ClassVar[WhenResumed | None] = "flag"

    output: str = ""
    """Trains transcoders: the point in the same layer whose activations are predicted from the activations of each
    point (`mlp_out`, for example, with `points = ["layers.*.resid_mid"]`). Empty: autoencoders."""
    folder: str = field(default="sae", validator=matches_re(r"[\w.-]+"), metadata=when_resumed("safe"))
    """Folder below the run's, and name in the metrics; sinks of this type need different ones."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the settings of training, and that no other sink writes to the same folder."""
        yield from self.setting_problems()
        stages = job.parallel.values()
        others = [sink for stage in stages for sink in getattr(stage, "sinks", {}).values() if isinstance(sink, SAE)]
        if sum(sink.folder == self.folder for sink in others) > 1:
            yield Problem("folder", f"{self.folder!r} is also used by another sink; give each sae sink its own")

    def build(self, context: BuildContext, taps: TapsInfo) -> Sink:
        """Returns a sink without autoencoders, which it makes when the first sample shows the widths of its points."""
        from forge_plugin_sae.sink import SAESink

        return SAESink(self, context, taps)
