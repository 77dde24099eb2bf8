"""Measures the table: each recipe on each architecture, in processes that have the device in name."""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

from gpu.kernels import named_cuda, watched_kernels
from gpu.kernels.table import Kernel, Row, Table


def measure(recipes: Sequence[str], archs: Sequence[str], cache: Path) -> Table:
    """Lower and compile blocks; by default all, for all architectures.

    Args:
        recipes: names of `gpu.kernels.blocks.RECIPES`.
        archs: names of `named_cuda.GPUS`.
        cache: folder for the compiled device.
    """
    rows: list[Row] = []
    eager: dict[str, dict[str, int]] = {}
    tasks = [(recipe, arch) for arch in archs or named_cuda.GPUS for recipe in recipes or watched_kernels.RECIPES]
    # Fresh processes, in which the device is registered before torch is imported
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, initializer=named_cuda.register, initargs=(cache,)) as pool:
        for future in [pool.submit(rows_of, *task) for task in tasks]:
            more, operations = future.result()
            rows += more
            eager |= operations
    versions = [metadata.version(each).partition("+")[0] for each in ("torch", "triton")]
    return Table(*versions, rows, eager)


def rows_of(recipe: str, arch: str) -> tuple[list[Row], dict[str, dict[str, int]]]:
    """Returns the graphs of a recipe on an architecture, and its uncompiled operations; in its own process."""
    from gpu.kernels.blocks import RECIPES, play
    from gpu.kernels.machine_code import bytes_of, compile_kernel

    warnings.simplefilter("ignore")
    with named_cuda.as_gpu(arch):
        played = play(RECIPES[recipe])
    rows = []
    for number, graph in enumerate(played.lowering.graphs):
        launches, kernels = Counter(graph.launches), []
        for name, source in graph.triton.items():
            code = compile_kernel(source, arch)
            figures = (code.registers, code.spills, code.shared, bytes_of(source))
            kernels.append(Kernel(name, launches[name], *figures))
        breaks = {} if number else dict(played.breaks)
        external, flops, size = dict(Counter(graph.external)), graph.products, graph.external_bytes
        rows.append(Row(recipe, graph.block, graph.backward, arch, breaks, external, flops, size, kernels))
    if not rows and played.breaks:
        rows.append(Row(recipe, "no graph", False, arch, dict(played.breaks), {}, 0.0, 0, []))
    return rows, {f"{recipe} {what}": dict(sorted(counts.items())) for what, counts in played.eager.items()}
