"""The sink `probe`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge, gt, lt, matches_re

from forge_core.contracts.components import WhenResumed, when_resumed
from forge_core.contracts.errors import Problem
from forge_plugin_taps.kinds import Sink, SinkComponent, TapsInfo

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

TARGETS = ("id", "label", "position", "source")
OPEN = ("id", "label")
"""Targets whose number of classes the job does not say."""


@frozen(kw_only=True)
class Probe(SinkComponent):
    """Trains a linear probe at each of its points: softmax regression from the activation to a class.

    Inputs are standardised by mean and deviation of all samples so far. Every sampled step first measures the probe on
    the sequences of the step that are held out, which no probe ever trains on, then trains on the others. Each probe
    has one rank that trains it; probes are the same under every layout. At the end of the run they are in
    `RUN/FOLDER/POINT.safetensors`: `weight` (classes, width) and `bias` for activations as they are in the model.

    Metrics, for each point: `probe/FOLDER/POINT/accuracy` and `loss` on held-out samples, and `majority`, the accuracy
    of the class that was the most frequent so far.
    """

    resumes_as: ClassVar[WhenResumed | None] = "flag"

    target: str = "label"
    """What to predict: `id` (the token), `label` (the next token), `position`, `source` (number of the data source), or
    your own function as `./file.py:name` or `package.module:name`. It maps (N,) int64 tensors by name (`step`, `row`,
    `position`, `id`, `label`, `document`, `source`, `sequence`) to classes (N,) int64; negative: to be left out."""
    classes: int = field(default=0, validator=ge(0))
    """Number of classes; samples of others are left out. 0: the length of sequences, or the number of sources, or of
    tokens of the tokenizer; your own function needs it."""
    held_out: float = field(default=0.2, validator=[gt(0), lt(1)])
    """Share of sequences that are measured and not trained on."""
    lr: float = field(default=1e-2, validator=gt(0))
    """Learning rate of Adam."""
    weight_decay: float = field(default=1e-4, validator=ge(0))
    """Added to the loss: half of it times the squared weights."""
    updates: int = field(default=8, validator=gt(0))
    """Updates of a sampled step, each on all its samples."""
    folder: str = field(default="probe", validator=matches_re(r"[\w.-]+"), metadata=when_resumed("safe"))
    """Folder below the run's, and name in the metrics; sinks of this type need different ones."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the target, that the number of its classes is known, and that no other probe has the folder."""
        own = ":" in self.target
        if not own and self.target not in TARGETS:
            yield Problem("target", f"{self.target!r} is none of {', '.join(TARGETS)}, nor a function ./file.py:name")
        if own and not self.classes:
            yield Problem("classes", f"the number of classes of {self.target} is not known; set it")
        if self.target in OPEN and not self.classes and job.data.tokenizer is None:
            reason = f"without a tokenizer, the number of classes of {self.target!r} is not known"
            yield Problem("classes", f"{reason}; set it")
        if job.train.global_batch_size < 2:
            reason = "of the one sequence of a step, which is held out, a probe learns nothing"
            yield Problem("held_out", f"{reason}; train.global_batch_size must be at least 2")
        stages = job.parallel.values()
        others = [sink for stage in stages for sink in getattr(stage, "sinks", {}).values()]
        if sum(isinstance(sink, Probe) and sink.folder == self.folder for sink in others) > 1:
            yield Problem("folder", f"{self.folder!r} is also used by another sink; give each probe sink its own")

    def build(self, context: BuildContext, taps: TapsInfo) -> Sink:
        """Returns a sink without probes, which it makes when the first sample shows the widths of its points."""
        from forge_plugin_taps.probe_sink import ProbeSink

        return ProbeSink(self, context, taps)
