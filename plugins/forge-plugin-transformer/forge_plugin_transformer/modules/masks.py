"""Attention within the masks of components of the kind `attention_mask`.

Shapes: B sequences, S positions, H query heads, K key/value heads, E width of a head, V width of its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contracts.errors import JobError, Problem
from forge_kit.nn.direct_calls import directly_callable
from forge_plugin_transformer.attention_backends import Choice
from forge_plugin_transformer.document_backends import DocumentChoice
from forge_plugin_transformer.kinds import AttentionMaskComponent, BlockMaskComponent
from forge_plugin_transformer.modules.attention_core import AttentionCore
from forge_plugin_transformer.modules.documents import document_starts, mask_of, places_in_documents
from forge_plugin_transformer.modules.softmax_attention import WHOLE
from forge_plugin_transformer.scoring import Scoring

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch

CHECKED = 4096
"""Longest document of which a mask's statements are compared with what it hides."""


def pair_mask(mask: AttentionMaskComponent, document_ids: Tensor, window: int = 0) -> Tensor:
    """Returns where positions see each other: (B, S) -> (B, 1, S, S) bool.

    Args:
        mask: of a component.
        document_ids: equal where neighbours are of one document.
        window: positions that one sees at most; 0: all.
    """
    places = places_in_documents(document_ids)
    seen = mask.sees(places[:, :, None], places[:, None, :]).expand(*places.shape, -1)
    # Each position sees itself in any case: a softmax over nothing is no number
    seen = seen | torch.eye(places.shape[1], dtype=torch.bool, device=seen.device)
    numbers = document_starts(document_ids).cumsum(1)
    if mask.causal:
        return (seen & mask_of(numbers, window))[:, None]
    return (seen & (numbers[:, :, None] == numbers[:, None, :]))[:, None]


def block_ids(mask: BlockMaskComponent, document_ids: Tensor) -> Tensor:
    """Returns a number for each block, in place of each document: (B, S) -> (B, S)."""
    blocks = mask.block(places_in_documents(document_ids))
    return (document_starts(document_ids) | document_starts(blocks)).cumsum(1)


@directly_callable
class MaskedCore(AttentionCore):
    """Attention within the mask of `scoring`: see `AttentionCore`.

    Kernels get blocks as documents, other masks as a matrix of all pairs, made once for all layers with that mask.
    """

    def __init__(self, choice: Choice, documents: DocumentChoice, scoring: Scoring) -> None:
        super().__init__(choice, documents, scoring)
        assert scoring.mask is not None
        self.mask = scoring.mask
        self._prefix = f"within {self.mask!r} and {scoring.window}: "
        """Of the names of batch entries; layers with another mask have others."""

    def prepare(self, batch: Batch) -> Batch:
        """Returns the batch with the entries of the mask, unless they are there already."""
        if "input_ids" not in batch or next(self._names(batch), None) is not None:
            return batch
        if self._is_plain(batch["input_ids"].shape[1]):
            return super().prepare(batch)
        made = self._made(batch.get("document_ids"), batch["input_ids"])
        return {**batch, **{self._prefix + name: entry for name, entry in made.items()}}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, sinks: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        """As `AttentionCore`; without the entries of `prepare`, every call makes its own."""
        if mask is not None or self._is_plain(q.shape[1]):
            return super().forward(q, k, v, batch, sinks, mask=mask)
        entries = {name.removeprefix(self._prefix): batch[name] for name in self._names(batch)}
        entries = entries or self._made(batch.get("document_ids"), q[:, :, 0, 0])
        if "pairs" not in entries:
            return super().forward(q, k, v, entries, sinks)
        return self._attend(q, k, v, entries["pairs"] if entries["pairs"].numel() > 1 else WHOLE, sinks)

    def _is_plain(self, length: int) -> bool:
        """Whether the mask hides nothing of causal attention."""
        return self.mask.causal and not self.mask.hides(length)

    def _names(self, batch: Batch) -> Iterator[str]:
        return (name for name in batch if name.startswith(self._prefix))

    def _made(self, document_ids: Tensor | None, positions: Tensor) -> Batch:
        """Returns the entries for rows like `positions` (B, S): `pairs`, or the blocks as `document_ids`."""
        if document_ids is None:
            if not self.mask.hides(positions.shape[1]):  # and is not causal: kernels need no matrix
                return {"pairs": WHOLE.to(positions.device)}
            document_ids = torch.zeros(positions.shape, dtype=torch.int64, device=positions.device)
        if isinstance(self.mask, BlockMaskComponent):
            return super().prepare({"document_ids": block_ids(self.mask, document_ids)})
        return {"pairs": pair_mask(self.mask, document_ids, self.scoring.window)}


def check_mask(mask: AttentionMaskComponent, path: str) -> None:
    """Compare what a component states of its mask with what it hides, in documents of some lengths.

    Args:
        mask: of any distribution or file.
        path: of its key in the job.

    Raises:
        JobError: `sees` returns something else than bool of both shapes, or `reach` or `hides` is wrong.
    """
    reach = mask.reach()
    # Around `reach`, from where on a mask hides, and short ones
    lengths = {1, 2, 33, reach, reach + 1, 2 * reach + 1}
    with torch.device("cpu"):
        for length in sorted(length for length in lengths if 0 < length <= CHECKED):
            if problem := _problem(mask, length, reach):
                raise JobError([Problem(path, f"{type(mask).__name__}.{problem}")])


def _problem(mask: AttentionMaskComponent, length: int, reach: int) -> str | None:
    """Returns how both differ in documents of this length, for the last queries and one in the middle."""
    keys = torch.arange(length)
    queries = torch.tensor(sorted({length // 2, length - 2, length - 1} & {*range(length)}))[:, None]
    seen = mask.sees(queries, keys[None, :])
    shape = (len(queries), length)
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool or seen.shape != shape:
        what = f"{seen.dtype} {tuple(seen.shape)}" if isinstance(seen, Tensor) else type(seen).__name__
        return f"sees returns {what} for positions {tuple(queries.shape)} and (1, {length}); it must be bool {shape}"
    distances = queries - keys
    if reach and bool((seen & (distances >= reach)).any()):
        return f"reach() is {reach}, and in a document of {length} positions sees() shows a key further back"
    hidden = ~seen & (distances != 0) & ((distances > 0) | (not mask.causal))
    if bool(hidden.any()) and not mask.hides(length):
        return f"hides({length}) is False, and sees() hides a position of such a document"
    return None
