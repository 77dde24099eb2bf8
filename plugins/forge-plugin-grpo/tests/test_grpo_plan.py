"""A plan counts the pass with adapters off, and names what it leaves out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpo_runs import settings
from torch.utils.flop_counter import FlopCounterMode

from forge_core.engine.build import build_context, build_run
from forge_core.parallel.mesh import leave_group
from forge_plugin_grpo import GRPO, RewardModel
from forge_plugin_grpo.hook import Rollouts
from forge_plugin_lora import LoRA
from forge_plugin_plan.estimate import Plan, make_plan
from forge_plugin_plan.kernels import FORMULAS
from forge_testing import tiny_job
from forge_testing.catalogs import installed


def job_of(folder: Path, **loss: Any) -> Any:
    changes = {"steps": 4, "device": "cpu", "plugins": {"lora": LoRA(rank=2, random_base=True)}}
    return tiny_job(str(folder), installed(), **settings(folder, **loss) | changes)


def plan_of(job: Any) -> Plan:
    leave_group()
    plan = make_plan(job, installed(), 1)
    assert not any(rank.failure for rank in plan.ranks)
    return plan


def flops_of(job: Any) -> float:
    [rank] = plan_of(job).ranks
    assert rank.traffic is not None
    return rank.traffic.flops


def flops_of_the_pass(job: Any) -> float:
    """FLOPs of the pass of the reference in a step, by torch's counter, where every position has a label."""
    import torch

    leave_group()
    context = build_context(job, installed(), None)
    run = build_run(job, context)
    ids = torch.ones(job.train.global_batch_size, job.train.seq_len, dtype=torch.int64)
    positions = torch.arange(job.train.seq_len).expand_as(ids)
    hook = Rollouts(loss=job.loss)
    rows = [{"input_ids": ids, "labels": ids, "positions": positions, "document_ids": ids * 0}]
    step: Any = SimpleNamespace(build=context, executor=run.executor, model=run.model, batches=rows)
    hook._build, hook._rows = context, rows  # as after a draw
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        hook._add_reference(step)
    return counter.get_total_flops()


@pytest.mark.parametrize("updates", [1, 2])
def test_the_pass_with_adapters_off_is_counted(tmp_path: Path, updates: int) -> None:
    off, without = (job_of(tmp_path, reference=name, updates=updates) for name in ("adapters_off", ""))
    assert flops_of(off) - flops_of(without) == flops_of_the_pass(off) > 0


def test_rollouts_and_reward_models_are_named_as_not_counted(tmp_path: Path) -> None:
    rewards = {"learned": RewardModel(path=str(tmp_path))}
    lines = dict(plan_of(job_of(tmp_path, updates=2, rewards=rewards)).lines)
    assert lines["rollouts"] == (
        "32 completions of up to 5 tokens every 2 steps; their time and their memory are not counted"
    )
    assert lines["reward"].startswith(f"the model {tmp_path}, whole on each rank")


def test_the_hook_is_played_for_adapters_off_alone(tmp_path: Path) -> None:
    loss: GRPO = job_of(tmp_path).loss
    assert not Rollouts(loss=loss).played_in_plans
