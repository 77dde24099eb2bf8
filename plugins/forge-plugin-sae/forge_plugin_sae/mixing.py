"""Rows of a stream in mixed order: neighbours in a text, and rows of one step, come apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from forge_core.contracts.errors import ForgeError


class MixingBuffer:
    """A reservoir of rows: once it is full, each new row takes the place of one drawn at random, which leaves.

    Each row leaves exactly once, the last ones by `drain`. A row stays for `capacity` new rows on average, and as many
    rows leave as come, so that no step has more to train on than another. Which row leaves is a function of the seed
    and of how many were drawn before.
    """

    def __init__(self, capacity: int, width: int, seed: str, device: torch.device, dtype: torch.dtype) -> None:
        self.rows = torch.zeros(capacity, width, device=device, dtype=dtype)
        self.seed, self.size, self.draws = seed, 0, 0

    @property
    def is_full(self) -> bool:
        """Whether each further row makes one leave; training starts then."""
        return self.size == len(self.rows)

    def put(self, new: Tensor) -> Iterator[Tensor]:
        """Take in (n, width) rows; yields the rows that leave, at most `capacity` at a time."""
        first = min(len(new), len(self.rows) - self.size)
        self.rows[self.size : self.size + first] = new[:first].to(self.rows)
        self.size += first
        # In parts of at most the capacity: the places of a part are distinct, so that no row of it is lost
        for part in new[first:].split(len(self.rows)):
            places = self._permutation()[: len(part)]
            leaving = self.rows[places]
            self.rows[places] = part.to(self.rows)
            yield leaving

    def drain(self) -> Tensor:
        """Returns the rows that are left, in a drawn order; the buffer is empty then."""
        order = self._permutation()
        # A permutation of all places, full or not, as `put` draws it
        rows = self.rows[order[order < self.size]]
        self.size = 0
        return rows

    def _permutation(self) -> Tensor:
        self.draws += 1
        # On the CPU, where the same seed gives the same order whatever the device
        order = torch.randperm(len(self.rows), generator=generator(self.seed, self.draws))
        return order.to(self.rows.device)

    def state(self) -> dict[str, Tensor]:
        """Returns tensors to save; counts are tensors too, since only some ranks have a buffer."""
        return {"rows": self.rows, "counts": torch.tensor([self.size, self.draws])}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned.

        Raises:
            ForgeError: the buffer had another capacity or width.
        """
        if state["rows"].shape != self.rows.shape:
            sizes = f"{list(state['rows'].shape)} in the checkpoint, {list(self.rows.shape)} now"
            raise ForgeError(f"the mixing buffer is {sizes}; keep `buffer` as it was, and the points with it")
        self.rows.copy_(state["rows"])
        self.size, self.draws = state["counts"].tolist()


def generator(seed: str, number: int = 0) -> torch.Generator:
    """A generator on the CPU, for the draw of that number."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))
