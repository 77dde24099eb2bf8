"""Draws the imports between the packages of forge_core, floor by floor.

Run `python tools/picture.py`. An arrow leads from a package (a room) to one that it imports;
thicker with more imports. Imports for type checkers count like all others. An upward arrow is red and dashed. Every
room imports the contracts: those arrows are left out.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import grimp
import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle
from workspace import FLOORS, ROOT

CORE = "forge_core"
GROUND = "contracts"
Box = tuple[float, float, float, float]


def rooms() -> list[list[str]]:
    """Returns the names of rooms, from the highest floor to the lowest."""
    return [[name.removeprefix(f"{CORE}.") for name in floor.split(" | ")] for floor in FLOORS]


def files_of(room: str) -> dict[str, int]:
    """Returns the files of a room with their numbers of non-blank lines, the longest first."""
    place = ROOT / CORE / room
    paths = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    lines = {path.stem: sum(1 for line in path.read_text().splitlines() if line.strip()) for path in paths}
    return dict(sorted(((name, count) for name, count in lines.items() if count > 1), key=lambda item: -item[1]))


def imports() -> Counter[tuple[str, str]]:
    """Counts the files of one room that import from another."""
    graph = grimp.build_graph(CORE)
    known = {room for floor in rooms() for room in floor}
    counts: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            pair = tuple(name.split(".")[1] if "." in name else "" for name in (module, other))
            if pair[0] != pair[1] and known.issuperset(pair):
                counts[pair] += 1  # type: ignore[index]
    return counts


def layout() -> dict[str, Box]:
    """Returns the box of each room: (left, bottom, width, height), wider with more lines."""
    floors = rooms()
    boxes: dict[str, Box] = {}
    widest = max(sum(sum(files_of(room).values()) for room in floor) for floor in floors)
    for number, floor in enumerate(floors):
        widths = [max(1.7, 13.0 * sum(files_of(room).values()) / widest) for room in floor]
        left = (15 - sum(widths) - 0.4 * (len(floor) - 1)) / 2
        for room, width in zip(floor, widths, strict=True):
            boxes[room] = (left, 1.6 * (len(floors) - number), width, 0.9)
            left += width + 0.4
    return boxes


def draw_room(axes: Axes, room: str, box: Box) -> None:
    """Draw a room with its name and its longest files."""
    left, bottom, width, height = box
    files = files_of(room)
    total = sum(files.values())
    axes.add_patch(Rectangle((left, bottom), width, height, facecolor="#eef2f7", edgecolor="#33475b", zorder=3))
    axes.text(left + 0.06, bottom + height - 0.08, f"{room}  {total:,}", va="top", size=9, weight="bold", zorder=5)
    start = left + 0.05
    for name, lines in files.items():
        share = (width - 0.1) * lines / total
        axes.add_patch(Rectangle((start, bottom + 0.06), share, 0.46, facecolor="#cfdcea", edgecolor="white", zorder=4))
        if share > 0.085 * len(name):
            axes.text(start + 0.04, bottom + 0.44, f"{name}\n{lines}", va="top", size=6, zorder=5)
        start += share


def draw_arrow(axes: Axes, boxes: Mapping[str, Box], source: str, target: str, count: int) -> None:
    """Draw the imports of one room from another."""
    a, b = boxes[source], boxes[target]
    up = b[1] > a[1]
    start = (a[0] + a[2] / 2, a[1] + (a[3] if up else 0))
    end = (b[0] + b[2] / 2, b[1] + (0 if up else b[3]))
    style = {"color": "#c0392b", "linestyle": "--", "zorder": 6} if up else {"color": "#8aa0b5", "zorder": 2}
    bend = f"arc3,rad={0.18 if start[0] <= end[0] else -0.18}"
    width = 0.5 + min(count, 30) / 12
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, linewidth=width, connectionstyle=bend, **style)
    )
    if up:
        axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2, str(count), color="#c0392b", size=8, zorder=7)


def main(path: Path) -> None:
    """Write the picture to a PNG file."""
    boxes, counts = layout(), imports()
    figure, axes = plt.subplots(figsize=(15, 1.6 * (len(rooms()) + 1)))
    for room, box in boxes.items():
        draw_room(axes, room, box)
    for (source, target), count in counts.items():
        if target != GROUND:
            draw_arrow(axes, boxes, source, target, count)
    up = {pair for pair in counts if boxes[pair[1]][1] > boxes[pair[0]][1]}
    axes.set_title(
        f"forge_core: {len(boxes)} rooms, {len(counts)} arrows (those to {GROUND} not drawn), {len(up)} upwards",
        loc="left",
    )
    axes.set_xlim(0, 15)
    axes.set_ylim(1.2, 1.6 * len(rooms()) + 1.2)
    axes.axis("off")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    print(f"{path}: arrows upwards: {', '.join(f'{a} -> {b}' for a, b in sorted(up)) or 'none'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, default=ROOT / "docs/images/imports.png", help="PNG to write")
    main(parser.parse_args().path)
