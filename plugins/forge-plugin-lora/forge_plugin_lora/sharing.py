"""How ranks share adapters: the tensor-parallel ways of A and B beside those of the matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from forge_plugin_lora.low_rank import MAGNITUDE, A, B
from forge_plugin_lora.nf4_matrix import ROWS

WAYS: Mapping[str, tuple[str, str, str]] = {
    "column": ("replicate", "column", "column"),
    "column_stack": ("replicate", "column_stack", ""),
    "row": ("partial_row", "partial", "partial"),
    "partial_row": ("partial_row", "partial", "partial"),
    "sequence": ("sequence", "sequence", "sequence"),
    "replicate": ("replicate", "replicate", "replicate"),
    "partial": ("partial", "partial", "partial"),
}
"""By the way of a matrix, those of A, B and the magnitudes; see `forge_plugin_parallel.tp_ways.WAYS`.

Beside rows of outputs, A is whole and B has the rows. Beside columns of inputs, A has the columns, and B A x of each
rank is a part of the sum over ranks that the matrix makes."""

ROWS_WAYS: Mapping[str, str] = {
    "column": "column",
    "column_stack": "column_stack",
    "row": "partial",
    "partial_row": "partial",
    "sequence": "sequence",
    "replicate": "replicate",
    "partial": "partial",
}
"""By the way of a matrix in NF4, the way of its rows' bytes: split where the matrix has rows on each rank."""
BY_COLUMNS = ("row", "partial_row")
"""Ways of matrices of which each rank has columns."""


def way_of(ways: Mapping[str, Any], name: str) -> str:
    """Returns the name of the way that a plan has for a module; empty without one."""
    way = next((way for pattern, way in ways.items() if fnmatchcase(name, pattern)), None)
    return getattr(way, "name", way) or ""


def with_adapters(
    plan: Callable[[], Mapping[str, Any]], adapted: Iterable[str], stored: Iterable[str] = ()
) -> Callable[[], Mapping[str, Any]]:
    """Returns a `tensor_parallel_plan` that also has the adapters of modules, and the bytes of rows of `stored` ones.

    Those beside a way that is not in `WAYS` are left out of it, which the stage `tp` refuses by name.
    """
    names, in_nf4 = list(adapted), list(stored)

    def extended() -> Mapping[str, Any]:
        ways = plan()
        own: dict[str, Any] = {}
        for name in names:
            if of_parts := WAYS.get(way_of(ways, name)):
                own |= {f"{name}.{part}": of_part for part, of_part in zip((A, B, MAGNITUDE), of_parts, strict=True)}
        for name in in_nf4:
            if of_rows := ROWS_WAYS.get(way_of(ways, name)):
                own[f"{name}.{ROWS}"] = of_rows
        # In front: the first pattern that fits a name counts
        return {**own, **ways}

    return extended
