"""Records one step: which positions are sampled, and what the sites have kept of them.

Shapes: B sequences of a micro-batch, S positions, n sampled ones of each, R sequences of this rank in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import gather_objects, global_rank, sample_rank
from forge_plugin_taps.kinds import GRADIENT, PointInfo, TapsInfo
from forge_plugin_taps.samples import TOKENS, LocalPart, Part, Sample
from forge_plugin_taps.sampling import chosen_positions
from forge_plugin_taps.selection import in_order, layer_of, matching
from forge_plugin_taps.site import ENTRIES, Current, Site
from forge_plugin_taps.where import Split, Where

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model
    from forge_plugin_taps.kinds import EditComponent
    from forge_plugin_taps.taps import Taps

ATTRIBUTE = "taps_recorder"


def recorder_of(model: Model) -> Recorder:
    """Returns what records the activations of a model.

    Raises:
        ForgeError: the job of the model has no stage `taps`.
    """
    recorder = getattr(model, ATTRIBUTE, None)
    if recorder is None:
        raise ForgeError("the model has no taps: the job needs a table [parallel.taps]")
    found: Recorder = recorder
    return found


class Capture:
    """This rank's captured values of a step, and what is known of those of other ranks."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self.device = recorder, recorder.context.device
        self._rest = recorder.divides_positions
        self._parts: dict[str, list[Part]] = {}
        self._indices: list[Mapping[bool, Tensor]] = []

    def agree(self) -> None:
        """Exchange which samples and which parts of points each rank has. Collective."""
        own = self._recorder.indices()
        self._indices = gather_objects(own)
        every = gather_objects(self._own_parts())
        for parts in every:
            for name, part in parts.items():
                if part.counted:
                    self._parts.setdefault(name, []).append(part)

    def _own_parts(self) -> dict[str, Part]:
        parts = {}
        for name in self._recorder.own_names():
            values = self._recorder.values(name)
            if values is not None:
                split, counted = self._recorder.division(name, values)
                parts[name] = Part(global_rank(), tuple(values.shape[2:]), values.dtype, split, counted)
        return parts

    def parts(self, name: str) -> Sequence[Part]:
        """Returns the parts that make up a point's tensor.

        Raises:
            ForgeError: no rank has any.
        """
        if name not in self._parts:
            raise ForgeError(f"taps: nothing passed {name} in this step, on any rank")
        return self._parts[name]

    def index(self, name: str, rank: int) -> Tensor:
        """Returns the numbers of the samples that a rank has at a point: (m,)."""
        return self._indices[rank][self._recorder.is_at_rest(name)]

    def local(self, name: str) -> LocalPart | None:
        values = self._recorder.values(name) if name in self._recorder.own_names() else None
        if values is None:
            return None
        split, counted = self._recorder.division(name, values)
        index = self.index(name, global_rank())
        flat = values.flatten(0, 1)
        kept = self._recorder.kept_rows(self._recorder.is_at_rest(name))
        if len(kept) < len(flat):
            flat = flat.index_select(0, kept.to(flat.device, non_blocking=True))
        return LocalPart(flat, index, split, counted)


