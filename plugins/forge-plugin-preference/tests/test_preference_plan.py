"""A plan counts the reference: its weights, and its forward pass, inside of the loss or before the step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preference_runs import DENSE, installed, preference_job, prepared
from torch.utils.flop_counter import FlopCounterMode

from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_core.parallel.mesh import leave_group
from forge_plugin_lora import LoRA
from forge_plugin_parallel import PipelineParallel
from forge_plugin_plan.estimate import make_plan
from forge_plugin_plan.kernels import FORMULAS
from forge_plugin_plan.simulate import RankPlan
from forge_plugin_plan.storages import Purpose
from forge_plugin_preference import DPO, KTO
from forge_plugin_preference.hooks import AdaptersOff
from forge_plugin_preference.objective import objective_of

LORA = {"lora": LoRA(rank=2, random_base=True)}


def job_of(folder: Path, reference: str, **changes: Any) -> Any:
    # Two micro-batches more than a plan plays
    settings = {"device": "cpu", "global_batch_size": 16, "micro_batch_size": 4, "plugins": LORA}
    return preference_job(folder, DPO(reference=reference), **settings | changes)


def plan_of(job: Any, ranks: int = 1) -> list[RankPlan]:
    leave_group()
    planned = make_plan(job, installed(), ranks).ranks
    assert not any(rank.failure for rank in planned)
    return list(planned)


def flops_of(planned: RankPlan) -> float:
    assert planned.traffic is not None
    return planned.traffic.flops


def flops_of_the_pass(job: Any) -> float:
    """FLOPs of the hook's forward passes of a step, by torch's counter, where every position has a label."""
    leave_group()
    context = build_context(job, installed(), None)
    run = build_run(job, context)
    loader = TrainLoader(job, run.datasets, context)
    # On the CPU, the products of positions without a label are left out, which a plan does not know
    batches = [batch | {"labels": batch["input_ids"]} for batch in loader.next_step()]
    loader.close()
    hook: Any = SimpleNamespace(build=context, executor=run.executor, model=run.model, batches=batches)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        AdaptersOff().on_step_begin(hook)
    return counter.get_total_flops()


def test_the_pass_with_adapters_off_is_counted(tmp_path: Path) -> None:
    [without], [off], [beside] = (
        plan_of(job_of(tmp_path, reference)) for reference in ("", "adapters_off", prepared().reference)
    )
    assert flops_of(off) - flops_of(without) == flops_of_the_pass(job_of(tmp_path, "adapters_off")) > 0
    # A second model of the same size computes as much
    assert flops_of(beside) == flops_of(off)


def test_the_weights_of_a_reference_are_counted_beside_the_model(tmp_path: Path) -> None:
    job = job_of(tmp_path, prepared().reference)
    [beside] = plan_of(job)
    [without] = plan_of(job_of(tmp_path, "adapters_off"))
    leave_group()
    run = build_run(job, build_context(job, installed(), None))
    reference = objective_of(run.context.auxiliary).reference
    assert reference is not None
    # Without its table of rotations, which is made again for the length of this job
    size = sum(parameter.numel() * parameter.element_size() for parameter in reference.model.parameters())
    assert beside.memory is not None
    assert without.memory is not None
    assert (beside.memory.at_peak[Purpose.BESIDE], without.memory.at_peak[Purpose.BESIDE]) == (size, 0)
    assert beside.memory.peak > without.memory.peak + size
    assert beside.weights == without.weights


@pytest.mark.parametrize("stages", [2])
def test_ranks_of_a_pipeline_each_compute_their_part_of_the_pass(tmp_path: Path, stages: int) -> None:
    parallel = {"pp": PipelineParallel(degree=stages)}
    changes = {"parallel": parallel, "model": DENSE}
    off, without = (plan_of(job_of(tmp_path, name, **changes), stages) for name in ("adapters_off", ""))
    extra = [flops_of(one) - flops_of(other) for one, other in zip(off, without, strict=True)]
    assert sum(extra) == flops_of_the_pass(job_of(tmp_path, "adapters_off"))
    assert all(flops > 0 for flops in extra)
    sent = [sum(rank.traffic.transfers.values()) for rank in (off[0], without[0]) if rank.traffic is not None]
    assert sent[0] > sent[1]


def test_a_plan_names_the_pass_for_z_that_it_does_not_count(tmp_path: Path) -> None:
    job = job_of(tmp_path, "adapters_off")
    assert [title for title, _ in KTO(reference="adapters_off").plan_lines(job)] == ["kto z"]
    assert not [*KTO(reference="adapters_off", estimate_z=False).plan_lines(job)]
