"""A model and data small enough to train in milliseconds, through the contracts that real ones use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from forge_core.config.rules import check_rules
from forge_core.contracts.components import DatasetComponent, ModelComponent, OptimizerComponent, when_resumed
from forge_core.contracts.data import BatchField
from forge_core.job import (
    CheckpointSection,
    DataSection,
    EvalSection,
    Job,
    JobSection,
    TrainSection,
)
from forge_core.plugins.catalog import Catalog

if TYPE_CHECKING:
    import numpy as np
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset
    from forge_core.contracts.model import Model
    from forge_core.contracts.optimizer import NamedParameters

VOCABULARY = 32
PATCH = 4
"""Values of a patch."""

TINY_JOB = """
[train]
steps = 4
global_batch_size = 4
seq_len = 8
[model]
type = "forge_testing:TinyModel"
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "forge_testing:TinyAdamW"
"""
"""A job file with the components of this module; lines appended to it belong to `[optimizer]`."""
BESIDE_MODEL = """
[train]
steps = 1
global_batch_size = 2
seq_len = 16
device = "cpu"
[optimizer]
type = "forge_testing.tiny:TinyAdamW"
[[data.sources]]
type = "forge_testing.tiny:Numbers"
"""
"""The tables of a job file beside `[model]`, for tests of how a model's keys are read and checked."""


@frozen(kw_only=True)
class TinyModel(ModelComponent):
    """An embedding, residual feed-forward layers, a norm and a head: position by position, no attention."""

    dim: int = 16
    layers: int = 2
    dropout: float = field(default=0.0, metadata=when_resumed("flag"))
    """Probability of dropping activations, for randomness inside a step."""

    def build(self, context: BuildContext) -> Model:
        from forge_testing.tiny_model import TinyNetwork

        return TinyNetwork(self.dim, self.layers, self.dropout, VOCABULARY, context.dtype)


@frozen(kw_only=True)
class SplittableModel(ModelComponent):
    """`TinyModel` for every layout that needs no attention, including tensor parallel."""

    dim: int = 16
    layers: int = 2

    def build(self, context: BuildContext) -> Model:
        from forge_testing.tiny_model import SplittableNetwork

        return SplittableNetwork(self.dim, self.layers, VOCABULARY, context.dtype)


@frozen(kw_only=True)
class PenalisedModel(TinyModel):
    """`TinyModel` with an auxiliary loss of weight 10 in each unit ("token", "sequence", "layer") at each layer."""

    recompute: bool = False
    """Whether layers compute their forward pass again in the backward pass."""

    def build(self, context: BuildContext) -> Model:
        from forge_testing.tiny_model import TinyNetwork, penalise

        network = TinyNetwork(self.dim, self.layers, self.dropout, VOCABULARY, context.dtype)
        return penalise(network, context.auxiliary, self.recompute)


@frozen(kw_only=True)
class PatchModel(TinyModel):
    """`TinyModel` that adds to every token the mean of its row's `patches`, which `embed` encodes by blocks."""

    patches: int = 6
    """Patches of a row."""
    blocks: int = 2
    """Blocks of the encoder."""

    def batch_fields(self, job: Job) -> Mapping[str, BatchField]:
        return {"patches": BatchField((self.patches, PATCH), "uint8")}

    def build(self, context: BuildContext) -> Model:
        from forge_testing.tiny_model import PatchNetwork

        return PatchNetwork(self.dim, self.layers, VOCABULARY, context.dtype, PATCH, self.blocks)


@frozen(kw_only=True)
class TinyAdamW(OptimizerComponent):
    """torch's AdamW, with an epsilon that does not amplify the round-off of gradients near zero."""

    lr: float = 1e-2
    weight_decay: float = 0.1
    eps: float = 1e-5

    def update_size(self, role: str, outputs: int, inputs: int) -> float:
        """See `forge_kit.optim.update_size.HasUpdateSize`."""
        return float(inputs)

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        from forge_kit.torch_internals import LocalAdamW

        return LocalAdamW(parameters.groups(self.weight_decay), lr=self.lr, eps=self.eps, fused=True)


@frozen(kw_only=True)
class Numbers(DatasetComponent):
    """Sequences that count upwards from a start with a stride: easy to learn. Some labels are ignored."""

    sequences: int = 64
    held_out: int = 8
    ignored: int = 2
    """Sequence i has i modulo this many leading labels ignored, so that micro-batches differ."""
    start: int = 0

    def build(self, context: BuildContext) -> Dataset:
        held = NumberSequences(self.held_out, context.job.train.seq_len, 1, self.start + self.sequences)
        return NumberSequences(self.sequences, context.job.train.seq_len, self.ignored, self.start, held)


@frozen(kw_only=True)
class PatchNumbers(Numbers):
    """`Numbers` with `patches` whose values follow from the number of the sequence, for `PatchModel`."""

    patches: int = 6
    """Patches of a row."""

    def build(self, context: BuildContext) -> Dataset:
        length = context.job.train.seq_len
        held = PatchSequences(self.held_out, length, 1, self.start + self.sequences, patches=self.patches)
        return PatchSequences(self.sequences, length, self.ignored, self.start, held, patches=self.patches)


@frozen
class NumberSequences:
    """See `forge_core.contracts.data.Dataset`."""

    count: int
    seq_len: int
    ignored: int
    start: int
    held_out: Any = None
    bytes_per_token: float | None = 2.0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        import numpy as np

        number = self.start + index
        tokens = (number + (1 + number % 3) * np.arange(self.seq_len + 1)) % VOCABULARY
        labels = tokens[1:].copy()
        labels[: number % self.ignored] = -100
        return {"input_ids": tokens[:-1], "labels": labels}


@frozen
class PatchSequences(NumberSequences):
    """See `PatchNumbers`."""

    patches: int = 6

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        import numpy as np

        values = (np.arange(self.patches * PATCH) * (7 + self.start + index)) % 256
        return {**NumberSequences.__getitem__(self, index), "patches": values.astype(np.uint8).reshape(-1, PATCH)}


def tiny_job(output: str, catalog: Any = None, **changes: Any) -> Job:
    """Build a job of `TinyModel`, `TinyAdamW` and `Numbers` that trains within a second.

    Args:
        output: Folder for run folders.
        catalog: Catalog of default components; by default, everything installed.
        changes: Fields of `Job` to replace; sections may be dicts, and other names are keys of `[train]` (`steps=3`).
    """
    from forge_core.config.load import complete

    train: dict[str, Any] = {"steps": 4, "global_batch_size": 4, "seq_len": 8}
    sections: dict[str, Any] = {
        "job": {"output": output},
        "data": {"sources": (Numbers(),)},
        "eval": {},
        "checkpoint": {},
    }
    kinds = {"job": JobSection, "data": DataSection, "eval": EvalSection, "checkpoint": CheckpointSection}
    fields: dict[str, Any] = {"model": TinyModel(), "optimizer": TinyAdamW()}
    for name, value in changes.items():
        if name in sections:
            sections[name] |= value
        elif name in attrs.fields_dict(Job):
            fields[name] = value
        else:
            train[name] = value
    built = {name: kinds[name](**values) for name, values in sections.items()}
    return complete(Job(train=TrainSection(**train), **built, **fields), catalog)


def job_problems(job: Job, ranks: int = 1) -> list[str]:
    """Return the problems that checking a job on this number of ranks finds."""
    return [str(problem) for problem in check_rules(job, Catalog.installed(), ranks)]
