"""Contracts of models. Shapes: B sequences of a micro-batch, S positions, D model width, V vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import isfunction
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from attrs import frozen
from torch import Tensor, nn

from forge_core.contracts.data import Batch, BatchField
from forge_core.contracts.errors import SURE, closest

Carry = tuple[Tensor, ...]
"""Activations passed from layer to layer, and from pipeline stage to pipeline stage."""

Role = str
"""Purpose of a parameter: one of `ROLES`, or a word of the model's own (`OptimizerComponent.further_roles`)."""
ROLES: tuple[Role, ...] = ("embedding", "head", "norm", "bias", "router", "matrix", "stack", "fused")
"""The usual roles. `matrix`: one 2-D matrix of a hidden layer; `stack`: matrices stacked on dimension 0 (one per
expert); `fused`: several matrices concatenated on dimension 0."""


class VocabShard(NamedTuple):
    """The slice of the vocabulary that this rank's logits cover."""

    group: torch.distributed.ProcessGroup
    offset: int
    size: int


# Heads and modules stay protocols, asked by `isinstance`: they are classes of other libraries, too.
@runtime_checkable
class Head(Protocol):
    """Maps final hidden states to logits, as `forge_kit.nn.modules.LinearHead` does."""

    @property
    def vocab_shard(self) -> VocabShard | None:
        """None where every rank holds the whole vocabulary."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns (…, V) for (…, D), or this rank's slice of V when `vocab_shard` is set; in the dtype of `hidden`."""

    def whole(self, dtype: torch.dtype | None = None) -> AbstractContextManager[Sequence[Tensor]]:
        """A context with the head's weights gathered and cast to `dtype` once however often `logits` is called.

        It yields the tensors that `logits` uses, connected to their parameters; their gradient is reduced once.
        """


class Fill(Protocol):
    """Fills one parameter with initial values that do not depend on how it is sharded."""

    def normal(self, std: float, mean: float = 0.0) -> None:
        """Normal with standard deviation `std` around `mean`."""
        ...

    def trunc_normal(self, std: float, bound: float = 3.0) -> None:
        """Normal with standard deviation `std`, cut at `bound` standard deviations."""

    def uniform(self, low: float, high: float) -> None:
        """Uniform in [low, high)."""
        ...

    def constant(self, value: float) -> None: ...


@runtime_checkable
class Initialises(Protocol):
    """A module that initialises its own (direct) parameters and buffers. Memory starts as NaN."""

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Fill the parameter `name` of this module: call one method of `fill` once."""

    def init_buffers(self, device: torch.device) -> None:
        """Recompute the non-persistent buffers of this module on `device`."""


@runtime_checkable
class ChangesWithUpdates(Protocol):
    """A module with buffers updated from statistics of a step, such as the bias that balances a router's experts."""

    def after_update(self) -> None:
        """Update the buffers, by the counts of all ranks in `context.auxiliary.counted`; called on every rank."""
        # Only the engine can detect the end of a step, under accumulation, recomputation and pipelines. It does not
        # call this after a skipped update; after a skip that only the device can detect, all counts are zero.


