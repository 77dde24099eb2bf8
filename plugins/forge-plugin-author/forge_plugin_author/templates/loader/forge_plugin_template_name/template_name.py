"""The loader template_name."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core import LoaderComponent, Problem

if TYPE_CHECKING:
    from forge_core import Job
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import LoadedRows, SampleReader, SampleRow
    from forge_core.contracts.layout import Layout


@frozen(kw_only=True)
class TemplateName(LoaderComponent):
    """Reads ahead in one thread."""

    ahead: int = field(default=4, validator=ge(1))
    """Number of units of rows to read ahead."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if job.data.workers:
            yield Problem("type", f"reads in one thread, but data.workers = {job.data.workers}; set data.workers = 0")

    def build(
        self, context: BuildContext, reader: SampleReader, units: Iterator[Sequence[SampleRow]], units_per_step: int
    ) -> Generator[LoadedRows]:
        return _read_ahead(reader, units, self.ahead, pin=context.device.type != "cpu")


def _read_ahead(
    reader: SampleReader, units: Iterator[Sequence[SampleRow]], ahead: int, pin: bool
) -> Generator[LoadedRows]:
    under_way: deque[Future[LoadedRows]] = deque()
    with ThreadPoolExecutor(1) as thread:
        for rows in units:
            under_way.append(thread.submit(reader.read, rows))
            if len(under_way) > ahead:
                yield _pinned(under_way.popleft().result(), pin)
        yield from (_pinned(future.result(), pin) for future in under_way)


def _pinned(rows: LoadedRows, pin: bool) -> LoadedRows:
    if not pin:
        return rows
    return rows._replace(batch={name: tensor.pin_memory() for name, tensor in rows.batch.items()})
