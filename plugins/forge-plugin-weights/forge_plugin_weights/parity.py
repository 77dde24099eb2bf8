"""`forge/parity.json` of an export: its files, read back, hold the weights that they were made of.

Tensors are compared in blocks, by several threads, while their pages are still in memory. What both models compute is
compared if that is asked for, since it takes as long as a forward pass of each.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.contracts.errors import ForgeError
from forge_plugin_weights.files import Boxes
from forge_plugin_weights.kinds import Part
from forge_plugin_weights.matching import listed

if TYPE_CHECKING:
    from torch import Tensor

    from forge_plugin_weights.files import Place
    from forge_plugin_weights.verifying import LogitDifference

PARITY = "parity.json"
DISTRIBUTIONS = ("forge-run", "forge-plugin-weights", "torch")


class ReadBack:
    """Compares tensors with the files that they were written to; threads may share it."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._boxes, self._lock = Boxes(places), Lock()
        self.tensors: dict[str, tuple[bool, float]] = {}
        """For each of our tensors, whether the files have it, and the largest error of rounding to their dtype."""

    def compare(self, part: Part, values: Tensor, offsets: Sequence[int]) -> None:
        """Compare what a part has of a box of our tensor."""
        equal, error = self._boxes.compare(part, values, offsets)
        with self._lock:  # parts of one tensor may lie in several files
            before = self.tensors.get(part.ours, (True, 0.0))
            self.tensors[part.ours] = before[0] and equal, max(before[1], error)

    def close(self) -> dict[str, tuple[bool, float]]:
        """Returns the results."""
        self._boxes.close()
        return self.tensors


def merged(results: Iterable[Mapping[str, tuple[bool, float]]]) -> dict[str, tuple[bool, float]]:
    """Returns the results of several ranks as one."""
    tensors: dict[str, tuple[bool, float]] = {}
    for of_rank in results:
        for name, (equal, error) in of_rank.items():
            before = tensors.get(name, (True, 0.0))
            tensors[name] = before[0] and equal, max(before[1], error)
    return tensors


def write_parity(
    folder: Path,
    tensors: Mapping[str, tuple[bool, float]],
    names: Iterable[str],
    *,
    changes: Sequence[str] = (),
    computed: LogitDifference | None = None,
) -> None:
    """Write the record.

    Args:
        folder: of the export's record.
        tensors: what was read back.
        names: of all tensors of the model.
        changes: keys of `[model]` that are others for a job that is made of the export; some matter to training only.
        computed: how what both models compute differs, if that was asked for.

    Raises:
        ForgeError: the files do not have some tensor.
    """
    # A tensor that was not compared counts as wrong: the export may have left it out.
    wrong = [name for name in names if not tensors.get(name, (False, 0.0))[0]]
    if wrong:
        raise ForgeError(f"the files of the export, read back, do not hold {listed(wrong)}; the disk may be failing")
    record: dict[str, Any] = {
        "tensors": {
            "equal": sum(error == 0 for _, error in tensors.values()),
            "rounded": {name: error for name, (_, error) in sorted(tensors.items()) if error},
        },
        "model": list(changes),
        "computed": attrs.asdict(computed) if computed is not None else None,
        "versions": {name: importlib.metadata.version(name) for name in DISTRIBUTIONS},
    }
    # Written last: a record is there only if nothing was wrong.
    (folder / PARITY).write_text(json.dumps(record, indent=1) + "\n")
