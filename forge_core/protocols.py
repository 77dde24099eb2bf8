"""What components build: the contracts between the engine, models, stages and everything else.

Shapes: B sequences of a micro-batch, S positions, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

Batch = dict[str, "Tensor"]
"""Tensors whose first dimension is B. `input_ids` (B, S) int64; `labels` (B, S) int64, the target *of each position*
(already shifted by the dataset), -100 where ignored; optional `document_ids` and `positions` (B, S)."""

Carry = tuple["Tensor", ...]
"""What travels from layer to layer, and from pipeline stage to pipeline stage."""

IGNORED_LABEL = -100

Role = Literal["embedding", "head", "norm", "bias", "router", "matrix", "stack", "fused"]
"""What a parameter is for. `matrix`: one 2-D matrix of a hidden layer; `stack`: matrices stacked on dimension 0 (one an
expert); `fused`: several matrices concatenated on dimension 0."""


class VocabShard(NamedTuple):
    """The slice of the vocabulary that this rank's logits cover."""

    group: torch.distributed.ProcessGroup
    offset: int
    size: int


@runtime_checkable
class Head(Protocol):
    """Maps final hidden states to logits. `forge_core.modules.LinearHead` is the usual one."""

    @property
    def vocab_shard(self) -> VocabShard | None:
        """None where every rank has the whole vocabulary."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, D) -> (…, V), or this rank's slice of V when `vocab_shard` is set; in the dtype of `hidden`."""
        ...

    def whole(self, dtype: torch.dtype | None = None) -> AbstractContextManager[Sequence[Tensor]]:
        """A context in which the head's weights are whole on the data dimensions: gathered and cast to `dtype` once
        however often `logits` is called, their gradient reduced once. Gives the tensors that `logits` then uses, each
        connected to its parameter, so that a loss may differentiate with respect to them itself."""
        ...


class LossOutput(NamedTuple):
    """What a loss returns for one micro-batch. All float32 (float64 if the model is)."""

    sum: Tensor
    """() differentiable: the sum over valid positions. The engine divides by the valid tokens of the global batch."""
    count: Tensor  # type: ignore[assignment]  # the name hides a method of tuples that nobody calls
    """() number of valid positions."""
    per_sequence: tuple[Tensor, Tensor]
    """(B,) and (B,): detached sums and counts, of which per-source losses are made."""


LossFunction = Callable[["Head", "Tensor", "Batch"], LossOutput]
"""(head, hidden (B, S, D), batch) -> LossOutput."""

Schedule = Callable[[int, int], float]
"""(step, total steps) -> factor; pure. Step 0 is the first update."""


class Fill(Protocol):
    """Fills one parameter with initial values that do not depend on how it is sharded."""

    def normal(self, std: float, mean: float = 0.0) -> None: ...
    def trunc_normal(self, std: float, bound: float = 3.0) -> None:
        """Normal with standard deviation `std`, cut at `bound` standard deviations."""

    def uniform(self, low: float, high: float) -> None: ...
    def constant(self, value: float) -> None: ...


@runtime_checkable
class Initialises(Protocol):
    """A module that knows how to initialise its own (direct) parameters and buffers. Memory starts as NaN."""

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fill the parameter `name` of this module: call one method of `fill` once."""

    def init_buffers(self, device: torch.device) -> None:
        """Recompute the non-persistent buffers of this module on `device`."""


class Model(Protocol):
    """A network the engine can train. Subclasses `torch.nn.Module`.

    `forward(batch)` returns the final hidden states (B, S, D) and equals `finish` after all `layers` after `embed`;
    stages that split the model use the parts. A model implements further protocols (below) as far as it wants the
    stages that need them.
    """

    @property
    def layers(self) -> nn.ModuleDict:
        """Ordered, keyed by the global layer number as a string; each maps (carry, batch) -> carry."""
        ...

    @property
    def head(self) -> Any:
        """A module that is a `Head`."""
        ...

    def embed(self, batch: Batch) -> Carry: ...
    def finish(self, carry: Carry, batch: Batch) -> Tensor:
        """After the last layer: final norm; gives (B, S, D)."""
        ...

    def __call__(self, batch: Batch) -> Tensor: ...
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...


@runtime_checkable
class HasFlops(Protocol):
    def flops(self, seq_len: int) -> float:
        """Model FLOPs a token, forward and backward, at this sequence length: 6 for each weight that multiplies a
        token (embedding look-ups cost nothing, recomputation never counts), plus attention with the causal half."""
        ...


@runtime_checkable
class HasRoles(Protocol):
    def parameter_roles(self) -> Mapping[str, Role]:
        """Role of each parameter by name; what is left out is derived."""
        ...


@runtime_checkable
class HasTies(Protocol):
    def tied_parameters(self) -> Mapping[str, str]:
        """{other name: name under which the shared parameter is listed, drawn and stored}."""
        ...


@runtime_checkable
class HasTensorParallelPlan(Protocol):
    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Module name pattern (`layers.*.attention.q`) -> `column`, `row`, `vocab_embedding`, `vocab_head`,
        `sequence` (a norm that works on a slice of the sequence) or `replicate`."""
        ...


