"""Routes, the experts that routers choose for each token: recorded in one forward pass, replayed in another.

Two programs, or two precisions, compute slightly different scores, and a token between two experts goes to another one.
A sampler records its routes, and training replays them: the experts are then the same, and their weights are computed
from the scores in training.

Shapes: B rows, S positions, s positions of this rank, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_kit.nn.batches import PLACES
from forge_kit.torch_internals import eagerly

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch

ENTRY = "routes."
"""Prefix of the names of batch entries (B, 1, S, K), int: the experts of each token in the layer of that number, -1
where its router chooses. They have a dimension of 1 at the place of positions, so that a stage that divides sequences
leaves them whole."""
DIFFER = "moe/routes_differ"
"""Count (2,) in each layer: tokens whose router would have chosen other experts, and tokens that are replayed."""


class RouteReplay:
    """Takes recorded choices in place of a router's own. A router keeps one, by the name `replay`.

        self.replay = RouteReplay(context)            # in __init__
        chosen = self.replay(chosen, batch)           # in forward, before weights are computed from the choices

    Its component declares `replays_routes: ClassVar[bool] = True`.
    """

    def __init__(self, context: BuildContext) -> None:
        layer = context.layer or 0
        self.entry = f"{ENTRY}{layer}"
        self._counter = context.auxiliary.counter(DIFFER, layer)
        context.auxiliary.summarise(DIFFER, _share)

    def __call__(self, chosen: Tensor, batch: Batch) -> Tensor:
        """(B, s, K) choices of a router to the recorded ones, where the batch has some."""
        # First without the number of the layer: compiled layers then share a graph where nothing is replayed
        if not any(name.startswith(ENTRY) for name in batch) or self.entry not in batch:
            return chosen
        recorded = batch[self.entry][:, 0].to(chosen.dtype)
        if PLACES in batch and recorded.shape[1] != chosen.shape[1]:
            recorded = recorded.gather(1, batch[PLACES].unsqueeze(-1).expand(-1, -1, recorded.shape[-1]))
        there = recorded >= 0
        tokens = there.all(-1)
        # As sets: their order follows the scores
        differ = (recorded.sort(-1).values != chosen.sort(-1).values).any(-1) & tokens
        self._counter.add(torch.stack([differ.sum(), tokens.sum()]))
        return recorded.where(there, chosen)


def _share(rows: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
    """The share of tokens, over all layers."""
    total = torch.stack(list(rows.values())).sum(0)
    return {DIFFER: total[0] / total[1].clamp(min=1)}


def without_routes(batch: Batch) -> Batch:
    """Returns the batch for a model that routes by itself."""
    return {name: value for name, value in batch.items() if not name.startswith(ENTRY)}


class RouteRecord:
    """Collects routes of rows that are computed in several calls of a model, each with a part of their positions.

    `positions` takes the positions of each call (B, S), negative ones being padding, and `assign` the rows of the calls
    since the last one.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.positions: list[Tensor] = []
        self._rows, self._length = rows, length
        self._pending: dict[str, list[Tensor]] = {}
        self._parts: list[tuple[Sequence[int], Tensor, dict[str, Tensor]]] = []

    def add(self, entry: str, chosen: Tensor) -> None:
        """Add the choices (B, S, K) of one router in one call."""
        self._pending.setdefault(entry, []).append(chosen)

    def assign(self, rows: Sequence[int]) -> None:
        """End some calls: these are the numbers of their rows."""
        # As int16, a quarter of the memory: a record has all tokens of all layers until it is used
        chosen = {entry: torch.cat(parts, 1).to("cpu", torch.int16) for entry, parts in self._pending.items()}
        self._parts.append((rows, torch.cat(self.positions, 1).cpu(), chosen))
        self.positions.clear()
        self._pending.clear()

    def tables(self) -> dict[str, Tensor]:
        """Returns the routes (rows, length, K), int16, by the name of the entry; -1 where there are none."""
        tables: dict[str, Tensor] = {}
        for rows, positions, every in self._parts:
            row, column = (positions >= 0).nonzero(as_tuple=True)
            number = torch.tensor(rows)[row]
            for entry, chosen in every.items():
                if entry not in tables:
                    tables[entry] = chosen.new_full((self._rows, self._length, chosen.shape[-1]), -1)
                tables[entry][number, positions[row, column]] = chosen[row, column]
        return tables


@contextmanager
def recorded_routes(model: nn.Module, record: RouteRecord) -> Iterator[None]:
    """A context in which the routers of a model add their choices to a record. Compiled layers run as plain Python.

    Raises:
        ForgeError: two routers have one name.
    """
    # Through wrappers of stages, which show their module's attributes, a router would be found twice
    routers: list[Any] = [module for module in model.modules() if isinstance(vars(module).get("replay"), RouteReplay)]
    entries: list[str] = [router.replay.entry for router in routers]
    if len({*entries}) < len(entries):
        raise ForgeError(f"several routers have the number of one layer ({', '.join(sorted(entries))})")

    def hook(router: Any, _inputs: Any, output: Any) -> None:
        record.add(router.replay.entry, output[1])

    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        with eagerly():  # compiled code takes no notice of hooks that come later
            yield
    finally:
        for handle in handles:
            handle.remove()
