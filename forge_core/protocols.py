"""What components build: the contracts between the engine, models, stages and everything else.

Shapes: B sequences of a micro-batch, S positions, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

Batch = dict[str, "Tensor"]
"""Tensors whose first dimension is B. `input_ids` (B, S) int64; `labels` (B, S) int64, the target *of each position*
(already shifted by the dataset), -100 where ignored; optional `document_ids` and `positions` (B, S), int64. Neighbours
with equal document ids are of one document, which attention does not leave; without ids, a row is one document.
Positions count from 0 where a document begins; without them, where the row begins."""

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


class MatrixShard(NamedTuple):
    """The ranks that share a module's `weight` (out, in), and how. A stage that splits matrices sets `matrix_shard` on
    the module; what needs to know of the whole matrix, or of activations that are split as it is, reads it there."""

    group: torch.distributed.ProcessGroup
    dimension: int
    """0: each rank has some of the outputs. 1: each has some of the inputs, and results are summed over the ranks."""


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
class Prepares(Protocol):
    """A model whose layers share what can be made of a batch once. `forward` calls `prepare` by itself; what runs the
    parts of a model one by one calls it first, on each micro-batch and on every rank. Without it, each layer makes its
    own: slower, with the same result."""

    def prepare(self, batch: Batch) -> Batch:
        """The batch with further entries, of any shape, for the layers. Those that are there already stay."""
        ...


@runtime_checkable
class PreparesSequences(Protocol):
    """A model that needs at a position what stands at others, such as the token after the next. Where a stage divides
    sequences, no rank sees all of them later on, so whoever divides a batch calls this first; else `prepare` does."""

    def prepare_sequences(self, batch: Batch) -> Batch:
        """The batch, of whole sequences, with further entries. Those of shape (B, S, …) are divided like the others.
        Those that are there already stay."""
        ...


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
class HasLayerFlops(HasFlops, Protocol):
    """A model whose layers do not cost what their weights say, as with experts, of which a token meets a few. What its
    `flops` are more than theirs is computed behind the last layer."""

    def layer_flops(self, seq_len: int) -> Sequence[float]:
        """FLOPs a token of each layer, in order, forward and backward. Asked before any layer is taken away."""
        ...


@runtime_checkable
class HasTensorParallelPlan(Protocol):
    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Module name pattern (`layers.*.attention.q`) -> how it is split. Every module with parameters is named.

        column: rows of the weight, so that outputs are split. row: columns of the weight; takes split inputs, and sums
        over ranks. partial_row: like row, for a matrix without a bias or a stack of matrices, and without the sum.
        column_stack: like column, for a stack. partial_output: a module whose output is a part of a sum, which is taken
        there. whole_input: a module that holds such a pair; its first argument arrives with all positions.
        vocab_embedding, vocab_head: rows, which stand for ids. sequence: each position by itself, with whole weights (a
        norm between such pairs). replicate: whole weights, on split features (a norm of each head).
        """
        ...


@runtime_checkable
class HasSequenceMixers(Protocol):
    def sequence_mixers(self) -> Mapping[str, int]:
        """Names of the modules through which positions see each other, and nothing else in the model does, each with K,
        the number of its key/value heads on all ranks. It maps queries (B, S, H, E), keys (B, S, K, E), values
        (B, S, K, V) with V at most E, and the batch to (B, S, H, V), causally and within documents where the batch has
        `document_ids`; one that looks at many positions can be put in its place."""
        ...


