"""Kernels of compiled blocks on GPUs that are not there, beside the table of them that the repository keeps.

    export PYTHONPATH=tests
    python -m gpu.kernels               # compiles all again: 1 if a kernel, a graph break or a spill was added
    python -m gpu.kernels --record      # writes the table of what is here
    python -m gpu.kernels --unchanged   # 0 if all that it depends on is as when it was recorded; takes no time
    python -m gpu.kernels --bounds      # from the recorded table: times at least on GPUs; needs no Triton
    python -m gpu.kernels --recipe dense --arch sm_90          # only these; with --show, kernel by kernel

Needs the package `triton` (see `make kernels`), a C++ compiler, and a torch without CUDA. Every block is built as the
recipe's job builds it and compiled by Forge's stage `compile`: Inductor generates code for sm_80, sm_90 and sm_100 from
tensors without content, and ptxas, which is part of Triton, compiles it. Nothing is run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests")]

from gpu.kernels import named_cuda, watched_kernels  # noqa: E402
from gpu.kernels.measure import measure  # noqa: E402
from gpu.kernels.table import FILE, Table, compare  # noqa: E402

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "forge-kernels"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _options(arguments)
    if options.unchanged:
        reason = watched_kernels.reason_to_run()
        print(f"kernels: {reason}" if reason else "kernels: unchanged since they were recorded")
        return int(bool(reason))
    if options.bounds:
        from gpu.kernels.time_bounds import lines

        print("\n".join(lines(Table.load())))
        return 0
    if (problem := watched_kernels.cannot_run()) is not None:
        print(f"kernels: {problem}")
        return 2
    start = time.monotonic()
    table = measure(options.recipe, options.arch, CACHE)
    print(f"kernels: {len(table.rows)} graphs compiled in {time.monotonic() - start:.0f} s")
    if options.show:
        _print(table)
    if options.record:
        table.dump()
        watched_kernels.record()
        return 0
    return _check(table, options)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu.kernels", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the table")
    parser.add_argument("--unchanged", action="store_true", help="look whether sources and versions have changed")
    parser.add_argument("--bounds", action="store_true", help="print bounds on time by the table, beside the plan's")
    parser.add_argument(
        "--recipe", action="append", default=[], choices=watched_kernels.RECIPES, help="only this one; may be repeated"
    )
    parser.add_argument("--arch", action="append", default=[], choices=tuple(named_cuda.GPUS), help="only this one")
    parser.add_argument("--show", action="store_true", help="print every kernel")
    options = parser.parse_args(arguments)
    if options.record and (options.recipe or options.arch):
        parser.error("--record writes the whole table; leave out --recipe and --arch")
    return options


def _print(table: Table) -> None:
    for row in table.rows:
        print(f"{row.title}: {row.launches} launches, {row.breaks or 'no graph breaks'}, external {dict(row.external)}")
        for k in row.kernels:
            figures = f"{k.launches:>3} x {k.registers:>4} registers {k.spills:>5} B spilled {k.shared:>7} B shared"
            print(f"  {figures} {k.bytes / 1e6:>10,.1f} MB  {k.name}")
    for name, counts in table.eager.items():
        print(f"{name}: {sum(counts.values())} operations")


def _check(table: Table, options: argparse.Namespace) -> int:
    before = Table.load().only(options.recipe, options.arch)
    if (before.torch, before.triton) != (table.torch, table.triton):
        print(f"kernels: recorded with torch {before.torch} and triton {before.triton}; others are not comparable")
        return 0
    worse, changed = compare(before, table)
    print("".join(f"WORSE    {line}\n" for line in worse) + "".join(f"changed  {line}\n" for line in changed), end="")
    if worse:
        print("If this is meant, record it with --record, and say why in the commit.")
    elif changed:
        print(f"Nothing is worse; --record writes it into {FILE.relative_to(ROOT)}.")
    return int(bool(worse))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
