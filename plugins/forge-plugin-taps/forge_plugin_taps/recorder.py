"""Records steps: which positions are sampled, and what the sites keep of them.

Shapes: B sequences of a micro-batch, S positions, s of them on this rank, n sampled ones, R sequences of this rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import any_rank, gather_objects, global_rank, sample_rank
from forge_kit.torch_internals import eagerly
from forge_plugin_taps.capture import Capture, Drawn, Part
from forge_plugin_taps.division import FEATURES, Division, group_along, place_along
from forge_plugin_taps.kinds import GRADIENT, PointInfo, TapsInfo
from forge_plugin_taps.samples import Sample
from forge_plugin_taps.sampling import chosen_positions
from forge_plugin_taps.selection import in_order, layer_of, matching
from forge_plugin_taps.site import ENTRIES, PASSES, Current, Site
from forge_plugin_taps.where import Split, Where

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model
    from forge_plugin_taps.kinds import Edit, Sink
    from forge_plugin_taps.taps import Taps

ATTRIBUTE = "taps_recorder"
ROWS, INSIDE, REST, WHOLE, ORDER = ENTRIES


def recorder_of(model: Model) -> Recorder:
    """Returns what records the activations of a model.

    Raises:
        ForgeError: the job of the model has no stage `taps`.
    """
    recorder = getattr(model, ATTRIBUTE, None)
    if not isinstance(recorder, Recorder):
        raise ForgeError("the model has no taps: its job needs a table [parallel.taps]")
    return recorder


class Recorder:
    """The sites of a model on this rank, and the step that they record."""

    def __init__(self, component: Taps, context: BuildContext) -> None:
        job, layout, mesh = context.job, context.layout, context.mesh
        self.component, self.context = component, context
        self.current = Current(context.auxiliary)
        self.sites: dict[str, Site] = {}
        """Of this rank, by point."""
        self.sinks: dict[str, Sink] = {}
        """By the names of their tables, for evaluations; none before the run begins."""
        self.names: Sequence[str] = ()
        """Captured points of all ranks, gradients among them; set by `agree`."""
        self.positions = job.train.seq_len if component.positions == "all" else int(component.positions)
        """Sampled positions of each sequence; a shorter one has as many as it is long."""
        count, size = micro_batches(job, layout)
        share = count * size
        first = sample_rank(mesh, layout) * share
        self._own_rows = range(first, first + share)
        self._all_rows = share * layout.data_parallel
        self._earlier_rows = layout.run[0] * self._all_rows
        """Rows of the global batch that belong to runs of the same model before this one."""
        self._division = division = Division.of(job, layout)
        self._sharer = place_along(division.features, mesh)
        """(number, count) of this rank among those that share heads and features."""
        self._sharers = group_along(division.features, mesh)
        self.position_group = group_along(division.positions, mesh)
        """Ranks that share sequences; None: each has whole ones."""
        self._pieces = place_along(division.positions, mesh)[1]
        """Ranks that share a sequence, in equal parts."""
        self._first = all(place_along(dimension, mesh)[0] == 0 for dimension in division.equal)
        """Whether this rank is the one that counts, of those with equal values."""
        self._places: dict[int, np.ndarray] = {}
        self._orders: dict[int, np.ndarray] = {}
        self._parts: tuple[dict[str, Part], dict[str, list[Part]]] = {}, {}
        """Of this rank, and of all ranks, when they were exchanged last."""
        self._absent: set[str] = set()
        self._pass = 0
        """Number of micro-batches that were marked."""
        self._stop()

    def _stop(self) -> None:
        self._step = 0
        self._rows: Sequence[int] = ()
        self._total, self._seen = 0, 0
        self._drawn: dict[int, Drawn] = {}
        self.current.marks = None
        for site in self.sites.values():
            site.clear()

    def agree(self) -> TapsInfo:
        """Returns what all ranks together capture. Collective."""
        points = {name: axes for part in gather_objects(self._own_points()) for name, axes in part.items()}
        self.names = in_order(points)
        return self._info(points)

    def _info(self, points: Mapping[str, str]) -> TapsInfo:
        return TapsInfo(
            points={name: PointInfo(points[name], layer_of(name)) for name in in_order(points)},
            interval=self.component.interval,
            rows=self._all_rows,
            positions=min(self.positions, self.context.job.train.seq_len),
            length=self.context.job.train.seq_len,
        )

    def _own_points(self) -> dict[str, str]:
        values = {name: site.axes for name, site in self.sites.items() if site.values}
        return values | {name + GRADIENT: site.axes for name, site in self.sites.items() if site.gradient}

    # --- edits -------------------------------------------------------------------------------------------------------

    def add_edits(self) -> None:
        """Build the edits of the job at the points of this rank. They are on until a run loop changes this."""
        info = self._info(self._own_points())
        for name, component in self.component.edits.items():
            edit = self.context.build(component, taps=info)
            points = [name for name, site in self.sites.items() if site.axes != "pattern"]
            for point in matching([component.point], points):
                self.put_edit(name, edit, point)
        self.current.edits = frozenset(self.component.edits)

    def put_edit(self, name: str, edit: Edit, point: str) -> None:
        """Put an edit, to be switched on by `editing`, at a captured point that this rank has; in place of its last."""
        if point in self.sites:
            self.take_edits([name], point)
            self.sites[point].edits.append((name, edit, partial(self._where, self.sites[point])))

    def take_edits(self, names: Iterable[str], point: str) -> None:
        """Remove edits of these names from a point, if this rank has it."""
        if point in self.sites:
            edits = self.sites[point].edits
            # In place, as hooks hold this list
            edits[:] = [edit for edit in edits if edit[0] not in names]

    @contextmanager
    def editing(self, names: Iterable[str]) -> Iterator[None]:
        """A context in which edits are on, by the names of their tables, and no others. With any, all runs eagerly."""
        before, self.current.edits = self.current.edits, frozenset(names)
        # Edits are Python of anybody, and may come and go: each set of them would be another graph, if it is one at all
        stance = eagerly() if self.current.edits else nullcontext()
        try:
            with stance:
                yield
        finally:
            self.current.edits = before

    def _where(self, site: Site, x: Tensor, batch: Batch) -> Where:
        # A tensor that has all positions was not divided by sequence parallel.
        rest = site.axes == "rest" and x.shape[1] < batch["input_ids"].shape[1]
        first = self._sharer[0] * x.shape[1] if rest else 0
        return Where(
            site.name,
            site.axes,
            layer_of(site.name),
            self._split(site.axes, x.shape[2:]),
            batch,
            first,
            self.current.outputs,
            self.current.decoding,
        )

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin(self, step: int, rows: Sequence[int] | None = None, total: int | None = None) -> None:
        """Record the passes from now on.

        Args:
            step: its number, from 1. Which positions are sampled depends on it.
            rows: numbers of the sequences that this rank is about to see, in order; the numbers of all ranks are 0 to
                `total` - 1. By default, the sequences of a training step.
            total: sequences of all ranks.
        """
        self._stop()
        self._rows = self._own_rows if rows is None else rows
        self._total = self._all_rows if total is None else total
        self._step = step

    def end(self) -> Sample:
        """Stop recording. Returns the samples of the passes. Collective."""
        values = {}
        for name in self._own_points():
            kept = self.sites[name.removesuffix(GRADIENT)].kept[name.endswith(GRADIENT)]
            if kept:
                # In the order of rows, whatever order a pipeline ran its micro-batches in
                values[name] = torch.cat([kept[first] for first in sorted(kept)])
                if self._is_partial(name):
                    # All ranks of the group hold the point, in the same order of names, so none waits alone.
                    dist.all_reduce(values[name], group=self._sharers)
        drawn = [self._drawn[first] for first in sorted(self._drawn)]
        parts = self._exchanged({name: self._part(name, value) for name, value in values.items()})
        # Before `_stop`, which clears the sites and the step
        capture = Capture(self._step, drawn, values, parts, self._total, self.context.device)
        self._stop()
        present = [name for name in self.names if name in parts]
        self._warn_of(set(self.names) - set(present), capture.step)
        return Sample(capture, present)

    def _warn_of(self, absent: set[str], step: int) -> None:
        """Say once which points had no value, on one rank."""
        new = sorted(absent - self._absent)
        self._absent |= absent
        if new and global_rank() == 0:
            what = f"{', '.join(new[:4])}{f' and {len(new) - 4} more' if len(new) > 4 else ''}"
            why = "their modules were not called, or nothing before them trains, so that they have no gradient"
            warnings.warn(f"taps: step {step} has no values of {what}: {why}", stacklevel=2)

    def _is_partial(self, name: str) -> bool:
        """Whether each rank that shares features has a part of a sum."""
        # A router computes the same on every rank, and each rank's experts contribute to its gradient; what they make
        # of a token is a part of a sum, whose gradient all have.
        axes = self.sites[name.removesuffix(GRADIENT)].axes
        return self._sharers is not None and axes == ("whole" if name.endswith(GRADIENT) else "partial")

    def _exchanged(self, own: dict[str, Part]) -> dict[str, list[Part]]:
        """Returns the parts of all ranks, by point."""
        # Once, and again when they change on some rank: a large model has thousands of points.
        before, every = self._parts
        if any_rank([own != before])[0]:
            every = {}
            for parts in gather_objects(own):
                for name, part in parts.items():
                    every.setdefault(name, []).append(part)
        self._parts = own, every
        return every

    def _part(self, name: str, values: Tensor) -> Part:
        axes = self.sites[name.removesuffix(GRADIENT)].axes
        split = self._split(axes, values.shape[2:])
        at_rest = self._division.at_rest and axes == "rest"
        # Of ranks that share features one counts, except where each has a part of the features or of the positions
        counted = self._first and (self._sharer[0] == 0 or split is not None or at_rest)
        return Part(global_rank(), tuple(values.shape[2:]), values.dtype, split, counted, at_rest)

    def _split(self, axes: str, shape: Sequence[int]) -> Split | None:
        """Returns the part of the first dimension of `shape`, behind positions, that this rank has."""
        rank, ranks = self._sharer
        # The pattern has heads behind positions, as queries have.
        if ranks == 1 or ("heads" if axes == "pattern" else axes) not in FEATURES & self._division.axes:
            return None
        return Split(rank * shape[0], shape[0], ranks * shape[0])

    # --- a micro-batch -----------------------------------------------------------------------------------------------

    def mark(self, batch: Batch) -> Batch:
        """Returns this rank's part of a micro-batch with its sampled positions, if a step is recorded.

        Raises:
            ForgeError: there are more sequences than `begin` was called with.
        """
        if not self._step:
            return batch
        count, length = batch["input_ids"].shape
        first = self._seen % max(len(self._rows), 1)  # a plugin may compute the same micro-batches twice
        self._seen += count
        if first + count > len(self._rows):
            raise ForgeError(f"taps: step {self._step} has more sequences than the {len(self._rows)} of this rank")
        rows, whole = self._numbers(batch, first), length * self._pieces
        wanted = [self._earlier_rows + int(row) for row in rows]
        seed = self.context.job.job.seed
        positions = chosen_positions(seed, self._step, wanted, whole, min(self.positions, whole))
        inside = self._local_places(batch, length)[positions]
        rest = self._at_rest(inside, length)
        marks = {INSIDE: self._to_device(inside)}
        marks[REST] = self._to_device(rest) if self._division.at_rest else marks[INSIDE]
        marks[WHOLE] = self._to_device(positions) if self.position_group else marks[INSIDE]
        if self.position_group and any(site.axes == "pattern" for site in self.sites.values()):
            marks[ORDER] = self._to_device(self._order(batch, length)).expand(count, -1)
        columns, copied = self._columns(batch, marks[INSIDE])
        self._drawn[first] = Drawn(rows, positions, inside, rest, columns, copied)
        self._pass += 1
        return {**batch, **marks, ROWS: torch.arange(first, first + count) + self._pass * PASSES}

    def _numbers(self, batch: Batch, first: int) -> np.ndarray:
        """Numbers of a micro-batch's rows among this run's rows of the global batch."""
        if "slots" in batch and self._rows is self._own_rows:  # rows were divided by cost; the batch has the numbers
            return batch["slots"].cpu().numpy() - self._earlier_rows
        return np.array(self._rows[first : first + len(batch["input_ids"])], dtype=np.int64)

    def _local_places(self, batch: Batch, length: int) -> np.ndarray:
        """Where each position of a sequence is in this rank's part of it: (S,); -1: not there."""
        if length not in self._places:
            places = np.arange(length)
            if "places" in batch:  # the same in all rows and steps, so the host waits for it once
                places = batch["places"][0].cpu().numpy()
            elif self._pieces > 1:
                message = f"parallel.taps: ranks of {self._division.positions} divide positions, and no stage's `split`"
                raise ForgeError(f"{message} adds the entry `places` (B, s), which lists the positions that a rank has")
            self._places[length] = np.full(length * self._pieces, -1)
            self._places[length][places] = np.arange(length)
        return self._places[length]

    def _order(self, batch: Batch, length: int) -> np.ndarray:
        """Index of each position of a sequence in the concatenation of all ranks' positions: (S,). Collective."""
        if length not in self._orders:  # once, as the places themselves
            places = np.concatenate(gather_objects(batch["places"][0].cpu().numpy(), self.position_group))
            self._orders[length] = np.argsort(places)
        return self._orders[length]

    def _at_rest(self, inside: np.ndarray, length: int) -> np.ndarray:
        if not self._division.at_rest:
            return inside
        rank, ranks = self._sharer
        part = length // ranks
        return np.where((inside >= 0) & (inside // part == rank), inside - rank * part, -1)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.context.device, non_blocking=True)

    def _columns(self, batch: Batch, inside: Tensor) -> tuple[Mapping[str, Tensor], Any]:
        """Copies the facts about the sampled tokens to the host, without a wait: (B, n) each."""
        # Places of other ranks are -1; what is read for them is dropped
        at = inside.clamp(min=0)
        entries = {"id": "input_ids", "label": "labels", "document": "document_ids"}
        columns = {name: batch[entry].gather(1, at) for name, entry in entries.items() if entry in batch}
        for name, entry in (("source", "sources"), ("sequence", "numbers")):
            if entry in batch:
                columns[name] = batch[entry].unsqueeze(1).expand_as(at)
        copies = {name: column.to("cpu", non_blocking=True) for name, column in columns.items()}
        copied = torch.get_device_module(self.context.device).Event()
        # On the stream of the copies, so that only they are waited for
        copied.record()
        return copies, copied
