"""Contracts of models: the network, its head, and the facts that parallel stages and the engine ask for.

Shapes: B sequences of a micro-batch, S positions, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from forge_core.contracts.data import Batch

Carry = tuple["Tensor", ...]
"""Activations passed from layer to layer, and from pipeline stage to pipeline stage."""

Role = Literal["embedding", "head", "norm", "bias", "router", "matrix", "stack", "fused"]
"""Purpose of a parameter. `matrix`: one 2-D matrix of a hidden layer; `stack`: matrices stacked on dimension 0 (one per
expert); `fused`: several matrices concatenated on dimension 0."""


class VocabShard(NamedTuple):
    """The slice of the vocabulary that this rank's logits cover."""

    group: torch.distributed.ProcessGroup
    offset: int
    size: int


class MatrixShard(NamedTuple):
    """The ranks that share a module's `weight` (out, in), and how. A stage that splits matrices sets `matrix_shard` on
    the module; code that depends on the whole matrix, or on activations split like it, reads it there."""

    group: torch.distributed.ProcessGroup
    dimension: int
    """0: each rank holds some of the outputs. 1: each holds some of the inputs, and results are summed over ranks."""


@runtime_checkable
class Head(Protocol):
    """Maps final hidden states to logits, as `forge_kit.modules.LinearHead` does."""

    @property
    def vocab_shard(self) -> VocabShard | None:
        """None where every rank holds the whole vocabulary."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns (…, V) for (…, D), or this rank's slice of V when `vocab_shard` is set; in the dtype of `hidden`."""
        ...

    def whole(self, dtype: torch.dtype | None = None) -> AbstractContextManager[Sequence[Tensor]]:
        """A context with the head's weights whole on the data dimensions: gathered and cast to `dtype` once however
        often `logits` is called, their gradient reduced once. It yields the tensors that `logits` then uses, each
        connected to its parameter, so that a loss can differentiate with respect to them."""
        ...


class Fill(Protocol):
    """Fills one parameter with initial values that do not depend on how it is sharded."""

    def normal(self, std: float, mean: float = 0.0) -> None: ...
    def trunc_normal(self, std: float, bound: float = 3.0) -> None:
        """Normal with standard deviation `std`, cut at `bound` standard deviations."""

    def uniform(self, low: float, high: float) -> None: ...
    def constant(self, value: float) -> None: ...


@runtime_checkable
class Initialises(Protocol):
    """A module that initialises its own (direct) parameters and buffers. Memory starts as NaN."""

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fill the parameter `name` of this module: call one method of `fill` once."""

    def init_buffers(self, device: torch.device) -> None:
        """Recompute the non-persistent buffers of this module on `device`."""


class Model(Protocol):
    """A network the engine can train. Subclasses `torch.nn.Module`.

    `forward(batch)` returns the final hidden states (B, S, D) and equals `embed`, all `layers`, then `finish`; stages
    that split the model call these parts. It implements those protocols below that its stages and metrics need.
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
        """Apply the final norm after the last layer. Returns (B, S, D)."""
        ...

    def __call__(self, batch: Batch) -> Tensor: ...
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...


@runtime_checkable
class Prepares(Protocol):
    """A model whose layers share tensors computed once from a batch. `forward` calls `prepare` itself; an executor that
    runs the parts one by one calls it first, on each micro-batch and every rank. Without it each layer computes its
    own: slower, with the same result."""

    def prepare(self, batch: Batch) -> Batch:
        """Returns the batch with further entries, of any shape, for the layers; existing ones stay."""
        ...


@runtime_checkable
class PreparesSequences(Protocol):
    """A model that needs values of other positions, such as the token after the next. A stage that divides sequences
    leaves no rank all positions, so this is called before a batch is divided; otherwise `prepare` calls it."""

    def prepare_sequences(self, batch: Batch) -> Batch:
        """Returns the batch, of whole sequences, with further entries; existing ones stay. `HasSequenceEntries` names
        the entries with a value for each position, which are divided like the tokens."""
        ...


@runtime_checkable
class HasSequenceEntries(Protocol):
    def sequence_entries(self) -> Collection[str]:
        """Returns names of batch entries (B, S, …) with a value for each position, besides `input_ids`, `labels`,
        `positions` and `document_ids`. A stage that divides sequences divides these; all others stay whole."""
        ...


@runtime_checkable
class HasFlops(Protocol):
    def flops(self, seq_len: int) -> float:
        """Returns model FLOPs per token, forward and backward, at this sequence length: 6 for each weight that
        multiplies a token (no embedding look-ups, no recomputation), plus the causal half of attention."""
        ...


@runtime_checkable
class HasRoles(Protocol):
    def parameter_roles(self) -> Mapping[str, Role]:
        """Returns the role of each parameter by name; roles of parameters left out are derived."""
        ...


@runtime_checkable
class HasTies(Protocol):
    def tied_parameters(self) -> Mapping[str, str]:
        """Returns {other name: name under which the shared parameter is listed, initialised and stored}."""
        ...


@runtime_checkable
class HasLayerFlops(HasFlops, Protocol):
    """A model whose layers' cost does not follow from their weights, as with experts, of which a token meets a few. Its
    `flops` minus theirs are spent after the last layer."""

    def layer_flops(self, seq_len: int) -> Sequence[float]:
        """Returns FLOPs per token of each layer, in order, forward and backward. Called before layers are removed."""
        ...


@runtime_checkable
class HasTensorParallelPlan(Protocol):
    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Returns {module name pattern (`layers.*.attention.q`): how it is split}, for every module with parameters.

        column: rows of the weight, so that outputs are split. row: columns of the weight; takes split inputs, and sums
        over ranks. partial_row: row without the sum, for a matrix without a bias or a stack of matrices. column_stack:
        column for a stack. partial_output: sums its output over the ranks. whole_input: a module around such a pair;
        its first argument arrives with all positions. vocab_embedding, vocab_head: rows, one per id. sequence: whole
        weights, on some positions (a norm between such pairs). replicate: whole weights, on split features (a norm of
        each head).
        """
        ...


@runtime_checkable
class HasSequenceMixers(Protocol):
    def sequence_mixers(self) -> Mapping[str, int]:
        """Returns {name: K, key/value heads over all ranks} of the only modules in which positions attend to others.

        Each maps queries (B, S, H, E), keys (B, S, K, E), values (B, S, K, V) with V at most E, and the batch to
        (B, S, H, V), causally and within documents where the batch has `document_ids`; a stage may replace it."""
        ...


class ExpertStack(Protocol):
    """A module whose parameters, its own and its children's, all stack experts on dimension 0. Ranks share experts by
    holding a contiguous range each: with only these parameters, and expert numbers relative to the range, the module
    computes their part of the sum."""

    def __call__(
        self,
        tokens: Tensor,
        weights: Tensor,
        chosen: Tensor,
        rows: int | None = None,
        overlap_fn: Callable[[], None] | None = None,
    ) -> Tensor:
        """Returns (T, D), in the dtype of `tokens`: the sum of weight x expert(token) over a token's choices.

        Args:
            tokens: (T, D).
            weights: (T, K), float32 or wider; differentiable.
            chosen: (T, K), int64, numbers of experts. -1: none, whatever the weight.
            rows: number of choices that are not -1; None: the host waits for the device to count them.
            overlap_fn: called once; expert parallelism runs it while the all-to-all is in flight.
        """
        ...


@runtime_checkable
class HasExpertStacks(Protocol):
    def expert_stacks(self) -> Sequence[str]:
        """Returns names of the modules that are an `ExpertStack`."""
        ...


@runtime_checkable
class ChangesWithUpdates(Protocol):
    """A module with buffers updated from statistics of a step, such as the bias that balances a router's experts."""

    def after_update(self) -> None:
        """Update the buffers. Called after each update, on every rank, with the counts of all ranks in
        `context.auxiliary.counted`; not after a skipped update. After a skip that only the device knows of,
        all counts are zero."""
        ...


@runtime_checkable
class HasEnds(Protocol):
    """A model that can be cut between any two layers. Then `layers` holds this rank's only, and modules of an end on
    another rank are replaced by ones without parameters. Tied modules stay on the same ranks."""

    def ends(self) -> tuple[Sequence[str], Sequence[str]]:
        """Returns names of the modules that `embed` uses, and names of those that `finish` and the head use."""
        ...


@runtime_checkable
class HasFurtherBlocks(Protocol):
    """A model with blocks besides its `layers`, which `finish` runs, such as those that predict further tokens. Stages
    that wrap each layer (recomputation, torch.compile) wrap them too."""

    def further_blocks(self) -> Sequence[str]:
        """Returns names of these modules; in a pipeline, of this rank's only."""
        ...


@runtime_checkable
class HasFSDPUnits(Protocol):
    def fsdp_units(self) -> Sequence[Sequence[str]]:
        """Returns groups of module names, each gathered and freed together, in the order of the forward pass."""
        ...


@runtime_checkable
class HasFloat8Exemptions(Protocol):
    def float8_exempt(self) -> Sequence[str]:
        """Returns name patterns of modules that keep their precision (head, routers)."""
        ...


@runtime_checkable
class HasBackendChoices(Protocol):
    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Returns kernels chosen by measurement for sequences of this length: (operation, choice, reason)."""
        ...


@runtime_checkable
class Generates(Protocol):
    """A model that can decode with a cache of past positions."""

    def new_cache(self, batch_size: int, length: int) -> Any:
        """Returns an empty cache for up to `length` positions of `batch_size` rows, on the model's device."""
        ...

    def decode(self, batch: Batch, cache: Any) -> Tensor:
        """Run `forward` on the next positions of each row, after those in `cache`, and extend `cache`.
        `batch["positions"]` (B, S) gives each token's position; a negative one marks left padding, to be ignored."""
        ...