class ExpertStack(Protocol):
    """A module all of whose parameters, its own and its children's, stack experts on dimension 0. With the parameters
    of some neighbouring experts alone, and numbers that count from the first of these, it computes their part of the
    sum, which is how ranks share them."""

    def __call__(
        self,
        tokens: Tensor,
        weights: Tensor,
        chosen: Tensor,
        rows: int | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """(T, D) to (T, D), in the dtype of `tokens`: the sum of weight x expert(token) over a token's choices.

        Args:
            tokens: (T, D).
            weights: (T, K), float32 or wider; differentiable.
            chosen: (T, K), int64, numbers of experts. -1: none, whatever the weight.
            rows: how many choices are not -1, where that is known: else the host waits for the number.
            meanwhile: called once, before this returns. A stage that sends tokens away calls it while they travel.
        """
        ...


@runtime_checkable
class HasExpertStacks(Protocol):
    def expert_stacks(self) -> Sequence[str]:
        """Names of the modules that are an `ExpertStack`."""
        ...


@runtime_checkable
class ChangesWithUpdates(Protocol):
    """A module with buffers that change from update to update by what was seen in the step, such as the bias by which a
    router balances its experts."""

    def after_update(self) -> None:
        """Change them. Called once after each update, on every rank, when `context.auxiliary.counted` has what all
        ranks counted in the step; not after a step whose update was skipped. Where only the device knows whether it
        was, all counts are zero if so."""
        ...


@runtime_checkable
class HasEnds(Protocol):
    """A model that can be cut between any two of its layers. Where it is, `layers` has those of this rank alone, and
    modules of an end that another rank has are replaced by ones without parameters. Tied modules are never parted."""

    def ends(self) -> tuple[Sequence[str], Sequence[str]]:
        """Names of the modules that `embed` uses, and of those that `finish` and the head use."""
        ...


@runtime_checkable
class HasFurtherBlocks(Protocol):
    """A model with blocks besides its `layers`, which `finish` runs, such as those that predict further tokens. What is
    done to each layer by itself, as to compute it again or to compile it, is done to them too."""

    def further_blocks(self) -> Sequence[str]:
        """Names of these modules; in a pipeline, of those that this rank has."""
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
    """A built stage. More is optional:

    `describe()` says what it did to the model, for the plan of the run.
    `parameter_device` is where it keeps parameters, gradients and optimizer state, if not on the run's device.
    `split(batch)` gives this rank's part of a micro-batch to the executor, by a stage that divides sequences.
    `micro_batch(model, backward=, last=)` is a context that executors hold around the forward pass of a micro-batch
    and, with `backward`, its recomputation and backward pass (`last`: of this step). An executor that lets
    micro-batches overlap holds one around all of a step, with `last=False`: what is left to reduce is then reduced in
    `complete_gradients`.
    `complete_gradients(model)` is called once a step after the last backward, last stage first, by a stage that leaves
    gradients partial or owns their reduction.
    `executor(model, loss, stages)` is for a stage that runs the micro-batches itself; its component says so
    (`ParallelComponent.brings_executor`).
    `counted_elsewhere(model)` gives parameters that other pipeline ranks have too and count in the global norm.
    """

    def apply(self, model: Model) -> Model:
        """Transform the model, in place or not, on the meta device. Parameter names must stay the same."""
        ...


@runtime_checkable
class HasEvaluationWeights(Protocol):
    """An optimizer whose weights for evaluation are others than those it trains, such as their average.

    Evaluation runs between `eval()` and `train()`. A checkpoint holds both kinds: training goes on from the one, and
    generation, export and `[checkpoint.load]` take the other.
    """

    def eval(self) -> None:
        """Put the weights for evaluation into the parameters."""
        ...

    def train(self) -> None:
        """Put back the weights that were there before `eval()`, to the bit."""
        ...

    def evaluation_weights(self) -> Mapping[Tensor, Tensor]:
        """By parameter, sharded like it; parameters that are evaluated as they are may be left out. For a checkpoint,
        which copies them. Changes nothing."""
        ...

    def load_evaluation_weights(self, weights: Mapping[Tensor, Tensor]) -> None:
        """Take back what a checkpoint has of them, after state and parameters were loaded. An optimizer that derives
        them from those ignores the call."""
        ...


@runtime_checkable
class PlacesState(Protocol):
    """An optimizer whose state is kept otherwise than by default (`forge_core.engine.state.empty_slot`), which is split
    like its parameter where it has that shape, else whole on every rank."""

    def empty_slot(self, parameter: Tensor, slot: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Memory for what a checkpoint has of a parameter's state: a tensor of this size, a DTensor where ranks have
        parts of it. None: this rank keeps none of it.

        Args:
            parameter: one of the optimizer's.
            size, dtype: as the checkpoint has it.

        Raises:
            CheckpointError: the checkpoint's state does not fit this optimizer.
        """
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

    def evaluate(self, batches: Sequence[Batch], measure: LossFunction | None = None) -> StepOutput:
        """Forward only, without gradients.

        Args:
            measure: what takes the place of the job's loss, such as a count of right guesses. Of its output,
                `per_sequence` is what comes back.
        """
        ...


class Dataset(Protocol):
    """Training sequences by number, in no particular order; the engine draws the order.

    Two more methods are optional: `where(index) -> str`, the file and place that a sequence comes from, for errors; and
    `describe() -> str`, what the plan of the run says of the sequences besides their number.
    """

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
class Stream(Protocol):
    """Training sequences that can only be read in order, in independent lanes (see `DocumentStream`)."""

    @property
    def held_out(self) -> Dataset | None: ...
    @property
    def bytes_per_token(self) -> float | None: ...
    @property
    def lanes(self) -> int: ...
    def read(
        self, lane: int, position: Mapping[str, Any] | None
    ) -> Iterator[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]:
        """Samples of a lane without end, each with the position (plain JSON) from which the next one is read."""
        ...


@runtime_checkable
class Documents(Protocol):
    """Tokenised documents, one after the other: what a packing makes sequences of. T tokens in all."""

    @property
    def held_out(self) -> Documents | None:
        """Documents that never occur in training, or None."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Mean UTF-8 bytes that a token of these documents stands for; None if unknown."""
        ...

    @property
    def end_of_text(self) -> int:
        """Id that ends every document."""
        ...

    def __len__(self) -> int:
        """T."""
        ...

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) int64: the tokens [start, stop) of all documents put one after the other; a copy."""
        ...

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        """(stop - start,) bool: which of these tokens are learned as labels (a chat's answers); None: all."""
        ...

    def where(self, start: int, stop: int) -> str:
        """Where these tokens come from, for errors: `tokens 0 to 9 of corpus.bin`."""
        ...

    def ends(self) -> np.ndarray:
        """(documents,) int64, ascending: the end of each document, its end-of-text included; the last is T. It may
        be a memory map.

        Raises:
            JobError: where documents end is not known; says how to provide it.
        """
        ...


class StreamedDocument(NamedTuple):
    """A tokenised document of a stream."""

    tokens: np.ndarray
    """(n,) ids, end-of-text at the end."""
    learned: np.ndarray | None
    """(n,) bool: which tokens are learned as labels; None: all."""
    position: Mapping[str, Any]
    """Plain JSON: reading from there gives this document first."""


@runtime_checkable
class DocumentStream(Protocol):
    """Documents that can only be read in order, in lanes that are independent of each other.

    Each row of the global batch belongs to one lane, whichever rank or worker loads it: what a lane gives must be a
    function of its number and position alone, and no document is in two lanes. `lanes` divides the global batch size.
    """

    @property
    def held_out(self) -> Documents | None: ...
    @property
    def lanes(self) -> int: ...
    def read(self, lane: int, position: Mapping[str, Any] | None) -> Iterator[StreamedDocument]:
        """The documents of a lane from a position on (None: from the start), without end: epoch after epoch."""
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
    """Receives metrics on rank 0. One more method is optional: `flush()`, called before each checkpoint, by a logger
    that keeps records in memory, since a run that is killed continues from the checkpoint and does not log those steps
    again. What it raises is a failed save."""

    def start(self, step: int) -> None:
        """The run starts after `step` completed steps: anything recorded later than that is stale. 0: from nothing, and
        whatever there is is stale."""

    def log(self, record: Mapping[str, Any]) -> None:
        """One line: `step` and numbers. Training lines have `loss`, …; evaluation lines have keys `eval/…`.

        What modules counted is in a training line under `counts`: {name: {row: list of numbers}}, `row` being a layer's
        number as a string.
        """

    def close(self) -> None:
        """The run ended, in whatever way. Called exactly once."""


class Storage(Protocol):
    """Checkpoints by step. A checkpoint is a folder that appears whole or not at all."""

    def begin(self, step: int) -> Path:
        """An empty folder to write into. Clears the storage first (see `clear`)."""
        ...

    def commit(self, step: int) -> Path:
        """Make what was written visible as the checkpoint of `step`; gives its folder."""
        ...

    def clear(self) -> None:
        """Remove what was begun and never committed, and what deletions that were cut short have left."""
        ...

    def discard(self, step: int) -> None:
        """Remove what was written for `step` and not committed, as far as that is possible."""
        ...

    def steps(self) -> Sequence[int]:
        """Steps that have a committed checkpoint, ascending."""
        ...

    def path(self, step: int) -> Path: ...
    def delete(self, step: int) -> None: ...
