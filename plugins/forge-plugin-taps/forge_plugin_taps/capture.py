"""What the ranks have captured of one step, and its exchange between them.

Shapes: B sequences of a micro-batch, n sampled positions of each, R sequences of a rank, N samples of all ranks, m of
them on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.parallel.mesh import gather_objects, global_rank
from forge_plugin_taps.where import Split

TOKENS = ("step", "row", "position", "id", "label", "document", "source", "sequence")
"""Facts about each sample. `row`: number of its sequence in the global batch; `position`: in that sequence; `id`
and `label`: token and target; `document`: the batch's id of its document; `source`: number of the sequence's source;
`sequence`: its number in that source. 0 where the batch has no such entry."""
FROM_BATCH = ("id", "label", "document", "source", "sequence")


@frozen
class Drawn:
    """The sampled positions of a micro-batch."""

    rows: np.ndarray
    """(B,) numbers of its sequences in the global batch."""
    positions: np.ndarray
    """(B, n) in the sequence."""
    inside: np.ndarray
    """(B, n) in this rank's part of the sequence; -1: another rank has it."""
    rest: np.ndarray
    """The same between blocks, where sequence parallel divides positions."""
    columns: Mapping[str, Tensor] = field(repr=False)
    """(B, n) by names of `FROM_BATCH`, on the CPU once `copied` has happened."""
    copied: Any = None


@frozen
class Part:
    """What all ranks know of a rank's part of a point."""

    rank: int
    shape: tuple[int, ...]
    """Of one sample on that rank."""
    dtype: torch.dtype
    split: Split | None
    """The heads or features that it has; None: it has all."""
    counted: bool
    """Whether a sum over all ranks takes it: of several ranks with equal values, one."""
    at_rest: bool
    """Whether sequence parallel divides its positions."""


class Capture:
    """The captured values of a step. Made on all ranks together."""

    def __init__(
        self,
        step: int,
        drawn: Sequence[Drawn],
        values: Mapping[str, Tensor],
        parts: Mapping[str, Sequence[Part]],
        rows: int,
        device: torch.device,
    ) -> None:
        """Take what a recorder has recorded, and exchange which samples each rank has. Collective.

        Args:
            step: number of the step, from 1.
            drawn: of each micro-batch of this rank, in order.
            values: (R, n, …) by point, with anything where another rank has the position.
            parts: of all ranks, by point.
            rows: sequences of the global batch.
            device: of the values.
        """
        self.step, self.device, self._drawn, self._values, self._parts = step, device, drawn, values, parts
        self._rank = global_rank()
        self._kept = {at_rest: self._find(at_rest) for at_rest in (False, True)}
        numbers = self._numbers()
        self._indices = gather_objects({at_rest: numbers[kept] for at_rest, kept in self._kept.items()})
        # The largest of all ranks, as a rank may have recorded no micro-batch
        counts = {len(part.positions[0]) for part in drawn if len(part.positions)}
        self.samples = rows * max(gather_objects(max(counts, default=0)))
        self._tokens: dict[str, Tensor] | None = None

    def _find(self, at_rest: bool) -> Tensor:
        """Which of the R n recorded positions this rank has."""
        local = [(part.rest if at_rest else part.inside).reshape(-1) for part in self._drawn]
        return torch.from_numpy(np.flatnonzero(_joined(local) >= 0))

    def _numbers(self) -> Tensor:
        """Number of each of the R n recorded positions among the N samples."""
        numbers = [
            part.rows[:, None] * part.positions.shape[1] + np.arange(part.positions.shape[1]) for part in self._drawn
        ]
        return torch.from_numpy(_joined([part.reshape(-1) for part in numbers]))

    def parts(self, name: str) -> list[Part]:
        """Returns the parts that make up a point's tensor, by rank.

        Raises:
            ForgeError: no rank has any.
        """
        parts = [part for part in self._parts.get(name, ()) if part.counted]
        if not parts:
            raise ForgeError(f"taps: no rank has values of {name} in step {self.step}: its module was not called")
        return parts

    def own_part(self, name: str) -> Part | None:
        """Returns this rank's part of a point; None: it has none."""
        return next((part for part in self._parts.get(name, ()) if part.rank == self._rank), None)

    def index(self, part: Part) -> Tensor:
        """Returns the numbers of the samples in a rank's part, ascending where rows are: (m,)."""
        return self._indices[part.rank][part.at_rest]

    def values(self, name: str, at_rest: bool) -> Tensor:
        """Returns this rank's values of a point, without those that another rank has: (m, …)."""
        values, kept = self._values[name].flatten(0, 1), self._kept[at_rest]
        if len(kept) == len(values):
            return values
        # Copied without a wait: which samples are here is computed on the host
        return values.index_select(0, kept.to(values.device, non_blocking=True))

    @property
    def tokens(self) -> Mapping[str, Tensor]:
        """See `Sample.tokens`. Collective the first time."""
        # Not at the end of the step: ids are on the device, and the host would wait for their copy.
        if self._tokens is None:
            for part in self._drawn:
                if part.copied is not None:
                    # Only for this copy, which was made in the forward pass; later work on the device goes ahead
                    part.copied.synchronize()
            self._tokens = self._merged(gather_objects(self._own_columns()))
        return self._tokens

    def _own_columns(self) -> dict[str, Tensor]:
        kept = self._kept[False]
        columns = {"index": self._numbers()[kept]}
        if not self._drawn:
            return columns
        rows = [np.repeat(part.rows, part.positions.shape[1]) for part in self._drawn]
        columns["row"] = torch.from_numpy(np.concatenate(rows))[kept]
        columns["position"] = torch.from_numpy(np.concatenate([part.positions.reshape(-1) for part in self._drawn]))[
            kept
        ]
        for name in FROM_BATCH:
            if name in self._drawn[0].columns:
                columns[name] = torch.cat([part.columns[name].reshape(-1) for part in self._drawn])[kept]
        return columns

    def _merged(self, every: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        # On all ranks in full, as every sink may read any sample's facts
        tokens = {name: torch.zeros(self.samples, dtype=torch.int64) for name in TOKENS}
        tokens["step"].fill_(self.step)
        for columns in every:  # several ranks may have the same samples, and then they have the same values
            for name in columns.keys() - {"index"}:
                tokens[name][columns["index"]] = columns[name]
        return tokens


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    # A rank may have no micro-batch, and NumPy concatenates no empty list
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
