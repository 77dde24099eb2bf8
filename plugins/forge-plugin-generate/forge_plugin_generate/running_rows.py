"""Rows that are generated together, while some end and others wait for their place.

Shapes: B rows that are computed together, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from forge_kit.nn.generation import JointGeneration, WholeModel, with_prompt

NO_POSITION = -1
"""Position of left padding."""
REFILL = 4
"""Rows that wait are admitted when one place in so many is free: each time, the cache is copied."""
SHRINK = 2
"""Without rows that wait, those that have ended are left out when one in so many is left."""
MASK_BYTES = 1 << 26
"""Bytes of the mask of a prompt, a byte for each of its positions and each position of the rows: above, it is read in
pieces,"""
LEAST_PIECE = 256
"""of so many positions at least."""


@frozen
class RowEnd:
    """When a row ends."""

    stops: Sequence[int]
    """Ids at which it ends, which do not belong to it; the first one pads."""
    max_tokens: int
    """New tokens at most."""
    until: Callable[[Sequence[int]], bool] | None = None
    """Is called with the new tokens of a row after each, and returns whether it ends with them."""

    def is_reached(self, written: Sequence[int]) -> bool:
        """Whether a row of these new tokens has ended."""
        return len(written) == self.max_tokens or (self.until is not None and self.until(written))


class RunningRows:
    """The state of a generation. `step` runs the model once, for the next token of the rows in turn.

    Rows that have ended are not computed for long: those that wait take their place, in order, or the batch becomes
    smaller. Where a model's cache cannot be joined (`forge_kit.nn.generation.JoinsRows`), they wait until all have
    ended.
    """

    def __init__(
        self,
        joint: JointGeneration,
        prompts: Sequence[Sequence[int]],
        end: RowEnd,
        draw: Callable[[Tensor, Sequence[int]], Tensor],
        *,
        batch_size: int,
        use_cache: bool,
        entries: Mapping[str, Tensor],
    ) -> None:
        """Set up the rows; no token is generated yet. Collective where ranks share the model.

        Args:
            joint: runs the model, on every rank.
            prompts: ids of each row.
            end: when a row ends.
            draw: (logits (B, V), numbers of the rows) -> tokens (B,).
            batch_size: B at most.
            use_cache: whether positions are computed once.
            entries: further entries of the batch of all prompts, which then have to run together.
        """
        self.written: list[list[int]] = [[] for _ in prompts]
        """New tokens of each row so far, without the stop."""
        self._joint, self._model = joint, joint.model
        # One position of a small model takes hardly longer than torch's records of views and versions, which inference
        # mode leaves out. Prompts are read without it: tables that modules keep from then on must serve training, too.
        # Stages that share a model out have hooks that set versions.
        self._inference = torch.inference_mode if isinstance(joint, WholeModel) else nullcontext
        self._device = next(self._model.parameters()).device
        self._prompts, self._end, self._draw = prompts, end, draw
        self._pad = end.stops[0]
        self._batch_size, self._use_cache, self._entries = batch_size, use_cache, dict(entries)
        self._limits = joint.cache_limits()
        self._joins: bool | None = None
        """Whether caches can be joined; known from the first one."""
        self._waiting = deque(range(len(prompts) if end.max_tokens else 0))
        self._running: list[int] = []
        """The rows of the cache, by number, with those that have ended since it was made."""
        self._active: set[int] = set()
        """The running rows that have not ended."""
        self._cache: Any = None
        self._next: tuple[Tensor, Tensor] | None = None
        """Last tokens and their positions, (B, 1) each."""

    @property
    def finished(self) -> bool:
        """Whether all rows have ended."""
        return not self._active and not self._waiting

    def run(self) -> list[list[int]]:
        """Generate until the rows of all ranks have ended; returns the new tokens of each row of this rank."""
        while not self._joint.all_done(self.finished):
            self.step()
        return self.written

    def step(self) -> None:
        """Run the model once: on rows that are admitted, else on the next position of those that run.

        After all rows have ended too, as other ranks may need this one's part of the model.
        """
        if self.finished:
            self._idle()
        elif self._waiting and self._has_room():
            self._admit()
        else:
            self._leave_out()
            if self._next is None or not self._use_cache or self._is_void():
                self._compute_anew()
            else:
                self._extend(*self._next)

    # --- what a step may be ----------------------------------------------------------------------------------------

    def _idle(self) -> None:
        # One token is enough to take part in collectives; its logits are not used
        row = [[self._pad]]
        self._joint.next_logits(self._batch(row), self._model.new_cache(1, 1))  # type: ignore[operator]

    def _has_room(self) -> bool:
        # Without active rows, new ones start with a separate cache, and nothing must be joined
        if not self._active:
            return True
        free = self._batch_size - len(self._active)
        return bool(self._joins) and free >= min(len(self._waiting), -(-self._batch_size // REFILL))

    def _admit(self) -> None:
        """Begin rows that wait, beside those that run."""
        free = self._batch_size - len(self._active)
        new = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        others = [number for number in self._running if number in self._active]
        before = (self._cache, self._index(others), self._next)
        token, cache = self._begin(new)
        self._active.update(new)
        if others:
            old, index, following = before
            assert following is not None
            self._cache = self._joined([(old, index), (cache, self._index(new, new))], [*others, *new])
            lengths = self._column([len(self._prompts[number]) for number in new])
            self._next = (
                torch.cat([following[0][index], token[:, None]]),
                torch.cat([following[1][index], lengths]),
            )
            self._running = [*others, *new]
        else:
            self._cache, self._running = cache, new
            self._next = token[:, None], self._column([len(self._prompts[number]) for number in new])
        self._write(new, token)

    def _leave_out(self) -> None:
        """Forget rows that have ended, if they are many."""
        if not self._joins or self._next is None or len(self._active) * SHRINK > len(self._running):
            return
        left = [number for number in self._running if number in self._active]
        index = self._index(left)
        self._cache = self._joined([(self._cache, index)], left)
        self._next = self._next[0][index], self._next[1][index]
        self._running = left

    def _extend(self, ids: Tensor, positions: Tensor) -> None:
        with self._inference():
            logits = self._joint.next_logits({"input_ids": ids, "positions": positions}, self._cache)
            token = self._draw(logits, self._running)
            self._next = token[:, None], positions + 1
        self._write(self._running, token)

    def _compute_anew(self) -> None:
        """Run the model on all positions of the rows that run, since a cache is void or not wanted."""
        # Entries belong to the batch of all prompts, which must then keep its rows
        if self._joins or not self._entries:
            self._running = [number for number in self._running if number in self._active]
        token, self._cache = self._begin(self._running)
        lengths = [len(self._prompts[number]) + len(self.written[number]) for number in self._running]
        self._next = token[:, None], self._column(lengths)
        self._write(self._running, token)

    # --- parts of a step -------------------------------------------------------------------------------------------

    def _begin(self, rows: Sequence[int]) -> tuple[Tensor, Any]:
        """Returns the next token (B,) of rows from their beginning, and their cache."""
        ids = [[*self._prompts[number], *self.written[number]] for number in rows]
        # Room for all tokens that may follow, so that the cache does not have to grow
        room = max(map(len, ids)) + (self._left(rows) if self._use_cache else 0)
        cache = self._model.new_cache(len(rows), room)  # type: ignore[operator]
        batch = with_prompt(self._model, self._batch(ids), [len(self.written[number]) for number in rows])
        logits = self._read({**batch, **self._entries}, cache)
        if self._joins is None:
            self._joins = self._use_cache and not self._entries and self._joint.joins_rows(cache)
        return self._draw(logits, rows), cache

    def _read(self, batch: dict[str, Tensor], cache: Any) -> Tensor:
        """Returns the logits (B, V) after prompts. Long ones are read in pieces, as masks take a byte for each pair."""
        rows, length = batch["input_ids"].shape
        piece = max(LEAST_PIECE, MASK_BYTES // (rows * length))
        # Further entries may join positions of the whole prompt; a void cache holds for no piece; and ranks that share
        # a model must call it equally often, whatever the lengths of their rows
        is_plain = batch.keys() == {"input_ids", "positions"} and not self._limits
        if not is_plain or (dist.is_initialized() and dist.get_world_size() > 1):
            piece = length
        for start in range(0, length, piece):
            part = {name: entry[:, start : start + piece] for name, entry in batch.items()} if piece < length else batch
            logits = self._joint.next_logits(part, cache)
        return logits

    def _batch(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        ids, positions = left_padded(rows, self._pad, self._device)
        return {"input_ids": ids, "positions": positions}

    def _joined(self, parts: Sequence[tuple[Any, Tensor]], rows: Sequence[int]) -> Any:
        # The last token of a row is not in its cache yet; of a new row, none is written yet.
        columns = max(len(self._prompts[number]) + max(len(self.written[number]) - 1, 0) for number in rows)
        return parts[0][0].joined(parts, columns, columns + self._left(rows))

    def _left(self, rows: Sequence[int]) -> int:
        """Returns for how many further positions these rows need room."""
        return self._end.max_tokens - min(len(self.written[number]) for number in rows)

    def _is_void(self) -> bool:
        """Whether a row that runs has exceeded a length beyond which its cache is void by its last token."""
        lengths = (len(self._prompts[number]) + len(self.written[number]) for number in self._active)
        return bool(self._limits) and any(length - 1 in self._limits for length in lengths)

    def _write(self, rows: Sequence[int], token: Tensor) -> None:
        """Note the next token of each row, and which rows end."""
        # `tolist` waits for the device once, for all rows
        for number, id_ in zip(rows, token.tolist(), strict=True):
            # Rows that have ended stay in the batch until `_leave_out` removes them
            if number not in self._active:
                continue
            if id_ in self._end.stops:
                self._active.discard(number)
                continue
            written = self.written[number]
            written.append(id_)
            if self._end.is_reached(written):
                self._active.discard(number)

    def _index(self, rows: Sequence[int], among: Sequence[int] | None = None) -> Tensor:
        places = {number: place for place, number in enumerate(self._running if among is None else among)}
        return torch.tensor([places[number] for number in rows], dtype=torch.int64, device=self._device)

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._device)[:, None]


def left_padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns ids and positions (B, longest row), rows flush right; padding has a negative position."""
    # Padding is at the left, so that the last column has the last token of each row
    length = max(len(row) for row in rows)
    ids = [[pad] * (length - len(row)) + list(row) for row in rows]
    positions = [[NO_POSITION] * (length - len(row)) + list(range(len(row))) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(positions, device=device)
