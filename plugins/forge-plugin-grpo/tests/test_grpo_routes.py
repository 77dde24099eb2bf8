"""Experts of a model with experts, recorded when completions are drawn and replayed when they are learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from grpo_runs import MODEL, lines_of, settings
from torch import Tensor

from forge_core import TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_kit.nn.routes import RouteRecord
from forge_plugin_checkpoints import Parts
from forge_plugin_compile import Compile
from forge_plugin_generate.generate import Sampling
from forge_plugin_generate.sample import sample
from forge_plugin_grpo import EngineRollout, RolloutComponent
from forge_plugin_moe import ExpertChoice, MoE, SigmoidTopK, SoftmaxTopK
from forge_plugin_moe.modules.topk import TopKModule
from forge_plugin_parallel import ActivationCheckpointing, PipelineParallel
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.laws import Case, layout_law
from forge_testing.outcomes import Stop
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, naming, problems_of

EXPERTS = evolve(MODEL, ffn=MoE(experts=8, hidden=16, router=SoftmaxTopK(top_k=2)))
BIASED = evolve(MODEL, ffn=MoE(experts=8, hidden=16, shared_experts=1, first_dense=1, router=SigmoidTopK(top_k=3)))
NAMES = ("loss", "grad_norm", "loss/policy", "policy/clipped", "reward", "completions/tokens", "moe/routes_differ")
COMPARED = ("loss", "grad_norm", "loss/policy", "moe/routes_differ")


@frozen(kw_only=True)
class Disturbed(EngineRollout):
    """Draws as `engine` does, by routers that read other numbers: what another precision does, but more."""

    size: float = 2.0

    def build(self, context: Any, max_tokens: int, stops: Any) -> Any:  # type: ignore[override]
        inner = super().build(context, max_tokens, stops)

        def draw(model: Any, prompts: Any, seeds: Any) -> Any:
            routers = [module for module in model.modules() if isinstance(module, TopKModule)]
            handles = [router.register_forward_pre_hook(self.changed) for router in routers]
            try:
                return inner(model, prompts, seeds)
            finally:
                for handle in handles:
                    handle.remove()

        return draw

    def changed(self, _router: Any, inputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        x, batch = inputs
        return x + self.size * torch.sin(7 * x), batch


class Chosen(TrainingHook):
    """Keeps what the routers chose in training, and what batches had for them."""

    def __init__(self) -> None:
        self.chosen: dict[str, list[Tensor]] = {}
        self.batches: list[Any] = []

    def on_train_begin(self, context: Any) -> None:
        for module in context.model.modules():
            if isinstance(module, TopKModule):
                module.register_forward_hook(self.add)

    def add(self, router: Any, _inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self.chosen.setdefault(router.replay.entry, []).append(output[1])

    def on_gradients(self, context: Any) -> None:
        self.batches += [dict(batch) for batch in context.batches]


@pytest.mark.parametrize("model", [EXPERTS, BIASED], ids=["softmax", "sigmoid"])
def test_training_uses_the_experts_of_the_sampler(tmp_path: Path, model: Any) -> None:
    keys: dict[str, Any] = {"rollout": Disturbed(), "check_first_log_p": False, "updates": 2}
    changes = {"model": model, "steps": 2}
    seen, free = Chosen(), Chosen()
    lines = lines_of(tmp_path / "on", changes, seen, **keys, replay_routes=True)
    without = lines_of(tmp_path / "off", changes, free, **keys)
    assert len(seen.chosen) == (2 if model is EXPERTS else 1)
    for entry, layers in seen.chosen.items():
        for number, (batch, chosen) in enumerate(zip(seen.batches, layers, strict=True)):
            recorded = batch[entry][:, 0].long()
            ids, labels = batch["input_ids"].view(8, 4, 12), batch["labels"].view(8, 4, 12)
            # All tokens up to the last one that predicts: those of the prompt, too
            last = (labels >= 0).int().flip(-1).argmax(-1)
            tokens = (torch.arange(12) <= 11 - last[..., None]).flatten(1)
            assert (recorded >= 0).all(-1).equal(tokens)
            assert ids.view(8, -1)[tokens].numel() < ids.numel()
            assert chosen[tokens].equal(recorded[tokens])
            if not number:  # in the first step both runs have the same weights and completions
                own = free.chosen[entry][0]
                differ = (own.sort(-1).values != recorded.sort(-1).values).any(-1) & tokens
                assert differ.sum() > 0.1 * tokens.sum()
                assert chosen[~tokens].equal(own[~tokens])
    assert lines[0]["moe/routes_differ"] > 0.1
    # The trainer is nearer to the sampler by its experts, though their weights are of other scores
    assert lines[0]["rollout/log_p_difference"] < without[0]["rollout/log_p_difference"]
    assert "moe/routes_differ" not in without[0]


def test_without_rounding_nothing_changes(tmp_path: Path) -> None:
    one, other = (
        lines_of(tmp_path / f"{on}", {"model": EXPERTS, "steps": 2}, replay_routes=on) for on in (True, False)
    )
    for line, expected in zip(one, other, strict=True):
        assert line["moe/routes_differ"] == 0
        assert [line[name] for name in NAMES[:-1]] == [expected[name] for name in NAMES[:-1]]


def test_in_bfloat16_routes_differ_and_are_replayed(tmp_path: Path) -> None:
    """Of a model whose experts are nearly alike to its routers, as large ones are."""
    seen = Chosen()
    lines = lines_of(tmp_path, {"model": EXPERTS, "precision": "bf16"}, seen, replay_routes=True)
    assert any(line["moe/routes_differ"] > 0 for line in lines)
    for entry, layers in seen.chosen.items():
        for batch, chosen in zip(seen.batches, layers, strict=True):
            recorded = batch[entry][:, 0].long()
            assert chosen.where(recorded >= 0, -1).equal(recorded)


@frozen(kw_only=True)
class WithoutRoutes(RolloutComponent):
    """A sampler that knows nothing of experts, such as a server."""

    def build(self, context: Any, max_tokens: int, stops: Any) -> Any:  # type: ignore[override]
        return lambda model, prompts, seeds: sample(model, prompts, max_tokens, stops, Sampling(), seeds)


def test_completions_without_routes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=naming("WithoutRoutes", "loss.replay_routes")):
        lines_of(tmp_path, {"model": EXPERTS}, rollout=WithoutRoutes(), replay_routes=True)


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        (MODEL, ["no router"]),
        (evolve(MODEL, ffn=MoE(experts=8, hidden=16, router=ExpertChoice())), ["model.ffn.router", "ExpertChoice"]),
    ],
    ids=["dense", "expert choice"],
)
def test_models_whose_routes_cannot_be_replayed_are_refused(tmp_path: Path, model: Any, facts: list[str]) -> None:
    job = tiny_job(str(tmp_path), installed(), **{**settings(tmp_path, replay_routes=True), "model": model})
    check_problems(problems_of(job), at("loss.replay_routes", *facts))


def test_the_reference_routes_by_itself(tmp_path: Path) -> None:
    """Its divergence is that of its weights: recorded routes are of the model in training."""
    start = lines_of(tmp_path / "start", {"model": EXPERTS, "steps": 1, "job": {"name": "start"}})
    assert start
    path = str(tmp_path / "start" / "start")
    changes = {"model": EXPERTS, "steps": 1, "checkpoint": {"load": Parts(path=path)}}
    keys: dict[str, Any] = {"rollout": Disturbed(), "check_first_log_p": False, "reference": path}
    own, replayed = (
        lines_of(tmp_path / f"{on}", changes, **keys, check_first_kl=False, replay_routes=on)[0] for on in (False, True)
    )
    assert own["kl"] < 1e-20
    assert replayed["kl"] > 1e-10


def test_a_run_between_two_updates_keeps_the_routes(tmp_path: Path) -> None:
    """On two ranks of a pipeline, of which each has those of its layers, and continued in one process."""
    keys: dict[str, Any] = {"rollout": Disturbed(), "check_first_log_p": False, "replay_routes": True, "updates": 2}
    whole = lines_of(tmp_path / "whole", {"model": EXPERTS, "steps": 2}, **keys)
    changes = {"model": EXPERTS, "parallel": {"pp": PipelineParallel(degree=2)}, "micro_batch_size": 2}
    both = tmp_path / "both"
    run_on_ranks(2, lambda rank: lines_of(both, {**changes, "steps": 2}, Stop(step=1), **keys))
    lines = lines_of(both, {"model": EXPERTS, "steps": 2}, **keys)
    for line, expected in zip(lines, whole, strict=True):
        assert [line[name] for name in COMPARED] == pytest.approx([expected[name] for name in COMPARED], rel=1e-9)


@pytest.mark.parametrize("stage", [ActivationCheckpointing(), Compile(backend="eager")], ids=["recomputed", "compiled"])
def test_stages_that_wrap_layers_replay_too(tmp_path: Path, stage: Any) -> None:
    keys: dict[str, Any] = {"rollout": Disturbed(), "check_first_log_p": False, "replay_routes": True}
    model = evolve(EXPERTS, layers=1)
    [plain], [wrapped] = (
        lines_of(tmp_path / f"{len(stages)}", {"model": model, "steps": 1, "parallel": stages}, **keys)
        for stages in ({}, {"wrapper": stage})
    )
    assert plain["moe/routes_differ"] > 0.1
    assert [wrapped[name] for name in NAMES] == pytest.approx([plain[name] for name in NAMES], rel=1e-9, abs=1e-12)


def test_a_record_has_each_position_of_rows_that_come_in_pieces() -> None:
    record = RouteRecord(rows=3, length=4)
    record.positions.append(torch.tensor([[-1, 0], [0, 1]]))  # rows 2 and 0, the former padded
    record.add("routes.1", torch.tensor([[[9, 9], [1, 2]], [[3, 4], [5, 6]]]))
    record.positions.append(torch.tensor([[1], [2]]))
    record.add("routes.1", torch.tensor([[[7, 8]], [[0, 1]]]))
    record.assign([2, 0])
    assert record.tables()["routes.1"].tolist() == [
        [[3, 4], [5, 6], [0, 1], [-1, -1]],
        [[-1, -1]] * 4,
        [[1, 2], [7, 8], [-1, -1], [-1, -1]],
    ]


def observe(folder: Path, changes: Any) -> list[tuple[float, ...]]:
    # Far from each other, sampler and trainer show whether each token has its own experts
    keys: dict[str, Any] = {"rollout": Disturbed(), "check_first_log_p": False, "replay_routes": True, "updates": 2}
    lines = lines_of(folder, {"model": EXPERTS, "steps": 2, **changes}, **keys)
    return [tuple(line.get(name, 0.0) for name in NAMES) for line in lines]


def same(ranks: Any, alone: Any) -> None:
    assert all(line[-1] > 0.1 for line in alone)
    for found, expected in zip(ranks[0], alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


test_layouts = layout_law(Case("routes", observe=observe, compare=same, layouts=("tp2", "pp2", "cp2", "fsdp2_ep2")))
