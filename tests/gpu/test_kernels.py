"""What makes a table of kernels worse than another; the kernels themselves are compiled by `make kernels`."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from gpu.kernels import watched_kernels
from gpu.kernels.table import Kernel, Row, Table, compare

NORM = Kernel("triton_red_fused_mean_0", launches=1, registers=30, spills=0, shared=64, bytes=1000)
SILU = Kernel("triton_poi_fused_mul_silu_1", launches=2, registers=18, spills=0, shared=0, bytes=2000)
ROW = Row("dense", "layers.0", False, "sm_90", {}, {"mm": 7}, 1e12, 10, [NORM, SILU])
TABLE = Table("2.13.0", "3.9.0", [ROW], {"dense loss": {"mm": 3, "sum": 1}})


def worse(**changes: Any) -> list[str]:
    return compare(TABLE, evolve(TABLE, rows=[evolve(ROW, **changes)]))[0]


def test_a_table_is_not_worse_than_itself_and_comes_back_from_its_file(tmp_path) -> None:
    TABLE.dump(tmp_path / "table.json")
    assert compare(TABLE, Table.load(tmp_path / "table.json")) == ([], [])


def test_one_kernel_more_is_named_whatever_the_numbers_at_the_ends_of_names() -> None:
    copy = evolve(SILU, name="triton_poi_fused__to_copy_1", launches=1)
    silu = evolve(SILU, name="triton_poi_fused_mul_silu_2")
    line = "dense, layers.0 forward, sm_90: 10 -> 11 launches: triton_poi_fused__to_copy 0 -> 1"
    assert worse(kernels=[NORM, copy, silu]) == [line]
    assert worse(kernels=[NORM, evolve(SILU, launches=3)])[0].endswith("triton_poi_fused_mul_silu 2 -> 3")
    assert worse(external={"mm": 8})[0].endswith("10 -> 11 launches: mm 7 -> 8")


def test_a_spill_and_a_graph_break_are_named() -> None:
    [line] = worse(kernels=[evolve(NORM, spills=32), SILU])
    assert line == "dense, layers.0 forward, sm_90: triton_red_fused_mean_0 spills 0 -> 32 bytes a thread"
    [line] = worse(breaks={"Tensor.item() call": 1})
    assert line == "dense, layers.0 forward, sm_90: 0 -> 1 graph breaks: Tensor.item() call"


def test_a_second_graph_of_a_block_is_worse_and_one_that_is_gone_a_change() -> None:
    twice = evolve(TABLE, rows=[ROW, ROW])
    assert compare(TABLE, twice)[0] == ["dense, layers.0 forward, sm_90, graph 2: was not there, 10 launches"]
    assert compare(twice, TABLE) == ([], ["dense, layers.0 forward, sm_90, graph 2: is gone"])


def test_other_registers_or_fewer_kernels_are_changes_that_do_not_fail() -> None:
    for kernels in ([evolve(NORM, registers=40), SILU], [SILU]):
        found, changed = compare(TABLE, evolve(TABLE, rows=[evolve(ROW, kernels=kernels)]))
        assert (found, len(changed)) == ([], 1)


def test_one_uncompiled_operation_more_is_worse() -> None:
    found, _ = compare(TABLE, evolve(TABLE, eager={"dense loss": {"mm": 3, "sum": 1, "copy_": 1}}))
    assert found == ["dense loss: 4 -> 5 operations: copy_ 0 -> 1"]


def test_what_is_watched_exists_and_another_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [folder for folder in watched_kernels.WATCHED if not (watched_kernels.ROOT / folder).is_dir()] == []
    before = watched_kernels.digest()
    monkeypatch.setattr(watched_kernels.metadata, "version", lambda name: "99.0")
    assert watched_kernels.digest() != before


def test_the_recorded_table_has_every_architecture_no_graph_break_and_no_spill() -> None:
    table = Table.load()
    assert {row.arch for row in table.rows} == {"sm_80", "sm_90", "sm_100"}
    assert {row.recipe for row in table.rows} >= {"dense", "experts", "latent", "mot", "tower"}
    assert [row.title for row in table.rows if row.breaks] == []
