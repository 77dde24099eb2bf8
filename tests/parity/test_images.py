"""One curve: every fusion trains under every layout like one process, and checkpoints move between them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import attrs
import pytest
from images import FUSIONS, IMAGE_ROWS, ImageRow, row

from forge_plugin_lowbit.float8 import Float8
from forge_plugin_parallel import FSDP
from forge_testing.curves import Curve, Difference, train
from forge_testing.processes import run_on_ranks

STEPS = 2


@pytest.fixture(scope="module")
def trained(request, alone, tmp_path_factory) -> Callable[[int], Mapping[str, Sequence[Curve]]]:
    """Each rank's curve of the rows of this session that take so many ranks, which run in the same processes."""
    folder = str(tmp_path_factory.mktemp("runs"))
    items = [item for item in request.session.items if not item.get_closest_marker("skip")]
    cases = [item.callspec.params.get("layout") for item in items if hasattr(item, "callspec")]
    names = {case.id for case in cases if isinstance(case, ImageRow)}

    @functools.cache
    def run(ranks: int) -> Mapping[str, Sequence[Curve]]:
        rows = [row for row in IMAGE_ROWS if row.ranks == ranks and row.id in names]
        for each in rows:
            alone(each)  # here, so that ranks inherit what the models import
        found = run_on_ranks(ranks, lambda rank: [train(row.on_rank(rank).job(folder, steps=STEPS)) for row in rows])
        return {row.id: curves for row, curves in zip(rows, zip(*found, strict=True), strict=True)}

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[ImageRow], Curve]:
    """The same job in one process."""
    folder = str(tmp_path_factory.mktemp("alone"))
    found: dict[tuple[object, ...], Curve] = {}

    def run(row: ImageRow) -> Curve:
        key = (row.fusion, row.layers, row.image_every)
        if key not in found:
            found[key] = train(row.job(folder, parallel=False, steps=STEPS))
        return found[key]

    return run


@pytest.mark.parametrize(
    "layout",
    [pytest.param(row, id=row.id, marks=[pytest.mark.thorough] if row.thorough else []) for row in IMAGE_ROWS],
)
def test_a_layout_trains_like_one_process(trained, alone, layout):
    ranks = trained(layout.ranks)[layout.id]
    difference = Difference.between(ranks[0], alone(layout))
    assert difference.initial == 0
    assert max(difference.loss, difference.norm, difference.gradient, difference.evaluation) < 1e-11, difference
    assert difference.weights < 1e-9, difference
    for other in ranks[1:]:
        assert (other.losses, other.norms, other.evaluation) == (
            ranks[0].losses,
            ranks[0].norms,
            ranks[0].evaluation,
        ), "every rank reports the global numbers"


FLOAT8 = {"float8": Float8(recipe="rowwise_with_gw_hp")}
"""It does not depend on which tokens go together."""


@pytest.fixture(scope="module")
def sharded_float8(tmp_path_factory) -> Mapping[str, Sequence[float]]:
    """Losses of each fusion in float8 under fsdp."""
    folder = str(tmp_path_factory.mktemp("float8"))
    stages = {**FLOAT8, "fsdp": FSDP()}
    rows = {fusion: row("fsdp2", 2, fusion, stages, "", micro_batch_size=2) for fusion in FUSIONS}

    def losses(rank: int) -> Mapping[str, Sequence[float]]:
        return {name: train(each.job(folder, precision="fp32", steps=STEPS)).losses for name, each in rows.items()}

    return run_on_ranks(2, losses)[0]


@pytest.mark.parametrize("fusion", FUSIONS)
def test_float8_under_fsdp_is_float8_of_one_process(tmp_path, sharded_float8, fusion):
    alone = row("one process", 1, fusion, FLOAT8, "").job(str(tmp_path), precision="fp32", steps=STEPS)
    losses = train(alone).losses
    assert losses[0] != train(attrs.evolve(alone, parallel={})).losses[0], "float8 rounds"
    found = sharded_float8[fusion]
    assert found[0] == pytest.approx(losses[0], rel=1e-6)
    assert found == pytest.approx(losses, rel=0.02), "later, the last bit of float32 decides between two of float8"


def test_every_fusion_and_every_pair_of_stages_is_in_the_table():
    assert {row.fusion for row in IMAGE_ROWS} == {"joint", "bidirectional", "cross_attention", "mot", "moma"}
    pairs = {frozenset(row.stages) for row in IMAGE_ROWS if len(row.stages) == 2}
    for pair in (
        ("fsdp", "tp"),
        ("fsdp", "pp"),
        ("fsdp", "cp"),
        ("tp", "pp"),
        ("tp", "cp"),
        ("pp", "cp"),
        ("fsdp", "ep"),
    ):
        assert frozenset(pair) in pairs
