"""Points shared out over ranks: for sinks that learn something at each point, and learn it on one rank only.

N samples of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.parallel.mesh import global_rank, world_size

if TYPE_CHECKING:
    from forge_plugin_taps.samples import Sample


class Owners:
    """Which rank owns each point. Neighbours have different owners, so that these work at the same time."""

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self.rank_of = {name: number % world_size() for number, name in enumerate(names)}
        """Point -> its owner."""
        self._device = device

    def owns(self, name: str) -> bool:
        """Whether this rank owns a point."""
        return self.rank_of[name] == global_rank()

    def gather(self, sample: Sample, inputs: Mapping[str, Sequence[str]]) -> dict[str, list[Tensor]]:
        """Returns the points of this rank that have values in this step, with their tensors (N, width). Collective.

        Args:
            sample: of a step.
            inputs: owned point -> the points of whose tensors its owner learns, in this order.
        """
        # All at once, and before any owner starts to learn: else the others would wait for it at the next point
        owned: dict[str, list[Tensor]] = {}
        for name, sources in inputs.items():
            if not set(sources) <= set(sample.points):
                continue  # nothing passed it in this step: an expert that no token chose, a tower without an image
            for source in sources:
                values = sample.gather(source, to=self.rank_of[name])
                if self.owns(name):
                    assert values is not None
                    owned.setdefault(name, []).append(values.flatten(1))
        return owned

    def share(self, own: Mapping[str, Mapping[str, Tensor]], keys: Sequence[str]) -> dict[str, Tensor]:
        """Returns `NAME/KEY` of all points on every rank, as scalars on the device. Collective.

        Args:
            own: of this rank's points, scalars by key. One that is missing has nothing to tell: its numbers are NaN.
            keys: their names.
        """
        table = torch.zeros(len(self.rank_of), len(keys), dtype=torch.float64, device=self._device)
        for row, name in zip(table, self.rank_of, strict=True):
            if own.get(name):
                row.copy_(torch.stack([own[name][key].to(row) for key in keys]))
            elif self.owns(name):
                row.fill_(torch.nan)
        if world_size() > 1:
            torch.distributed.all_reduce(table)  # a point's numbers are zero but on its owner
        return {
            f"{name}/{key}": value
            for name, row in zip(self.rank_of, table, strict=True)
            for key, value in zip(keys, row, strict=True)
        }

    def of_rank(self, state: Mapping[str, object]) -> dict[str, dict[str, Tensor]]:
        """Returns the saved tensors `NAME/KEY` of this rank's points, by point and key."""
        found: dict[str, dict[str, Tensor]] = {}
        for full, value in state.items():
            name, _, key = full.partition("/")
            if isinstance(value, Tensor) and key and self.owns(name):
                found.setdefault(name, {})[key] = value
        return found
