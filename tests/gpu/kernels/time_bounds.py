"""Lower bounds on the time of compiled blocks from the table of kernels, beside those of `forge-run plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen

from forge_plugin_plan.gpus import GPU, GPUS
from forge_plugin_plan.machine import LAUNCH_S
from gpu.kernels.table import Row, Table

ARCHITECTURES: Mapping[str, str] = {"a100": "sm_80", "h100": "sm_90", "h200": "sm_90", "b200": "sm_100"}
LAYERS = "model.layers"


@frozen
class Bound:
    """Seconds of one layer and micro-batch at least, forward and backward."""

    external: float
    """Of matrix products and attention: by their FLOPs, or by their bytes where these take longer."""
    kernels: float
    """Of Triton kernels, which only read and write."""
    launches: float
    """Of the host."""

    @property
    def seconds(self) -> float:
        """Returns what all takes: kernels of one stream do not overlap, and the host runs beside them."""
        return max(self.external + self.kernels, self.launches)


def bound_of(rows: Iterable[Row], gpu: GPU) -> Bound:
    """Returns the bound of graphs that run one after the other."""
    external = kernels = launches = 0.0
    for row in rows:
        external += max(row.flops / gpu.flops, row.external_bytes / gpu.bandwidth)
        kernels += sum(each.launches * each.bytes for each in row.kernels) / gpu.bandwidth
        launches += row.launches * LAUNCH_S
    return Bound(external, kernels, launches)


def planned(recipe: str) -> tuple[float, float] | None:
    """Returns FLOPs and bytes through memory of a layer and micro-batch by `forge-run plan`; None: of several."""
    import attrs

    from forge_core.parallel.mesh import leave_group
    from forge_core.plugins.catalog import Catalog
    from forge_plugin_plan.estimate import make_plan
    from gpu.kernels.blocks import RECIPES, job_of

    if LAYERS not in RECIPES[recipe].changes:
        return None
    catalog, figures = Catalog.installed(), []
    for layers in (1, 2):
        changes = {**RECIPES[recipe].changes, LAYERS: layers}
        job = job_of(attrs.evolve(RECIPES[recipe], changes=changes), catalog)
        parallel = {name: stage for name, stage in job.parallel.items() if name != "compile"}
        leave_group()
        [rank] = make_plan(attrs.evolve(job, parallel=parallel), catalog, 1).ranks
        assert rank.traffic is not None, rank.failure
        figures.append((rank.traffic.flops, 2.0 * rank.traffic.kept))
    return figures[1][0] - figures[0][0], figures[1][1] - figures[0][1]


def lines(table: Table) -> Iterable[str]:
    """Yields a Markdown table: each recipe on each GPU."""
    yield "| block | GPU | products | other kernels | launches | at least | plan: compute | plan: memory |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for recipe in dict.fromkeys(row.recipe for row in table.rows):
        plan = planned(recipe)
        for name, arch in ARCHITECTURES.items():
            gpu = GPUS[name]
            bound = bound_of([row for row in table.rows if (row.recipe, row.arch) == (recipe, arch)], gpu)
            own = [bound.external, bound.kernels, bound.launches, bound.seconds]
            cells = [_ms(each) for each in own]
            cells += ["", ""] if plan is None else [_ms(plan[0] / gpu.flops), _ms(plan[1] / gpu.bandwidth)]
            yield f"| {recipe} | {gpu.name} | {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
