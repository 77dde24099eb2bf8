"""Layouts to test a component under, as tables of a job file: stages are looked up by type in the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from forge_core.contracts.components import ParallelComponent
from forge_core.plugins.catalog import Catalog
from forge_testing.tables import read_value


@frozen(kw_only=True)
class LayoutCase:
    """A layout for a test run."""

    ranks: int
    """World size."""
    parallel: Mapping[str, Mapping[str, Any]]
    """The tables `[parallel.NAME]`."""
    micro_batch_size: int = 0
    """Sequences of a forward pass on one rank; the global batch has 8. 0: the rank's whole share."""
    needs: str = ""
    """Method of `forge_core.contracts.model.Model` that a model must override to have this layout."""

    def missing(self, catalog: Catalog) -> list[str]:
        """Types of stages that no installed distribution offers."""
        types = [table.get("type", name) for name, table in self.parallel.items()]
        return [type_ for type_ in types if type_ not in catalog.types("parallel")]

    def stages(self, catalog: Catalog) -> Mapping[str, ParallelComponent]:
        """The stages, read like the stages of a job file.

        Raises:
            ValueError: A key is wrong; the message lists every problem.
        """
        tables = {name: dict(table) for name, table in self.parallel.items()}
        return read_value(tables, Mapping[str, ParallelComponent], catalog)

    def changes(self, catalog: Catalog) -> Mapping[str, Any]:
        """Return the settings of the layout, as `forge_testing.tiny_job` takes them."""
        return {"parallel": self.stages(catalog), "micro_batch_size": self.micro_batch_size}


LAYOUTS: Mapping[str, LayoutCase] = {
    "replicate2": LayoutCase(ranks=2, parallel={"replicate": {}}, micro_batch_size=2),
    "fsdp2": LayoutCase(ranks=2, parallel={"fsdp": {}}, micro_batch_size=2),
    "tp2": LayoutCase(ranks=2, parallel={"tp": {"degree": 2}}, needs="tensor_parallel_plan"),
    "tp2_whole_sequences": LayoutCase(
        ranks=2,
        parallel={"tp": {"degree": 2, "sequence_parallel": False, "loss_parallel": False}},
        needs="tensor_parallel_plan",
    ),
    "pp2": LayoutCase(ranks=2, parallel={"pp": {"degree": 2}}, micro_batch_size=4, needs="ends"),
    "cp2": LayoutCase(ranks=2, parallel={"cp": {"degree": 2}}, needs="sequence_mixers"),
    # With several micro-batches, so that it includes what `fsdp2` does.
    "checkpointing2": LayoutCase(ranks=2, parallel={"fsdp": {}, "activation_checkpointing": {}}, micro_batch_size=2),
    "compiled": LayoutCase(ranks=1, parallel={"compile": {"backend": "aot_eager"}}),
    # What Dynamo traces, without the joint graph of forward and backward: a third of the time.
    "traced": LayoutCase(ranks=1, parallel={"compile": {"backend": "eager"}}),
    "fsdp4": LayoutCase(ranks=4, parallel={"fsdp": {}}, micro_batch_size=2),
    "hsdp2x2": LayoutCase(ranks=4, parallel={"fsdp": {"shard": 2, "replicate": 2}}, micro_batch_size=2),
    "replicate2_tp2": LayoutCase(
        ranks=4, parallel={"tp": {"degree": 2}}, micro_batch_size=2, needs="tensor_parallel_plan"
    ),
    "fsdp2_pp2": LayoutCase(
        ranks=4, parallel={"fsdp": {}, "pp": {"degree": 2, "schedule": "gpipe"}}, micro_batch_size=2, needs="ends"
    ),
    "fsdp2_cp2": LayoutCase(
        ranks=4, parallel={"fsdp": {}, "cp": {"degree": 2}}, micro_batch_size=2, needs="sequence_mixers"
    ),
    "fsdp2_tp2": LayoutCase(ranks=4, parallel={"fsdp": {}, "tp": {"degree": 2}}, needs="tensor_parallel_plan"),
    "fsdp2_ep2": LayoutCase(ranks=2, parallel={"fsdp": {}, "ep": {"degree": 2}}, needs="expert_stacks"),
    "fsdp4_ep2": LayoutCase(
        ranks=4, parallel={"fsdp": {}, "ep": {"degree": 2}}, micro_batch_size=1, needs="expert_stacks"
    ),
    "fsdp4_ep4": LayoutCase(ranks=4, parallel={"fsdp": {}, "ep": {"degree": 4}}, needs="expert_stacks"),
    "hsdp2x2_ep2": LayoutCase(ranks=4, parallel={"fsdp": {"replicate": 2}, "ep": {"degree": 2}}, needs="expert_stacks"),
    "fsdp2_tp2_ep2": LayoutCase(
        ranks=4, parallel={"fsdp": {}, "tp": {"degree": 2}, "ep": {"degree": 2}}, needs="expert_stacks"
    ),
    "fsdp2_pp2_ep2": LayoutCase(
        ranks=4,
        parallel={"fsdp": {}, "pp": {"degree": 2}, "ep": {"degree": 2}},
        micro_batch_size=1,
        needs="expert_stacks",
    ),
    "fsdp2_cp2_ep2": LayoutCase(
        ranks=4, parallel={"fsdp": {}, "cp": {"degree": 2}, "ep": {"degree": 2}}, needs="expert_stacks"
    ),
    "fsdp2_cp2_ep4": LayoutCase(
        ranks=4, parallel={"fsdp": {}, "cp": {"degree": 2}, "ep": {"degree": 4}}, needs="expert_stacks"
    ),
    "checkpointing_fsdp2_ep2": LayoutCase(
        ranks=2, parallel={"fsdp": {}, "ep": {"degree": 2}, "activation_checkpointing": {}}, needs="expert_stacks"
    ),
}
"""Layouts by name. Layouts with the same number of ranks run in the same processes."""