class Model(nn.Module):
    """A network that can be trained. `embed`, `finish`, `layers` and `head` are required, all else has a default."""

    layers: nn.ModuleDict
    """Ordered, keyed by the global layer number as a string; each maps (carry, batch) -> carry."""
    head: Any
    """A module that is a `Head`."""
    batch_fields: Mapping[str, BatchField] = MappingProxyType({})
    """Further entries of batches, as its component names them for the job; set by the engine."""
    begins_here: Collection[str] = ()
    """Names of parameters that no other run's checkpoint need have, such as adapters that a plugin adds."""
    unchanged: Collection[str] = ()
    """Names of parameters and buffers that never change in training: a checkpoint does not hold them once more if they
    are those of another one, its `base`."""
    base: Mapping[str, Any] | None = None
    """The checkpoint that has what is `unchanged`, set by what loads it: its `path`, the `digest` of its manifest, and
    `tensors`, by their names in this run's checkpoints their names there."""

    def embed(self, batch: Batch) -> Carry:
        """Returns the carry before the first layer, in the dtype `context.dtype`; `batch` is from `prepare`."""
        raise NotImplementedError

    def finish(self, carry: Carry, batch: Batch) -> Tensor:
        """Apply the final norm after the last layer. Returns (B, S, D)."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor:
        """Returns the final hidden states (B, S, D): nothing but the parts, which a pipeline calls one by one."""
        batch = self.prepare(batch)
        carry = self.embed(batch)
        for layer in self.layers.values():
            carry = layer(carry, batch)
        return self.finish(carry, batch)

    def prepare(self, batch: Batch) -> Batch:
        """Returns the batch with further entries, of any shape, that all layers share, such as a mask of documents."""
        # Not in `embed`, which one rank of a pipeline runs: this is called on each micro-batch and every rank.
        return batch

    def prepare_sequences(self, batch: Batch) -> Batch:
        """Returns the batch with entries made of other positions, such as the token after the next; for `prepare`."""
        # Called before a stage divides the sequences, too: afterwards no rank has all positions.
        return batch

    def sequence_entries(self) -> Collection[str] | None:
        """Returns names of the further batch entries (B, S, …) that a stage divides like the tokens; None: unknown."""
        return None

    def flops(self, seq_len: int) -> float | None:
        """Returns model FLOPs per token, forward and backward, at this sequence length; None: unknown.

        6 for each weight that multiplies a token (no look-ups, no recomputation), plus the causal half of attention. A
        model with a better value during training logs the metric `flops_per_token`, from which MFU is then computed.
        """
        return None

    def layer_flops(self, seq_len: int) -> Sequence[float] | None:
        """Returns the FLOPs of each layer of the whole model, in the unit of `flops`; None: as their weights are."""
        return None

    def embed_flops(self, seq_len: int) -> float:
        """Returns the FLOPs of `embed`, in the unit of `flops`: of an encoder, say. A look-up of ids has none."""
        return 0.0

    def parameter_roles(self) -> Mapping[str, Role]:
        """Returns the role of each parameter by name; roles of parameters left out are derived."""
        return {}

    def tied_parameters(self) -> Mapping[str, str]:
        """Returns {other name: name under which the shared parameter is listed, initialised and stored}."""
        return {}

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """Returns {module name glob (`layers.*.attention.q`): how it is split}, for every module with parameters."""
        # The name of a way that the job's tensor-parallel stage has, or an object that it accepts as one.
        return {}

    def sequence_mixers(self) -> Mapping[str, int]:
        """Returns {name: K, key/value heads over all ranks} of the only modules in which positions attend to others.

        Each maps queries (B, S, H, E), keys (B, S, K, E), values (B, S, K, V at most E), and the batch to (B, S, H, V),
        causally and within documents where the batch has `document_ids`; a stage may replace it, by its `mixing()`.
        """
        return {}

    def expert_stacks(self) -> Sequence[str]:
        """Returns names of the modules that are a `forge_kit.nn.dispatch.ExpertStack`."""
        return ()

    def ends(self) -> tuple[Sequence[str], Sequence[str]] | None:
        """Returns names of the modules that `embed` uses, and of those that `finish` and the head use.

        With it, the model can be cut between any two layers: `layers` then holds this rank's only, and modules of an
        end on another rank are replaced by ones without parameters. Tied modules stay on the same ranks.
        """
        return None

    def further_blocks(self) -> Sequence[str]:
        """Returns names of blocks other than `layers`, run by `embed` or `finish`; in a pipeline, only this rank's."""
        # Named by the model, so that stages which recompute or compile each layer do so with them.
        return ()

    def fsdp_units(self) -> Sequence[Sequence[str]]:
        """Returns groups of module names, each gathered and freed together, in the order of the forward pass."""
        return [[f"layers.{name}"] for name in self.layers]

    def float8_exempt(self) -> Sequence[str]:
        """Returns name globs of modules that keep their precision (head, routers)."""
        return ()

    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Returns kernels chosen by measurement for sequences of this length: (operation, choice, reason)."""
        return ()


@frozen(kw_only=True)
class Outline:
    """Facts of a whole model, taken before stages change it: a pipeline rank keeps only some of its layers."""

    roles: Mapping[str, Role]
    """Role of each parameter, by name."""
    sizes: Mapping[str, int]
    """Elements of each parameter, by name; tied ones once."""
    tensors: Mapping[str, torch.Size]
    """Shapes of parameters and persistent buffers, by name; tied ones once."""
    ties: Mapping[str, str]
    """Other names of tied parameters, with the name under which each is listed."""
    flops: float | None
    """Model FLOPs a token at the job's sequence length, if the model states them."""
    backend_choices: Sequence[tuple[str, str, str]]
    """Kernels that the model chose: (what, choice, why)."""

    def names(self, listed: Iterable[str]) -> dict[str, Sequence[str]]:
        """Each of the listed names with all names of its tensor, any of which a user's pattern may fit."""
        return {name: (name, *(other for other, first in self.ties.items() if first == name)) for name in listed}


DECLARED = [name for name, member in vars(Model).items() if isfunction(member) and not name.startswith("_")]


def with_defaults(module: Any) -> Model:
    """Returns the module with the defaults of `Model` for methods that it lacks, if it does not derive from it."""
    names, cls = () if isinstance(module, Model) else DECLARED, type(module)
    # Into a new class, after everything that the module's class or its `__getattr__` provides: a wrapper may forward
    # the methods of the model inside it.
    lacking = {name: getattr(Model, name) for name in names if getattr(module, name, None) is None}
    if lacking:  # not once more for a module that has them by now
        module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **lacking})
    return module


def misspelt(model: Model) -> Iterator[tuple[str, str]]:
    """Yields methods whose names resemble one of `Model` that is not overridden, each with that name."""
    own = {name for cls in type(model).__mro__ if not issubclass(Model, cls) for name in vars(cls)}
    left = [name for name in DECLARED if name not in own]
    for name in sorted(own - {*DECLARED}):
        if isfunction(getattr(type(model), name)) and (meant := closest(name, left, SURE)):
            yield name, meant
