"""The evaluation `sae`: the loss of the model with reconstructions in place of activations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import EvaluationComponent
from forge_core.contracts.errors import Problem
from forge_plugin_sae.sae import SAE

if TYPE_CHECKING:
    from forge_core.contracts.contexts import EvaluationContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class LossRecovered(EvaluationComponent):
    """Held-out loss with an autoencoder's reconstruction in place of its point, or a transcoder's of its output.

    Logs `eval/sae/FOLDER/clean_loss` with the model as it is, and for each point of the sink:
    `eval/sae/FOLDER/POINT/loss` with the reconstruction; `loss_recovered`, (zero - loss) / (zero - clean) with zeros in
    its place and with the model as it is: 1 if nothing is lost, 0 if zeros would do as well; `explained_variance` and
    `l0` of the same sequences. Each point costs two evaluations, and one more for all. Logs nothing before the
    autoencoders' first update.
    """

    sink: str = "sae"
    """Name of the sink: `[parallel.taps.sinks.NAME]`."""
    sequences: int = field(default=64, validator=ge(0))
    """How many held-out sequences, always the same; 0: all."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the job has a sink of type `sae` with the name `sink`."""
        sinks = {n: s for stage in job.parallel.values() for n, s in getattr(stage, "sinks", {}).items()}
        if not isinstance(sinks.get(self.sink), SAE):
            there = ", ".join(name for name, sink in sinks.items() if isinstance(sink, SAE)) or "none"
            yield Problem("sink", f"there is no sink {self.sink!r} of type sae; the job has {there}")

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        """Returns the metrics that the class docstring lists; none without held-out data. Collective."""
        from forge_plugin_sae.loss_recovery import recovered

        return {} if context.held_out is None else recovered(self, context)
