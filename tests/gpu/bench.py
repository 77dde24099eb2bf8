"""What a piece of the GPU benchmarks writes: tables, and checks that hold or fail."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
from attrs import define, field, frozen

Cell = str | float | int | bool | None


@frozen
class Piece:
    """A benchmark of less than ten minutes."""

    name: str
    summary: str
    run: Callable[[Bench], None]
    requires: Sequence[str] = ()
    """Distributions that it imports."""
    checks: bool = True
    """Whether `make gpu` runs its tiny form among the tests too; false: it only measures."""


PIECES: dict[str, Piece] = {}


def piece(
    name: str, summary: str, requires: Sequence[str] = (), checks: bool = True
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Registers the function as the piece `name`."""

    def register(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
        PIECES[name] = Piece(name, summary, run, requires, checks)
        return run

    return register


@define
class Bench:
    """Where a piece runs, and what it has found so far.

    Attributes:
        device: where tensors live.
        tiny: whether sizes are those of a test, which takes seconds on a CPU.
        folder: for runs and their checkpoints; emptied afterwards.
    """

    device: torch.device
    tiny: bool
    folder: Path
    tables: dict[str, list[dict[str, Cell]]] = field(factory=dict)
    failures: list[str] = field(factory=list)
    notes: list[str] = field(factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def size(self, full: int, tiny: int) -> int:
        """A size of the benchmark, or of its tiny form."""
        return tiny if self.tiny else full

    def row(self, table: str, **cells: Cell) -> None:
        """Append a row to a table."""
        self.tables.setdefault(table, []).append(cells)

    def check(self, holds: bool, what: str) -> None:
        """Note as a failure what does not hold."""
        if not holds:
            self.failures.append(what)

    def within(self, table: str, error: float, limit: float, **cells: Cell) -> None:
        """Append a row with an error, which must not exceed its limit."""
        holds = math.isfinite(error) and error <= limit
        self.row(table, **cells, error=error, limit=limit, holds=holds)
        case = ", ".join(f"{name} {value}" for name, value in cells.items())
        self.check(holds, f"{table}: {case}: error {error:.3g} > {limit:.3g}")

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """What is raised within this context is a failure of this case, and others go on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def milliseconds(self, function: Callable[[], object], repeats: int = 10, warm: int = 3) -> float:
        """The median duration of a call: of the device's time by events, of a CPU's on the wall clock."""
        for _ in range(1 if self.tiny else warm):
            function()
        return statistics.median(self._once(function) for _ in range(2 if self.tiny else repeats))

    def _once(self, function: Callable[[], object]) -> float:
        if not self.on_gpu:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def peak_bytes(self) -> int | None:
        """The most memory allocated since `reset_peak`; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.on_gpu else None

    def reset_peak(self) -> None:
        """Start `peak_bytes` again, with what nobody holds returned to the device."""
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference over that of the reference, in float64 on the CPU; NaN stays NaN."""
    value, reference = (tensor.detach().cpu().double() for tensor in (value, reference))
    return float((value - reference).norm() / reference.norm().clamp(min=1e-300))


def missing(names: Sequence[str]) -> list[str]:
    """Those of the distributions that are not installed."""
    return [name for name in names if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    """The seconds since the context began, by the wall clock."""
    start = time.perf_counter()
    yield lambda: time.perf_counter() - start


# --- writing -----------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> Mapping[str, Cell]:
    """What a figure depends on besides the code."""
    facts: dict[str, Cell] = {"torch": torch.__version__, "python": platform.python_version(), "device": str(device)}
    facts["cpus"], facts["load"] = os.cpu_count(), round(os.getloadavg()[0], 2)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "memory_gb": round(properties.total_memory / 1e9, 1)}
        facts |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def write(name: str, bench: Bench, seconds: float, out: Path) -> None:
    """`NAME.json` and `NAME.md` in the folder."""
    out.mkdir(parents=True, exist_ok=True)
    facts = machine(bench.device)
    result = {
        "piece": name,
        "tiny": bench.tiny,
        "seconds": round(seconds, 1),
        "machine": facts,
        "command": " ".join(["python", *sys.argv]),
        "failures": bench.failures,
        "notes": bench.notes,
        "tables": bench.tables,
    }
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{name}.md").write_text("\n".join(_page(name, bench, seconds, facts)) + "\n")


def _page(name: str, bench: Bench, seconds: float, facts: Mapping[str, Cell]) -> Iterator[str]:
    yield f"# {name}{' (tiny form)' if bench.tiny else ''}"
    yield ""
    yield ", ".join(f"{key} {value}" for key, value in facts.items()) + f"; {seconds:.0f} s"
    yield from (f"\n**fails:** {failure}" for failure in bench.failures)
    yield from (f"\n{note}" for note in bench.notes)
    for title, rows in bench.tables.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        yield f"\n## {title}\n"
        yield f"| {' | '.join(columns)} |"
        yield f"|{'---|' * len(columns)}"
        yield from (f"| {' | '.join(_text(row.get(column)) for column in columns)} |" for row in rows)


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "NO"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell
