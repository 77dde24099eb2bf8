"""Faults of a sampler that the first step finds: its log-probabilities are not those in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import frozen
from grpo_runs import lines_of

from forge_core.contracts.errors import ForgeError
from forge_plugin_generate.generate import Sampling
from forge_plugin_generate.sample import sample
from forge_plugin_grpo import EngineRollout, RolloutComponent
from forge_plugin_parallel import FSDP, PipelineParallel
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming


@frozen(kw_only=True)
class Faulty(RolloutComponent):
    """Draws as `engine` does, with one fault."""

    fault: str
    size: float = 0.0

    def build(self, context: Any, max_tokens: int, stops: Any) -> Any:  # type: ignore[override]
        def draw(model: Any, prompts: Any, seeds: Any) -> Any:
            settings = Sampling(temperature=1.0)
            if self.fault == "weights":  # as a server that has not received the weights of this run
                own = [parameter.clone() for parameter in model.parameters()]
                for number, parameter in enumerate(model.parameters()):
                    generator = torch.Generator().manual_seed(number)
                    parameter += self.size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                drawn = sample(model, prompts, max_tokens, stops, settings, seeds)
                for parameter, value in zip(model.parameters(), own, strict=True):
                    parameter.copy_(value)
                return drawn
            if self.fault == "prompts":  # each completion is the one of its neighbour's prompt
                return sample(model, [prompts[-1], *prompts[:-1]], max_tokens, stops, settings, seeds)
            drawn = sample(model, prompts, max_tokens, stops, settings, seeds)
            added = float("nan") if self.fault == "not a number" else self.size
            for one in drawn:
                one.log_p[:] = [value + added for value in one.log_p]
            return drawn

        return draw


@pytest.mark.parametrize(
    ("precision", "fault", "size"),
    [
        ("fp64", "shift", 2e-9),
        ("fp32", "shift", 2e-3),
        ("bf16", "shift", 4e-2),
        ("fp64", "not a number", 0.0),
        ("fp64", "prompts", 0.0),
        ("bf16", "weights", 0.1),
    ],
)
def test_a_sampler_that_differs_stops_the_run_before_its_first_update(tmp_path, precision, fault, size):
    facts = ("rollout/log_p_difference", precision, "loss.check_first_log_p")
    with pytest.raises(ForgeError, match=naming(*facts)):
        lines_of(tmp_path, {"precision": precision}, rollout=Faulty(fault=fault, size=size))
    assert not list(tmp_path.rglob("step-*"))


def test_the_comparison_can_be_switched_off(tmp_path):
    rollout = Faulty(fault="shift", size=0.5)
    lines = lines_of(tmp_path, {"steps": 1}, rollout=rollout, check_first_log_p=False)
    assert lines[0]["rollout/log_p_difference"] == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize("parallel", [{"fsdp": FSDP()}, {"pp": PipelineParallel(degree=2)}], ids=["fsdp", "pp"])
def test_all_ranks_compare_the_mean_over_the_global_batch(tmp_path, parallel):
    """Ranks without log-probabilities, or with a part of the tokens, stop with the same number."""

    def stopped(rank: int) -> str:
        with pytest.raises(ForgeError) as error:
            lines_of(tmp_path, {"parallel": parallel, "micro_batch_size": 2}, rollout=Faulty(fault="shift", size=0.5))
        return str(error.value)

    first, second = run_on_ranks(2, stopped)
    assert first == second
    assert "is 0.5 nats" in first


@pytest.mark.parametrize(
    ("changes", "rollout"),
    [
        ({"precision": "fp32"}, EngineRollout()),
        ({"precision": "fp32", "float32_matmul": "medium"}, EngineRollout()),
        # Log-probabilities are those at temperature 1, whatever the draws
        ({}, EngineRollout(temperature=0.5, top_k=3)),
    ],
)
def test_the_engine_passes(tmp_path, changes, rollout):
    assert len(lines_of(tmp_path, {"steps": 2, **changes}, rollout=rollout)) == 2