@runtime_checkable
class HasFSDPUnits(Protocol):
    def fsdp_units(self) -> Sequence[Sequence[str]]:
        """Groups of module names, each to be gathered and freed together, in the order of the forward pass."""
        ...


@runtime_checkable
class HasFloat8Exemptions(Protocol):
    def float8_exempt(self) -> Sequence[str]:
        """Module name patterns that keep their precision (head, routers)."""
        ...


@runtime_checkable
class HasBackendChoices(Protocol):
    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Kernels chosen by measurement for sequences of this length: (what, choice, why)."""
        ...


@runtime_checkable
class Generates(Protocol):
    """A model that can decode with a cache of what it has seen."""

    def new_cache(self, batch_size: int, length: int) -> Any:
        """An empty cache for up to `length` positions of `batch_size` rows, on the model's device."""
        ...

    def decode(self, batch: Batch, cache: Any) -> Tensor:
        """Like `forward` for the next positions of each row, after those in `cache`; extends `cache`.
        `batch["positions"]` (B, S) gives each token's position; a negative one marks left padding, to be ignored."""
        ...


class ParallelStage(Protocol):
    """A built stage. Two more methods are optional: `complete_gradients(model)`, called once a step after the last
    backward, in the order of the stages, by a stage that leaves gradients partial or owns their reduction; and
    `executor(model, loss)`, by a stage that runs the micro-batches itself."""

    def apply(self, model: Model) -> Model:
        """Transform the model, in place or not, on the meta device. Parameter names must stay the same."""
        ...


class StepOutput(NamedTuple):
    """What an executor gives back for one step (or one evaluation batch). On device, nothing waited for."""

    loss_sum: Tensor
    """() detached, float32 or wider: the sum over this rank's valid positions."""
    count: Tensor  # type: ignore[assignment]
    """() valid positions behind `loss_sum`."""
    per_sequence: tuple[Tensor, Tensor]
    """Sums and counts of all sequences of the step, in the order of the micro-batches."""


class Executor(Protocol):
    """Runs micro-batches of equal shape. The run loop cannot tell one executor from another."""

    def train_step(self, batches: Sequence[Batch], denominator: Tensor) -> StepOutput:
        """Forward and backward of all micro-batches; gradients accumulate. Each loss sum is divided by `denominator`
        (the valid tokens of the global batch, a device scalar) before backward, so reductions are plain sums."""
        ...

    def evaluate(self, batches: Sequence[Batch]) -> StepOutput:
        """Forward only, without gradients."""
        ...


class Dataset(Protocol):
    """Training sequences by number, in no particular order; the engine draws the order."""

    @property
    def held_out(self) -> Dataset | None:
        """Sequences of documents that never occur in training, in a fixed order, or None."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Mean UTF-8 bytes a token of `held_out` stands for (None if unknown): loss in nats to bits per byte."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        """One sequence: `input_ids` (S,) and `labels` (S,), shifted, ignored ones -100; integers of any width."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back."""

    vocab_size: int
    end_of_text: int
    """Id that ends a document."""

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None:
        """Write what `TokenizerComponent.load` needs into `folder`."""

    def fingerprint(self) -> str:
        """SHA-256 (hex) that differs whenever an encoding could differ."""
        ...


class Logger(Protocol):
    """Receives metrics on rank 0."""

    def start(self, step: int) -> None:
        """The run starts after `step` completed steps (0: from nothing): anything recorded later than that is stale."""

    def log(self, record: Mapping[str, Any]) -> None:
        """One line: `step` and numbers. Training lines have `loss`, …; evaluation lines have keys `eval/…`."""

    def close(self) -> None:
        """The run ended, in whatever way. Called exactly once."""


class Storage(Protocol):
    """Checkpoints by step. A checkpoint is a folder that appears whole or not at all."""

    def begin(self, step: int) -> Path:
        """An empty folder to write into."""
        ...

    def commit(self, step: int) -> Path:
        """Make what was written visible as the checkpoint of `step`; gives its folder."""
        ...

    def steps(self) -> Sequence[int]:
        """Steps that have a committed checkpoint, ascending."""
        ...

    def path(self, step: int) -> Path: ...
    def delete(self, step: int) -> None: ...


Documents = Callable[[], Iterable[str]]
