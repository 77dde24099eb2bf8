"""What the component `cp` builds.

Shapes: B sequences, S positions, s positions of this rank, H query heads, K key/value heads, E width of a head, V
that of its values: E or less.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import HasSequenceEntries, HasSequenceMixers, PreparesSequences
from forge_core.contracts.runtime import ParallelStage
from forge_plugin_parallel.collectives import all_gather, all_to_all
from forge_plugin_parallel.ring import Piece, attend, ring_attention

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model
    from forge_plugin_parallel.cp import ContextParallel

TOKENS = ("input_ids", "labels", "positions", "document_ids")
"""Entries of a batch that every model has positions in."""
WHOLE = "whole:"
"""Starts the name of an entry of the batch that has all positions."""
PLACES, DOCUMENTS = "places by rank", "documents by rank"
"""Entries of a batch for `ring` and `all_gather`: (ranks, s) where each rank's positions stand, and (B, ranks, s) the
number of each one's document."""


class ContextParallelStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`.

    For `ring` and `all_gather`, a sequence is cut into twice as many pieces as there are ranks, and each rank has one
    from the front and its counterpart from the back, so that all have equally much to attend to.
    """

    def __init__(self, component: ContextParallel, context: BuildContext) -> None:
        assert context.mesh is not None
        self._group = context.mesh.get_group("cp")
        self._ranks, self._rank = context.layout.cp, context.mesh.get_local_rank("cp")
        self._method = component.method
        self._divided: Set[str] | None = None
        """Entries of a batch that have a value for each position; None: the model does not say."""
        self._by_shape = False

    def apply(self, model: Model) -> Model:
        """Put attention over all ranks' positions in the place of the model's own."""
        if self._ranks == 1:
            return model
        assert isinstance(model, HasSequenceMixers)
        assert isinstance(model, nn.Module)
        if isinstance(model, HasSequenceEntries):
            self._divided = {*TOKENS, *model.sequence_entries()}
        else:
            self._by_shape = isinstance(model, PreparesSequences)
        for name in model.sequence_mixers():
            parent, _, key = name.rpartition(".")
            mixer = model.get_submodule(name)
            replacement = Exchange(mixer, self._group) if self._method == "ulysses" else self._over_ranks()
            setattr(model.get_submodule(parent), key, replacement)
        return model

    def split(self, batch: Batch) -> Batch:
        """Returns this rank's positions of each entry that has positions, their places, and the documents whole too.

        Raises:
            ForgeError: an entry may have a value for each position, and the model does not say.
        """
        if self._ranks == 1:
            return batch
        rows, length = batch["input_ids"].shape
        own = places(self._ranks, length, self._method != "ulysses", batch["input_ids"].device)[self._rank]
        part: dict[str, Tensor] = {}
        for name, value in batch.items():
            part[name] = value.index_select(1, own) if self._is_divided(name, value, length) else value
        part.setdefault("positions", own.expand(rows, -1))
        if "document_ids" in batch:
            part[WHOLE + "document_ids"] = batch["document_ids"]
        return part

    def _is_divided(self, name: str, value: Tensor, length: int) -> bool:
        if self._divided is not None or name in TOKENS:
            return name in TOKENS or name in (self._divided or ())
        if value.ndim < 2 or value.shape[1] != length:
            return False
        if not self._by_shape:
            seen = f"batch entry {name!r} is {tuple(value.shape)}: {length} positions, or as many by chance"
            raise ForgeError(f"parallel.cp: {seen}; the model's sequence_entries() must say which")
        return True  # before there was `sequence_entries`, models with `prepare_sequences` were promised this

    def _over_ranks(self) -> nn.Module:
        return Ring(self._group) if self._method == "ring" else Gathered(self._group)


def places(ranks: int, length: int, balanced: bool, device: torch.device) -> Tensor:
    """(ranks, s) the positions of each rank, ascending."""
    positions = torch.arange(length, device=device)
    if not balanced:
        return positions.view(ranks, -1)
    pieces = positions.view(2 * ranks, -1)
    return torch.cat([pieces[:ranks], pieces[ranks:].flip(0)], 1)


class _Mixer(nn.Module):
    """In the place of a module that lets positions see each other: q (B, s, H, E), k (B, s, K, E), v (B, s, K, V)
    -> (B, s, H, V)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def prepare(self, batch: Batch) -> Batch:
        """Where the positions of each rank stand, and in which documents, for all layers."""
        if PLACES in batch:
            return batch
        positions, documents = batch["positions"], batch.get(WHOLE + "document_ids")
        every = places(self.ranks, positions.shape[1] * self.ranks, True, positions.device)
        return {**batch, PLACES: every, **({} if documents is None else {DOCUMENTS: _numbered(documents)[:, every]})}

    def _pieces(self, batch: Batch) -> list[Piece]:
        """Of each rank, where its positions stand and of which documents they are."""
        batch = self.prepare(batch)
        documents = batch[DOCUMENTS].unbind(1) if DOCUMENTS in batch else [None] * len(batch[PLACES])
        return [Piece(*piece) for piece in zip(batch[PLACES], documents, strict=True)]


def _numbered(document_ids: Tensor) -> Tensor:
    """The number of each position's document in its row (B, S): an id that comes back is another document."""
    starts = document_ids[:, 1:] != document_ids[:, :-1]
    return nn.functional.pad(starts.cumsum(1), (1, 0))


class Ring(_Mixer):
    """Keys and values go round."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return ring_attention(q, k, v, self._pieces(batch), self.group)


class Gathered(_Mixer):
    """Keys and values are gathered whole."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        pieces = self._pieces(batch)
        k, v = (all_gather(tensor, 1, self.group) for tensor in (k, v))
        return attend(q, k, v, pieces[self.rank], Piece.joined(pieces))


class Exchange(nn.Module):
    """Exchanges positions for heads around the model's own mixer."""

    def __init__(self, mixer: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.mixer, self.group = mixer, group

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        q, k, v = (all_to_all(tensor, 2, 1, self.group) for tensor in (q, k, v))
        return all_to_all(self.mixer(q, k, v, _whole(batch)), 1, 2, self.group)


def _whole(batch: Batch) -> Mapping[str, Tensor]:
    """What a mixer is told of all positions."""
    return {name.removeprefix(WHOLE): value for name, value in batch.items() if name.startswith(WHOLE)}
