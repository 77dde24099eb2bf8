"""Whole matrices for optimizers that need them (Muon, SOAP), though each rank holds a part of every one.

Each matrix has one owner among the ranks that share it. Parts travel to the owner, it computes, and parts of the result
travel back: two collectives a step, and the work is divided, not repeated. Ranks that hold copies own different ones.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from forge_kit.nn.mesh import coordinate, layer_dimensions, place_of
from forge_kit.torch_internals import flattened, is_strided

Box = tuple[slice, ...]
"""A rank's part of a tensor: a range along each dimension."""


@frozen(kw_only=True)
class Matrix:
    """A parameter (rows, columns), or one of the matrices that a parameter (number, rows, columns) stacks."""

    parameter: int
    """Number of the parameter."""
    item: int | None
    """Number in the stack; None: the parameter is one matrix."""
    shape: tuple[int, ...]
    boxes: Sequence[Box | None]
    """Each rank's part of it; None if it has none."""
    own_place: Any
    """Its index in this rank's part of the parameter."""
    owner: int
    """The rank that computes on it, counted among the ranks that share the work."""
    senders: Sequence[int]
    """Ranks whose boxes together are the whole, as near to the owner as possible."""


class WholeMatrices:
    """Matrices on which ranks divide the work. The ranks of a pipeline have different ones, and share none.

    Args:
        parameters: matrices, or stacks of them on dimension 0, split over ranks in any way.
        mesh: the run's; None in a single process.
        cost: work on a matrix of a shape, to divide it equally; by default a product with its own Gram matrix.

    Attributes:
        matrices: all of them; equal on all ranks that share them.
        rank: this rank, as `Matrix.owner` counts.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        mesh: DeviceMesh | None = None,
        cost: Callable[[Sequence[int]], float] = lambda shape: math.prod(shape) * min(shape),
    ) -> None:
        self._group, ranks = _sharing_ranks(mesh)
        self.rank = ranks.index(dist.get_rank()) if self._group is not None else 0
        self.matrices = list(_matrices(parameters, mesh, ranks, self.rank, cost))
        # The same on all ranks, as it decides whether there is a collective
        self._gathers = any(list(matrix.senders) != [matrix.owner] for matrix in self.matrices)
        self._scatters = any(_holders(matrix.boxes) != [matrix.owner] for matrix in self.matrices)
        self._batches: dict[tuple[Any, ...], list[list[Matrix]]] = {}

    def owned(self, numbers: Iterable[int]) -> list[Matrix]:
        """The matrices of these parameters that this rank owns, in the order in which `map` hands them out."""
        chosen = set(numbers)
        return [matrix for matrix in self.matrices if matrix.parameter in chosen and matrix.owner == self.rank]

    def map(
        self, parts: Mapping[int, Tensor], function: Callable[[list[Tensor]], Sequence[Tensor]]
    ) -> dict[int, Tensor]:
        """This rank's parts of the results of `function` on whole matrices. Collective.

        Args:
            parts: by number of a parameter, a tensor that is split like it. The same numbers on all ranks, all of one
                dtype.
            function: from the whole matrices (rows, columns) that this rank owns to others of the same shapes and
                dtype. It leaves its inputs as they are. Not called if there are none.
        """
        # Numbers are the same on all ranks, so none of them joins a collective
        if not parts:
            return {}
        results: dict[int, Tensor] = {}
        chosen = [matrix for matrix in self.matrices if matrix.parameter in parts]
        like = next(iter(parts.values()))
        for matrix, piece in self.each(
            chosen, lambda matrix: parts[matrix.parameter][matrix.own_place], function, like
        ):
            if matrix.item is None:
                results[matrix.parameter] = piece
            else:
                if matrix.parameter not in results:
                    results[matrix.parameter] = torch.empty_like(parts[matrix.parameter])
                results[matrix.parameter][matrix.own_place] = piece
        return {number: results.get(number, part) for number, part in parts.items()}  # this rank may hold none of some

    def each(
        self,
        chosen: Sequence[Matrix],
        part: Callable[[Matrix], Tensor],
        function: Callable[[list[Tensor]], Sequence[Tensor]],
        like: Tensor,
    ) -> Iterator[tuple[Matrix, Tensor]]:
        """This rank's part of the result of `function` on each matrix, for the matrices of which it holds a part.

        Collective, once iterated; the memory of a part is free when the next one is asked for.

        Args:
            chosen: some of `matrices`, the same on all ranks, in their order.
            part: this rank's part of a matrix that it holds a part of; all of one dtype.
            function: as in `map`.
            like: a tensor of that dtype, on the device.
        """
        owned = [matrix for matrix in chosen if matrix.owner == self.rank]
        pieces = self._exchange(
            [(m.owner, part(m)) for m in chosen if self.rank in m.senders],
            [(rank, m.boxes[rank]) for m in owned for rank in m.senders],
            like,
            self._gathers,
        )
        whole = [_assemble(matrix, pieces) for matrix in owned]
        results = function(whole) if whole else []
        del whole  # frees the inputs before the results are exchanged
        pieces = self._exchange(
            [(r, result[m.boxes[r]]) for m, result in zip(owned, results, strict=True) for r in _holders(m.boxes)],
            [(m.owner, m.boxes[self.rank]) for m in chosen if m.boxes[self.rank] is not None],
            like,
            self._scatters,
        )
        del results
        for matrix in chosen:
            if matrix.boxes[self.rank] is not None:
                yield matrix, next(pieces)

    def batches(self, numbers: Iterable[int], elements: int, stacked: int = 1) -> list[list[Matrix]]:
        """The matrices of these parameters, divided so that a rank works on few elements at a time.

        The same on all ranks, since each batch is a call of the collective `each`.

        Args:
            numbers: of parameters, the same on all ranks.
            elements: bound on what a rank owns in a batch, and on what it holds parts of; exceeded where a single stack
                does, and where ranks would otherwise have less than a matrix each.
            stacked: elements up to which matrices of one shape and owner stay together in a stack. A product of a stack
                may round differently from products of its parts, so stacks must not depend on `elements`.
        """
        key = (tuple(numbers), elements, stacked)
        if key not in self._batches:
            # Only the latest division is kept: which parameters are trained seldom changes from step to step.
            chosen = set(key[0])
            stacks = _stacks([matrix for matrix in self.matrices if matrix.parameter in chosen], stacked)
            self._batches = {key: _divided(stacks, elements)}
        return self._batches[key]

    def _exchange(
        self,
        outgoing: Sequence[tuple[int, Tensor]],
        incoming: Sequence[tuple[int, Box | None]],
        like: Tensor,
        needed: bool,
    ) -> Iterator[Tensor]:
        """Send tensors to ranks, and return the tensors received, in the order and shapes of `incoming`.

        Args:
            outgoing: (rank, tensor) pairs to send.
            incoming: (rank, box) pairs to receive; tensors have the shapes of the boxes.
            like: a tensor of their dtype, on their device.
            needed: whether any rank sends to another one; if not, there is no collective.
        """
        # Parts that stay on this rank do not pass through the collective
        own = deque(tensor for rank, tensor in outgoing if rank == self.rank)
        received = self._send(outgoing, incoming, like) if needed else {}
        pieces = []
        for rank, box in incoming:
            assert box is not None
            pieces.append(own.popleft() if rank == self.rank else received[rank].popleft().view(_shape(box)))
        return iter(pieces)

    def _send(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Box | None]], like: Tensor
    ) -> dict[int, deque[Tensor]]:
        """Returns flat tensors by the rank that sent them."""
        size = dist.get_world_size(self._group)
        flat: dict[int, list[Tensor]] = defaultdict(list)
        lengths: dict[int, list[int]] = defaultdict(list)
        for rank, tensor in outgoing:
            if rank != self.rank:
                flat[rank].append(tensor.reshape(-1))
        for rank, box in incoming:
            if rank != self.rank:
                assert box is not None
                lengths[rank].append(math.prod(_shape(box)))
        # `cat` refuses an empty list, and this rank may send nothing
        sent = torch.cat([like.new_empty(0), *(tensor for rank in range(size) for tensor in flat[rank])])
        received = like.new_empty(sum(map(sum, lengths.values())))
        dist.all_to_all_single(
            received,
            sent,
            [sum(lengths[rank]) for rank in range(size)],
            [sum(tensor.numel() for tensor in flat[rank]) for rank in range(size)],
            group=self._group,
        )
        # `all_to_all_single` orders what it receives by sender
        parts = iter(received.split([length for rank in range(size) for length in lengths[rank]]))
        return {rank: deque(next(parts) for _ in lengths[rank]) for rank in range(size)}


def _stacks(matrices: Sequence[Matrix], elements: int) -> list[list[Matrix]]:
    """Groups matrices of one shape and owner into stacks of at most `elements` elements, ordered by their first."""
    stacks: list[list[Matrix]] = []
    latest: dict[tuple[int, tuple[int, ...]], list[Matrix]] = {}
    for matrix in matrices:
        stack = latest.get((matrix.owner, matrix.shape))
        if stack is None or (len(stack) + 1) * math.prod(matrix.shape) > elements:
            stack = latest[matrix.owner, matrix.shape] = []
            stacks.append(stack)
        stack.append(matrix)
    return stacks


def _divided(stacks: Sequence[Sequence[Matrix]], elements: int) -> list[list[Matrix]]:
    batches: list[list[Matrix]] = []
    owned: dict[int, int] = defaultdict(int)
    held: dict[int, int] = defaultdict(int)
    for stack in stacks:
        size = len(stack) * math.prod(stack[0].shape)
        busiest = max([owned[stack[0].owner] + size, *held.values()])
        # With fewer matrices than ranks, some owners would idle while others work, batch after batch.
        if not batches or (busiest > elements and len(batches[-1]) >= len(stack[0].boxes)):
            batches.append([])
            owned.clear()
            held.clear()
        batches[-1].extend(stack)
        owned[stack[0].owner] += size
        for matrix in stack:
            for rank in _holders(matrix.boxes):
                held[rank] += math.prod(_shape(matrix.boxes[rank] or ()))
    return batches


def _sharing_ranks(mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup | None, list[int]]:
    """Returns the ranks that have the same layers as this one, as a group; None if it is alone."""
    if mesh is None:
        return None, [0]
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    names = [name for name, size in sizes if size > 1 and name not in layer_dimensions(mesh)]
    if not names:
        return None, [dist.get_rank()]
    line = mesh[names[0]] if len(names) == 1 else flattened(mesh, names, "_".join(names))
    group = line.get_group()
    return group, dist.get_process_group_ranks(group)


def _matrices(
    parameters: Sequence[Tensor],
    mesh: DeviceMesh | None,
    ranks: Sequence[int],
    rank: int,
    cost: Callable[[Sequence[int]], float],
) -> Iterator[Matrix]:
    """Yields all matrices with their owners."""
    # The owner is the rank with the least work so far, among those that hold all of the matrix if any do: then it need
    # not travel. Every rank computes the same assignment, without communication.
    places = [place_of(other, mesh) if mesh is not None else {} for other in ranks]
    loads = [0.0] * len(ranks)
    for number, parameter in enumerate(parameters):
        boxes = [_box(parameter, mesh, other) for other in ranks]
        shape = tuple(parameter.shape[-2:])
        items: Iterable[int | None] = [None] if parameter.ndim == 2 else range(parameter.shape[0])
        for item in items:
            inside = [_within(box, item) for box in boxes]
            whole = [r for r, box in enumerate(inside) if box is not None and _shape(box) == shape]
            # The number of the rank decides ties, so that all ranks choose the same owner
            owner = min(whole or range(len(ranks)), key=lambda r: (loads[r], r))
            loads[owner] += cost(shape)
            yield Matrix(
                parameter=number,
                item=item,
                shape=shape,
                boxes=inside,
                own_place=slice(None) if item is None else item - boxes[rank][0].start,
                owner=owner,
                senders=_senders(inside, owner, places),
            )


def own_box(parameter: Tensor, mesh: DeviceMesh | None) -> Box:
    """Returns this rank's part of a parameter; works on the fake tensors of a plan too."""
    return _box(parameter, mesh, dist.get_rank() if mesh is not None else 0)


