"""Generation by ranks that share a model: the interface between stages and the code that generates.

A stage that splits a model attaches a `JointGeneration` to it, which wraps the one attached by earlier stages. The code
that generates therefore does not depend on any stage, and third-party stages can take part.

Shapes: B rows, S new positions of each, V the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch import distributed as dist

from forge_kit.torch_internals import children_of

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model

ATTRIBUTE = "joint_generation"
PROMPT = "prompt_positions"
"""Batch entry (B, S) bool for models that need it (`AsksForPrompt`): positions before the generated tokens, or before
the scored answer. It and `labels` are the only entries that show where a prompt ends."""


@runtime_checkable
class Generates(Protocol):
    """A model that can decode with a cache of past positions."""

    def new_cache(self, batch_size: int, length: int) -> Any:
        """Returns an empty cache for up to `length` positions of `batch_size` rows, on the model's device."""

    def decode(self, batch: Batch, cache: Any) -> Tensor:
        """Run `forward` on the next positions of each row, after those in `cache`, and extend `cache`.

        `batch["positions"]` (B, S) has each token's position; a negative one marks left padding, to be ignored.
        """


@runtime_checkable
class AsksForPrompt(Protocol):
    """A model that attends differently to a prompt than to what follows: batches without labels mark where it ends."""

    asks_for_prompt: bool


def with_prompt(model: Any, batch: Batch, answers: Sequence[int]) -> Batch:
    """Returns the batch with the entry `PROMPT`, if the model needs it.

    Args:
        model: the model that gets the batch.
        batch: `input_ids` (B, S); a negative entry of `positions` marks padding.
        answers: of each row, how many of its last positions follow the prompt.
    """
    if not isinstance(model, AsksForPrompt):
        return batch
    ids = batch["input_ids"]
    index = torch.arange(ids.shape[1], device=ids.device)
    # Rows are flush right, so answers are the last positions
    prompt = index < ids.shape[1] - torch.tensor(answers, device=ids.device)[:, None]
    return {**batch, PROMPT: prompt & (batch["positions"] >= 0) if "positions" in batch else prompt}


class VoidsCache(Protocol):
    """A module of a model whose caches are void once a row is longer than certain lengths.

    Encodings of positions are such that rotate all positions of a long sequence otherwise.
    """

    cache_limits: Sequence[int]


@runtime_checkable
class JoinsRows(Protocol):
    """A cache whose rows can be selected and joined with rows of other caches, so that a finished row makes room.

    Rows are flush right: the newest position of each is the last one of the cache, and padding stands on the left.
    """

    @property
    def joinable(self) -> bool:
        """Whether all its parts can, which may be caches of somebody else's modules."""
        ...

    def joined(self, parts: Sequence[tuple[Any, Tensor]], columns: int, length: int) -> Any:
        """Returns a new cache of rows of several, in their order.

        Args:
            parts: caches made by the model that made this one, this one among them; and the rows to take of each, int64
                on the device of the cache.
            columns: positions of the longest of these rows so far. What stands before is padding, and left out.
            length: positions for which the new cache has room.
        """
        ...


@runtime_checkable
class ForgetsPositions(Protocol):
    """A cache that can be as it was before its newest positions, which were those of tokens that were only proposed."""

    @property
    def forgets(self) -> str:
        """Names a part that cannot forget any, with the reason; empty: all parts can."""
        ...

    def forget(self, count: int) -> None:
        """Drop the newest `count` positions of each row."""


class Drafter(Protocol):
    """Proposes the next tokens of one row from the states of the model; keeps its own caches."""

    def __call__(self, hidden: Tensor, ids: Sequence[int]) -> list[int]:
        """Propose the tokens after `ids`.

        Args:
            hidden: (1, S, D), what `Generates.decode` has returned for the positions since the last call, up to the one
                before the last of `ids`.
            ids: all tokens of the row so far.
        """
        ...


@runtime_checkable
class DraftsTokens(Protocol):
    """A model with modules that predict tokens after the next, and can so propose what it checks afterwards."""

    draft_length: int
    """Tokens that a call of a drafter proposes; 0: the model has no such modules."""

    def new_drafter(self, length: int) -> Drafter:
        """Returns a drafter for one row of up to `length` positions."""
        ...


