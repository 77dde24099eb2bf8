"""The table of kernels: its schema, its file, and what makes one worse than another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import asdict, evolve, frozen

FILE = Path(__file__).with_name("table.json")


@frozen
class Kernel:
    """A Triton kernel of a graph."""

    name: str
    launches: int
    registers: int
    """Of each thread."""
    spills: int
    """Bytes of local memory of each thread."""
    shared: int
    """Bytes of shared memory of each block."""
    bytes: int
    """Bytes that it reads and writes, by Inductor's estimate."""


@frozen
class Row:
    """A graph of a block on an architecture: its forward or its backward pass."""

    recipe: str
    block: str
    backward: bool
    arch: str
    breaks: Mapping[str, int]
    """Graph breaks of the recipe, by reason; with the first graph."""
    external: Mapping[str, int]
    """Calls of kernels that Inductor does not generate, such as matrix products."""
    flops: float
    """Of the external kernels."""
    external_bytes: int
    """Bytes that external kernels read and write at least."""
    kernels: Sequence[Kernel]

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"{self.recipe}, {self.block} {'backward' if self.backward else 'forward'}, {self.arch}"

    @property
    def launches(self) -> int:
        """Kernels that a pass launches, external ones included."""
        return sum(kernel.launches for kernel in self.kernels) + sum(self.external.values())

    @property
    def figures(self) -> str:
        """Its size, for people."""
        size = self.external_bytes + sum(kernel.launches * kernel.bytes for kernel in self.kernels)
        return f"{self.launches} launches of {size / 1e6:,.1f} MB"


@frozen
class Table:
    """Kernels of all blocks, and operations that run uncompiled."""

    torch: str
    triton: str
    rows: Sequence[Row]
    eager: Mapping[str, Mapping[str, int]]
    """Operations of a recipe's loss or optimizer that launch a kernel each, by `RECIPE loss` and `RECIPE optimizer`."""

    def only(self, recipes: Collection[str], archs: Collection[str]) -> Table:
        """Returns the part of some recipes and architectures; of all, where none are given."""
        rows = [
            row for row in self.rows if row.recipe in (recipes or [row.recipe]) and row.arch in (archs or [row.arch])
        ]
        eager = {name: each for name, each in self.eager.items() if name.split()[0] in (recipes or [name.split()[0]])}
        return evolve(self, rows=rows, eager=eager)

    def dump(self, path: Path = FILE) -> None:
        """Write it, with a line for each kernel."""
        facts = asdict(self)
        rows = facts.pop("rows")
        lines = [json.dumps(facts, sort_keys=True)[:-1] + ', "rows": [']
        for row in rows:
            kernels = row.pop("kernels")
            lines.append(json.dumps(row)[:-1] + ', "kernels": [')
            lines += [f"  {json.dumps(kernel)}," for kernel in kernels]
            lines[-1] = lines[-1].removesuffix(",") + "]},"
        lines[-1] = lines[-1].removesuffix(",") + "]}"
        path.write_text("\n".join(lines) + "\n")

    @classmethod
    def load(cls, path: Path = FILE) -> Table:
        """Returns the recorded one."""
        facts = json.loads(path.read_text())
        rows = [Row(**{**row, "kernels": [Kernel(**kernel) for kernel in row["kernels"]]}) for row in facts.pop("rows")]
        return cls(**facts, rows=rows)


def compare(before: Table, after: Table) -> tuple[list[str], list[str]]:
    """Returns what is worse than before, and what else has changed, a line for each."""
    worse, changed = [], []
    old, new = _by_title(before.rows), _by_title(after.rows)
    for title, row in new.items():
        if title not in old:
            worse.append(f"{title}: was not there, {row.launches} launches")
            worse += [f"{title}: 0 -> {times} graph breaks: {reason}" for reason, times in row.breaks.items()]
            continue
        found = [*_worse(old[title], row)]
        worse += [f"{title}: {line}" for line in found]
        if not found and row != old[title]:
            changed.append(f"{title}: {old[title].figures} -> {row.figures}")
    changed += [f"{title}: is gone" for title in old if title not in new]
    for name, operations in after.eager.items():
        counts = Counter(before.eager.get(name, {}))
        if sum(operations.values()) > sum(counts.values()):
            worse.append(
                f"{name}: {sum(counts.values())} -> {sum(operations.values())} operations: {_more(counts, operations)}"
            )
        elif operations != counts:
            changed.append(f"{name}: other operations")
    return worse, changed


def _by_title(rows: Iterable[Row]) -> dict[str, Row]:
    titles: Counter[str] = Counter()
    named = {}
    for row in rows:
        titles[row.title] += 1
        # A graph break makes several graphs of one block
        number = f", graph {titles[row.title]}" if titles[row.title] > 1 else ""
        named[row.title + number] = row
    return named


def _worse(before: Row, after: Row) -> Iterator[str]:
    for reason, times in after.breaks.items():
        if times > before.breaks.get(reason, 0):
            yield f"{before.breaks.get(reason, 0)} -> {times} graph breaks: {reason}"
    if after.launches > before.launches:
        yield f"{before.launches} -> {after.launches} launches: {_more(_launched(before), _launched(after))}"
    spilled = {kernel.name: kernel.spills for kernel in before.kernels}
    if sum(kernel.spills for kernel in after.kernels) > sum(spilled.values()):
        for kernel in after.kernels:
            if kernel.spills > spilled.get(kernel.name, 0):
                yield f"{kernel.name} spills {spilled.get(kernel.name, 0)} -> {kernel.spills} bytes a thread"


def _launched(row: Row) -> Counter[str]:
    # Numbers at the ends of names are those of the order, which one more kernel shifts
    launched = Counter(row.external)
    for kernel in row.kernels:
        launched[kernel.name.rstrip("0123456789").rstrip("_")] += kernel.launches
    return launched


def _more(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    more = Counter(after)
    more.subtract(before)
    return ", ".join(f"{name} {before.get(name, 0)} -> {after[name]}" for name, times in more.items() if times > 0)
