"""What models promise: the network itself, its head, and the facts that parallel stages and the engine ask of it.

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
"""What travels from layer to layer, and from pipeline stage to pipeline stage."""

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
    """Maps final hidden states to logits. `forge_kit.modules.LinearHead` is the usual one."""

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
        """Returns the batch, of whole sequences, with further entries; those that are there already stay. Entries with
        a value for each position are named by `HasSequenceEntries`, to be divided like the tokens."""
        ...


@runtime_checkable
class HasSequenceEntries(Protocol):
    def sequence_entries(self) -> Collection[str]:
        """Names of batch entries (B, S, …) with a value for each position, besides `input_ids`, `labels`, `positions`
        and `document_ids`. Where a stage divides sequences, these are divided and all others stay whole."""
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
        overlap_fn: Callable[[], None] | None = None,
    ) -> Tensor:
        """(T, D) to (T, D), in the dtype of `tokens`: the sum of weight x expert(token) over a token's choices.

        Args:
            tokens: (T, D).
            weights: (T, K), float32 or wider; differentiable.
            chosen: (T, K), int64, numbers of experts. -1: none, whatever the weight.
            rows: how many choices are not -1, where that is known: else the host waits for the number.
            overlap_fn: called once; expert parallelism runs it while the all-to-all is in flight.
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