class JointGeneration:
    """How the ranks of one model generate together. Stages derive from it and override what they change.

    Every rank of a group calls its methods equally often, whether its own rows have ended or not: each call may hold a
    collective of the group. By default, calls are passed to `inner`, the `JointGeneration` of earlier stages.
    """

    shares_rows = False
    """Whether several ranks generate the same rows together, and so must draw the same tokens."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.inner = joint_generation(model)

    @property
    def same_rows(self) -> bool:
        """Whether this stage or one before it has ranks generate the same rows together."""
        return self.shares_rows or self.inner.same_rows

    def next_logits(self, batch: Batch, cache: Any) -> Tensor:
        """Run the model on the next positions of each row.

        Args:
            batch: `input_ids` and `positions` (B, S), and further entries; see `Generates.decode`.
            cache: from the model's `new_cache`, extended in place.

        Returns:
            Logits (B, V) after the last position; bit-equal on all ranks that generate the same rows.
        """
        return self.inner.next_logits(batch, cache)

    def all_done(self, done: bool) -> bool:
        """Returns whether the rows of every rank have ended that takes part in this rank's calls."""
        return self.inner.all_done(done)

    def cache_limits(self) -> set[int]:
        """Returns the lengths of a row beyond which caches are void, of all parts of the model: see `VoidsCache`."""
        return self.inner.cache_limits()

    def joins_rows(self, cache: Any) -> bool:
        """Returns whether the caches of all parts of the model can be joined; see `JoinsRows`. Equal on all ranks.

        Args:
            cache: one of the model's, after its first positions.
        """
        return self.inner.joins_rows(cache)


class WholeModel(JointGeneration):
    """Generation by a model that no stage has split, or of which each call of `decode` computes all that it returns."""

    def __init__(self, model: Model) -> None:
        # Without the base's `__init__`: it would make a further `WholeModel`, and so on without end
        self.model = model

    @property
    def same_rows(self) -> bool:
        """False: ranks that hold a copy of the model generate different rows."""
        return False

    def next_logits(self, batch: Batch, cache: Any) -> Tensor:
        """Applies the head to the last position alone. Collective if ranks share the vocabulary."""
        model: Any = self.model
        # Of the last position alone: logits of a whole prompt take S times the memory
        return whole_logits(model.head, model.decode(batch, cache)[:, -1:])[:, 0]

    def all_done(self, done: bool) -> bool:
        """No other rank takes part in this rank's calls."""
        return done

    def cache_limits(self) -> set[int]:
        """Collected from all modules that are `VoidsCache`."""
        # Not by `isinstance`, which looks up the members of a protocol for each module, at each call of `generate`; nor
        # by `modules` and `getattr`, which make names and search parameters, and take as long as two layers
        return {limit for module in _all_modules(self.model) for limit in _own(module, "cache_limits")}

    def joins_rows(self, cache: Any) -> bool:
        """There is one cache, of the whole model."""
        return isinstance(cache, JoinsRows) and cache.joinable


def _all_modules(module: nn.Module) -> set[nn.Module]:
    """Returns a module and all below it."""
    found: set[nn.Module] = set()
    waiting = [module]
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += [child for child in children_of(one).values() if child is not None]
    return found


def _own(module: nn.Module, name: str) -> Collection[int]:
    """Returns an attribute of a module that is no parameter, buffer or module; empty if there is none."""
    found: Collection[int] = getattr(module, name) if hasattr(type(module), name) or name in vars(module) else ()
    return found


def joint_generation(model: Any) -> JointGeneration:
    """Returns what the stages of a model have put on it; `WholeModel` if none has."""
    joint = vars(model).get(ATTRIBUTE)
    return WholeModel(model) if joint is None else joint


def generates_jointly(model: Any) -> bool:
    """Returns whether a stage defines how the ranks of this model generate together."""
    return ATTRIBUTE in vars(model)


def join(model: Any, joint: JointGeneration) -> None:
    """Attach a stage's `JointGeneration`, which wraps the one of earlier stages, to a model."""
    setattr(model, ATTRIBUTE, joint)


def whole_logits(head: Any, hidden: Tensor) -> Tensor:
    """Returns logits (…, V) of hidden states (…, D), gathered from ranks that share the vocabulary. Collective there.

    Not differentiable.
    """
    logits, shard = head.logits(hidden), getattr(head, "vocab_shard", None)
    if shard is None:
        return logits  # type: ignore[no-any-return]
    slices = [torch.empty_like(logits) for _ in range(dist.get_world_size(shard.group))]
    # Collectives take contiguous tensors only
    dist.all_gather(slices, logits.contiguous(), group=shard.group)
    return torch.cat(slices, -1)