def _box(parameter: Any, mesh: DeviceMesh | None, rank: int) -> Box:
    """Returns the part of a parameter that a global rank holds, split as by `torch.chunk`."""
    ranges = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        assert mesh is not None
        splits = [item for item in enumerate(parameter.placements) if not isinstance(item[1], Replicate)]
        # A strided one divides what the dimensions after it have left.
        for dimension, placement in sorted(splits, key=lambda item: is_strided(item[1])):
            start, stop = ranges[placement.dim]  # type: ignore[attr-defined]
            name, count = parameter.device_mesh.mesh_dim_names[dimension], parameter.device_mesh.size(dimension)  # type: ignore[index]
            number = coordinate(rank, name, mesh)
            # Rounded up, as `torch.chunk` does: the last pieces are smaller, or empty
            share = -(-(stop - start) // count)
            bounds = (min(stop, start + number * share), min(stop, start + (number + 1) * share))
            ranges[placement.dim] = bounds  # type: ignore[attr-defined]
    return tuple(slice(start, stop) for start, stop in ranges)


def _within(box: Box, item: int | None) -> Box | None:
    """Returns the part of a parameter's box that lies in a matrix: one of a stack, or the parameter itself."""
    if item is not None:
        if not box[0].start <= item < box[0].stop:
            return None
        box = box[1:]
    return box if math.prod(_shape(box)) else None


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in box)


def _holders(boxes: Sequence[Box | None]) -> list[int]:
    return [rank for rank, box in enumerate(boxes) if box is not None]


def _senders(boxes: Sequence[Box | None], owner: int, places: Sequence[Mapping[str, int]]) -> list[int]:
    """One rank for each part: the owner if it holds that part, else the rank nearest to it in the mesh."""

    def distance(rank: int) -> tuple[int, int]:
        return sum(places[rank][name] != places[owner][name] for name in places[owner]), rank

    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in _holders(boxes):
        alike.setdefault(tuple((side.start, side.stop) for side in boxes[rank] or ()), []).append(rank)
    return sorted(min(ranks, key=distance) for ranks in alike.values())


def _assemble(matrix: Matrix, pieces: Iterator[Tensor]) -> Tensor:
    # A single sender has the whole matrix: nothing to copy
    if len(matrix.senders) == 1:
        return next(pieces)
    whole: Tensor | None = None
    for rank in matrix.senders:
        piece = next(pieces)
        if whole is None:
            whole = piece.new_empty(matrix.shape)
        whole[matrix.boxes[rank]] = piece
    assert whole is not None
    return whole