class Recorder:
    """The sites of a model on this rank, and the step that they record."""

    def __init__(self, component: Taps, context: BuildContext) -> None:
        job, layout, mesh = context.job, context.layout, context.mesh
        self.component, self.context = component, context
        self.current = Current(context.auxiliary)
        self.sites: dict[str, Site] = {}
        """Of this rank, by point."""
        self.names: list[str] = []
        """Captured points of all ranks, with gradients; known once `agree` was called."""
        self._count, self._size = micro_batches(job, layout)
        share = self._count * self._size
        self._rows = share * layout.data_parallel
        self._first = sample_rank(mesh, layout) * share
        self._before = layout.run[0] * self._rows
        """Rows of the global batch that other runs of the model have before those of this run."""
        self.tp = (mesh.get_local_rank("tp"), layout.tp) if mesh is not None and layout.tp > 1 else (0, 1)
        stages = job.parallel.values()
        self.divides_positions = layout.tp > 1 and any(getattr(s, "sequence_parallel", False) for s in stages)
        self._length = job.train.seq_len
        asked = component.positions
        self.positions = self._length if asked == "all" else min(int(asked), self._length)
        self._local: dict[int, np.ndarray] = {}
        self._step: int | None = None
        self._drawn: dict[int, dict[str, Any]] = {}
        self._seen = 0

    def agree(self) -> TapsInfo:
        """Returns what is captured, by all ranks together. Collective."""
        known = gather_objects(dict(self._own_points()))
        points = {name: axes for part in known for name, axes in part.items()}
        self.names = in_order(points)
        infos = {name: PointInfo(points[name], layer_of(name)) for name in self.names}
        return TapsInfo(
            points=infos,
            interval=self.component.interval,
            rows=self._rows,
            positions=self.positions,
            length=self._length,
        )

    def _own_points(self) -> Iterator[tuple[str, str]]:
        for site in self.sites.values():
            if site.values:
                yield site.name, site.axes
            if site.gradient:
                yield site.name + GRADIENT, site.axes

    # --- edits -------------------------------------------------------------------------------------------------------

    def add_edit(self, name: str, component: EditComponent, info: TapsInfo) -> None:
        """Build an edit, to be switched on by `editing`, at the points of this rank that it names."""
        edit = self.context.build(component, taps=info)
        for point in matching([component.point], list(self.sites)):
            self.sites[point].edits.append((name, edit, partial(self._where, self.sites[point])))

    @contextmanager
    def editing(self, names: Iterable[str]) -> Iterator[None]:
        """A context in which edits are on, by the names of their tables, and no others."""
        before, self.current.edits = self.current.edits, frozenset(names)
        try:
            yield
        finally:
            self.current.edits = before

    def _where(self, site: Site, x: Tensor, batch: Batch) -> Where:
        rank, ranks = self.tp
        split, first = None, 0
        if ranks > 1 and site.axes in ("heads", "hidden"):
            split = Split(rank * x.shape[2], x.shape[2], ranks * x.shape[2])
        if site.axes == "rest" and x.shape[1] < batch["input_ids"].shape[1]:  # sequence parallel
            first = rank * x.shape[1]
        return Where(site.name, site.axes, layer_of(site.name), split, batch, first)

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Record the forward and backward passes from now on: those of step `step`, from 1."""
        self.clear()
        self._step = step

    def end(self) -> Sample:
        """Stop recording. Returns the samples of the step. Collective."""
        assert self._step is not None
        capture = Capture(self)
        capture.agree()
        step, self._step = self._step, None
        return Sample(capture, step, self.names, self._tokens())

    def clear(self) -> None:
        """Stop recording, and free what was kept."""
        self._step, self._seen, self._drawn = None, 0, {}
        for site in self.sites.values():
            site.clear()

    def mark(self, batch: Batch) -> Batch:
        """Returns this rank's part of a micro-batch with its sampled positions, if a step is recorded."""
        if self._step is None:
            return batch
        rows, length = batch["input_ids"].shape
        first = self._seen % (self._count * self._size)  # the same micro-batches may run twice
        self._seen += rows
        numbers = self._row_numbers(batch, first)
        positions = chosen_positions(
            self.context.job.job.seed,
            self._step,
            (numbers + self._before).tolist(),
            self._whole(length),
            self.positions,
        )
        inside = self._inside(batch, length)[positions]
        rest = self._at_rest(inside, length)
        device = batch["input_ids"].device
        marked = {
            name: torch.from_numpy(array).to(device, non_blocking=True)
            for name, array in zip(ENTRIES[1:], (inside, rest), strict=True)
        }
        self._drawn[first] = {"numbers": numbers, "positions": positions, "inside": inside, "rest": rest}
        self._drawn[first] |= self._token_columns(batch, marked[ENTRIES[1]])
        return {**batch, **marked, ENTRIES[0]: torch.arange(first, first + rows)}

    def _row_numbers(self, batch: Batch, first: int) -> np.ndarray:
        """Numbers of a micro-batch's rows in the global batch, among those of this run."""
        if "slots" in batch:  # rows were shared out by cost
            return batch["slots"].cpu().numpy() - self._before
        return self._first + first + np.arange(len(batch["input_ids"]))

    def _whole(self, length: int) -> int:
        return length * self.context.layout.cp

    def _inside(self, batch: Batch, length: int) -> np.ndarray:
        """Where each position of a sequence is in this rank's part of it: (S,); -1: not there."""
        if length not in self._local:
            places = np.arange(length)
            if "places" in batch:  # context parallel; the same for all rows and steps, so read once
                places = batch["places"][0].cpu().numpy()
            self._local[length] = np.full(self._whole(length), -1)
            self._local[length][places] = np.arange(length)
        return self._local[length]

    def _at_rest(self, inside: np.ndarray, length: int) -> np.ndarray:
        if not self.divides_positions:
            return inside
        rank, ranks = self.tp
        part = length // ranks
        return np.where(inside // part == rank, inside - rank * part, -1)

    def _token_columns(self, batch: Batch, inside: Tensor) -> dict[str, Tensor]:
        """Ids and labels of the sampled positions (B, n), and what is known of their rows; copied without a wait."""
        at, rows = inside.clamp(min=0), len(inside)
        columns = {"id": batch["input_ids"].gather(1, at), "label": batch["labels"].gather(1, at)}
        if "document_ids" in batch:
            columns["document"] = batch["document_ids"].gather(1, at)
        for name, entry in (("source", "sources"), ("sequence", "numbers")):
            if entry in batch:
                columns[name] = batch[entry].view(rows, 1).expand(-1, inside.shape[1])
        return {name: column.to("cpu", non_blocking=True) for name, column in columns.items()}

    # --- what was recorded -------------------------------------------------------------------------------------------

    def own_names(self) -> list[str]:
        """Returns the points that this rank captures."""
        return [name for name, _ in self._own_points()]

    def site(self, name: str) -> Site:
        return self.sites[name.removesuffix(GRADIENT)]

    def is_at_rest(self, name: str) -> bool:
        """Whether sequence parallel divides the positions of a point."""
        return self.divides_positions and (
            name.removesuffix(GRADIENT) not in self.sites or self.site(name).axes == "rest"
        )

    def values(self, name: str) -> Tensor | None:
        """Returns what this rank has kept of a point: (R, n, …), with anything where another rank has the position."""
        kept = self.site(name).kept[name.endswith(GRADIENT)]
        return torch.cat([kept[first] for first in sorted(kept)]) if kept else None

    def division(self, name: str, values: Tensor) -> tuple[Split | None, bool]:
        """Returns the part of the heads or features that this rank has, and whether a sum over ranks shall take it."""
        rank, ranks = self.tp
        if ranks > 1 and self.site(name).axes in ("heads", "hidden", "pattern"):
            length = values.shape[2]
            return Split(rank * length, length, ranks * length), True
        return None, rank == 0 or self.is_at_rest(name)

    def indices(self) -> dict[bool, Tensor]:
        """Returns the numbers of the samples that this rank has, inside of blocks and between them."""
        numbers = self._numbers()
        return {rest: numbers[self.kept_rows(rest)] for rest in {False, self.divides_positions}}

    def kept_rows(self, rest: bool) -> Tensor:
        """Returns which of the R n recorded samples this rank has: (m,)."""
        drawn = [self._drawn[first]["rest" if rest else "inside"] for first in sorted(self._drawn)]
        return torch.from_numpy(np.flatnonzero(np.concatenate(drawn) >= 0))

    def _numbers(self) -> Tensor:
        numbers = np.concatenate([self._drawn[first]["numbers"] for first in sorted(self._drawn)])
        return torch.from_numpy((numbers[:, None] * self.positions + np.arange(self.positions)).reshape(-1))

    def _tokens(self) -> dict[str, Tensor]:
        """Returns the columns of `TOKENS` for all samples. Collective."""
        numbers, kept, drawn = (
            self._numbers(),
            self.kept_rows(False),
            [self._drawn[first] for first in sorted(self._drawn)],
        )
        if self.context.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        own: dict[str, Tensor] = {"index": numbers[kept]}
        own["position"] = torch.from_numpy(np.concatenate([part["positions"] for part in drawn])).reshape(-1)[kept]
        for name in ("id", "label", "document", "source", "sequence"):
            if name in drawn[0]:
                own[name] = torch.cat([part[name] for part in drawn]).reshape(-1)[kept]
        total = self._rows * self.positions
        tokens = {name: torch.zeros(total, dtype=torch.int64) for name in TOKENS}
        tokens["step"].fill_(self._step or 0)
        for part in gather_objects(own):
            for name, column in part.items():
                if name != "index":
                    tokens[name][part["index"]] = column
        tokens["row"] = torch.arange(total) // self.positions + self._before
        return tokens
