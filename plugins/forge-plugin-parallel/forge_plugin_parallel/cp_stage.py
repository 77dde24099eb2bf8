"""The stage of the component `cp`: divides sequences and replaces attention by attention over all ranks' positions.

Shapes: B sequences, S positions, s positions of this rank, H query heads, K key/value heads, E width of a head, V
width of its values (at most E).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Model
from forge_core.contracts.runtime import ParallelStage
from forge_kit.nn.generation import Generates, join
from forge_plugin_parallel.collectives import all_gather, all_to_all
from forge_plugin_parallel.cp import mixes_heads, mixing_of
from forge_plugin_parallel.generation import OwnMixers, SameRows
from forge_plugin_parallel.ring import PLAIN, Mixing, RankPositions, attend, ring_attention

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model
    from forge_plugin_parallel.cp import ContextParallel

TOKENS = ("input_ids", "labels", "positions", "document_ids")
"""Entries of a batch with a value for each position, in every model."""
WHOLE = "whole:"
"""Prefix of the name of a batch entry that has all positions."""
PLACES, DOCUMENTS, STARTS = "places by rank", "documents by rank", "starts by rank"
"""Entries of a batch for `ring` and `all_gather`: (ranks, s) indices of each rank's positions in the sequence, and
(B, ranks, s) the number of each one's document, and the index of its first position."""


class ContextParallelStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`.

    For `ring` and `all_gather`, a sequence is cut into twice as many chunks as there are ranks, and each rank holds one
    from the front and its mirror image from the back: under a causal mask later positions cost more, and so all ranks
    compute equally much (Llama 3, section 3.3.2).
    """

    def __init__(self, component: ContextParallel, context: BuildContext) -> None:
        assert context.mesh is not None
        self._group = context.mesh.get_group("cp")
        self._ranks, self._rank = context.layout.cp, context.mesh.get_local_rank("cp")
        self._method = component.method
        self._divided: Set[str] | None = None
        """Entries of a batch that have a value for each position; None: the model does not name them."""
        self._by_shape = False

    def apply(self, model: Model) -> Model:
        """Replace the model's attention by attention over the positions of all ranks."""
        if self._ranks == 1:
            return model
        entries = model.sequence_entries()
        if entries is not None:
            self._divided = {*TOKENS, *entries}
        else:
            self._by_shape = type(model).prepare_sequences is not Model.prepare_sequences
        # Kept by their places, as generation puts them back for each call (`OwnMixers`)
        own: dict[tuple[nn.Module, str], nn.Module] = {}
        for name in model.sequence_mixers():
            parent, _, key = name.rpartition(".")
            mixer = own[model.get_submodule(parent), key] = model.get_submodule(name)
            setattr(model.get_submodule(parent), key, self._over_ranks(mixer))
        if isinstance(model, Generates):
            model.decode = OwnMixers(model.decode, own)  # type: ignore[method-assign]
            join(model, SameRows(model))
        return model

    def split(self, batch: Batch) -> Batch:
        """Divide the entries of a batch that have positions.

        Returns:
            The batch with this rank's positions of each such entry, their `positions` and `places` (B, s) in the
            sequence, and document ids also whole.

        Raises:
            ForgeError: an entry may have a value for each position, and the model does not say whether it has.
        """
        if self._ranks == 1:
            return batch
        rows, length = batch["input_ids"].shape
        own = rank_positions(self._ranks, length, self._method != "ulysses", batch["input_ids"].device)[self._rank]
        part: dict[str, Tensor] = {}
        for name, value in batch.items():
            part[name] = value.index_select(1, own) if self._is_divided(name, value, length) else value
        # Which positions these are, which a rank can no longer derive from its own slice: for rotary embeddings, unless
        # documents count their own, and to compare positions of several ranks.
        part["places"] = own.expand(rows, -1)
        part.setdefault("positions", part["places"])
        if "document_ids" in batch:
            part[WHOLE + "document_ids"] = batch["document_ids"]
        return part

    def _is_divided(self, name: str, value: Tensor, length: int) -> bool:
        if self._divided is not None or name in TOKENS:
            return name in TOKENS or name in (self._divided or ())
        if value.ndim < 2 or value.shape[1] != length:
            return False
        if not self._by_shape:
            message = f"batch entry {name!r} is {tuple(value.shape)}: {length} positions, or as many by chance"
            raise ForgeError(f"parallel.cp: {message}; the model's sequence_entries() must say which")
        return True  # before there was `sequence_entries`, models with `prepare_sequences` were promised this

    def _over_ranks(self, mixer: nn.Module) -> nn.Module:
        if mixes_heads(mixer):
            return HeadExchange(mixer, self._group, balanced=self._method != "ulysses")
        if self._method == "ulysses":
            return Exchange(mixer, self._group)
        mixing = Mixing(**mixing_of(mixer))
        return Ring(self._group, mixing) if self._method == "ring" else Gathered(self._group, mixing)


def rank_positions(ranks: int, length: int, balanced: bool, device: torch.device) -> Tensor:
    """Returns (ranks, s): the positions of each rank, ascending.

    Args:
        ranks: ranks that share a sequence.
        length: positions of the sequence, divisible by `ranks` (`balanced`: by twice as many).
        balanced: whether each rank gets a chunk from the front and one from the back, else one contiguous chunk.
        device: where the indices are needed.
    """
    positions = torch.arange(length, device=device)
    if not balanced:
        return positions.view(ranks, -1)
    chunks = positions.view(2 * ranks, -1)
    # Rank r has the chunks r and 2 ranks - 1 - r
    return torch.cat([chunks[:ranks], chunks[ranks:].flip(0)], 1)


class _Mixer(nn.Module):
    """Replaces a sequence mixer: q (B, s, H, E), k (B, s, K, E), v (B, s, K, V) -> (B, s, H, V)."""

    def __init__(self, group: dist.ProcessGroup, mixing: Mixing = PLAIN) -> None:
        super().__init__()
        self.group, self.mixing = group, mixing
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def prepare(self, batch: Batch) -> Batch:
        """Returns the batch with the positions and documents of each rank, computed once for all layers."""
        if PLACES in batch:
            return batch
        positions, documents = batch["positions"], batch.get(WHOLE + "document_ids")
        every = rank_positions(self.ranks, positions.shape[1] * self.ranks, True, positions.device)
        if documents is None:
            return {**batch, PLACES: every}
        numbers = _numbered(documents)
        # Numbers ascend, so that the first position with one is its document's
        starts = torch.searchsorted(numbers, numbers)
        return {**batch, PLACES: every, DOCUMENTS: numbers[:, every], STARTS: starts[:, every]}

    def _positions(self, batch: Batch) -> list[RankPositions]:
        """Positions and documents of each rank."""
        batch = self.prepare(batch)
        none = [None] * len(batch[PLACES])
        documents, starts = (batch[name].unbind(1) if name in batch else none for name in (DOCUMENTS, STARTS))
        return [RankPositions(*entries) for entries in zip(batch[PLACES], documents, starts, strict=True)]


def _numbered(document_ids: Tensor) -> Tensor:
    """Number of each position's document in its row (B, S): an id that occurs again later is another document."""
    starts = document_ids[:, 1:] != document_ids[:, :-1]
    return nn.functional.pad(starts.cumsum(1), (1, 0))


class Ring(_Mixer):
    """Attention with keys and values sent around the ring of ranks; see `ring_attention`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, sinks: Tensor | None = None) -> Tensor:
        """Collective: every rank takes all turns, also those in which causality hides the whole block."""
        return ring_attention(q, k, v, self._positions(batch), self.group, self.mixing, sinks)


class Gathered(_Mixer):
    """Attention with the keys and values of all ranks gathered on each."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, sinks: Tensor | None = None) -> Tensor:
        """Collective; its backward pass sums the gradients of keys and values over ranks, and scatters them."""
        positions = self._positions(batch)
        k, v = (all_gather(tensor, 1, self.group) for tensor in (k, v))
        return attend(q, k, v, positions[self.rank], RankPositions.concatenate(positions), self.mixing, sinks)


class Exchange(nn.Module):
    """Exchanges positions for heads around the model's own mixer (DeepSpeed-Ulysses, Jacobs et al. 2023)."""

    def __init__(self, mixer: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.mixer, self.group = mixer, group

    def prepare(self, batch: Batch) -> Batch:
        """Leaves the batch as it is: the mixer receives another one, of entries that have all positions."""
        return batch

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, sinks: Tensor | None = None) -> Tensor:
        """Collective: the mixer computes whole sequences with H / ranks query heads."""
        q, k, v = (all_to_all(tensor, 2, 1, self.group) for tensor in (q, k, v))
        # The sinks of this rank's heads; other ranks compute the gradients for the other heads.
        own = [] if sinks is None else [sinks.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]]
        return all_to_all(self.mixer(q, k, v, _whole(batch), *own), 1, 2, self.group)


class HeadExchange(nn.Module):
    """Exchanges positions for heads around a mixer other than attention; see `forge_kit.nn.head_mixers.MixesHeads`."""

    def __init__(self, mixer: nn.Module, group: dist.ProcessGroup, *, balanced: bool) -> None:
        """Set up the exchange.

        Args:
            mixer: the model's own.
            group: the ranks that share sequences.
            balanced: whether each of them has two chunks of a sequence, as `rank_positions` gives them.
        """
        super().__init__()
        self.mixer, self.group, self.balanced = mixer, group, balanced
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def prepare(self, batch: Batch) -> Batch:
        """Leaves the batch as it is: the mixer receives another one, of entries that have all positions."""
        return batch

    def forward(self, tensors: Sequence[Tensor], per_head: Sequence[Tensor], batch: Batch) -> Tensor:
        """Collective: the mixer computes whole sequences of its share of the heads."""
        whole = [all_to_all(tensor, 2, 1, self.group) for tensor in tensors]
        places = rank_positions(self.ranks, whole[0].shape[1], self.balanced, whole[0].device).flatten()
        if self.balanced:  # from the order of ranks into that of the sequence, and back
            whole = [tensor.index_select(1, places.argsort()) for tensor in whole]
        # The parameters of this rank's heads; other ranks compute the gradients for the other heads.
        own = [parameter.chunk(self.ranks)[self.rank] for parameter in per_head]
        mixed = self.mixer(whole, own, _whole(batch))
        return all_to_all(mixed.index_select(1, places) if self.balanced else mixed, 1, 2, self.group)


def _whole(batch: Batch) -> Mapping[str, Tensor]:
    """The entries of a batch that have all positions, by their usual names."""
    return {name.removeprefix(WHOLE): value for name, value in batch.items() if name.startswith(WHOLE)}
