"""A plan in which most micro-batches of a pipeline repeat what a few did is that of a step played in full."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import nn

from forge_core import LossComponent
from forge_core.contracts.runtime import LossOutput
from forge_core.losses import CrossEntropy
from forge_core.parallel.mesh import leave_group
from forge_core.plugins.catalog import Catalog
from forge_plugin_losses import ChunkedCrossEntropy
from forge_plugin_moe import MoE, SigmoidTopK
from forge_plugin_parallel import (
    FSDP,
    ActivationCheckpointing,
    ContextParallel,
    ExpertParallel,
    PipelineParallel,
    TensorParallel,
)
from forge_plugin_parallel.pp import splits_backward
from forge_plugin_plan import estimate, simulate
from forge_plugin_plan.estimate import make_plan
from forge_plugin_plan.repetition import Repetition
from forge_plugin_plan.simulate import RankPlan
from forge_plugin_transformer import GroupedQueryAttention, MultiTokenPrediction, SwiGLU, Transformer
from forge_testing import Numbers, SplittableModel, tiny_job
from forge_testing.refusals import lacks

FULL = ActivationCheckpointing()
SELECTIVE = ActivationCheckpointing(mode="selective")


def job_of(micro_batches: int = 6, shards: int = 1, **changes: Any) -> Any:
    """A layer for each of two stages: what is repeated is a whole section, whatever it is made of."""
    attention = GroupedQueryAttention(heads=4, kv_heads=2, backend="flash")
    model = Transformer(dim=16, layers=2, vocab_size=64, attention=attention, ffn=SwiGLU(hidden=32))
    settings = {"micro_batch_size": 2, "global_batch_size": 2 * micro_batches * shards, "seq_len": 32}
    settings |= {"device": "cpu", "grad_clip_norm": 1.0}
    model = evolve(model, **changes.pop("model_changes", {}))
    return tiny_job(
        "unused", Catalog.installed(), **{"model": model, "data": {"sources": (Numbers(),)}, **settings, **changes}
    )


def pp(schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    return {"pp": PipelineParallel(degree=2, schedule=schedule, **more)}


EXPERTS = MoE(experts=4, hidden=16, shared_experts=1, first_dense=1, router=SigmoidTopK(top_k=2, sequence_balance=1e-3))
SPARSE = {"ffn": EXPERTS, "layers": 3}
"""A dense layer and one of experts on the first stage, another one of experts on the last."""
LAYOUTS: dict[str, tuple[int, Any]] = {
    "selective, chunked loss": (
        2,
        {"parallel": pp() | {"activation_checkpointing": SELECTIVE}, "loss": ChunkedCrossEntropy(chunk_tokens=16)},
    ),
    "gpipe, bf16": (2, {"parallel": pp("gpipe"), "precision": "bf16"}),
    "interleaved": (2, {"parallel": pp("interleaved_1f1b"), "micro_batches": 8, "model_changes": {"layers": 4}}),
    # With several layers in a section, each gathers weights while the one before computes
    "fsdp": (
        4,
        {"parallel": pp() | {"fsdp": FSDP()}, "shards": 2, "precision": "bf16", "model_changes": {"layers": 4}},
    ),
    "tp, cp": (8, {"parallel": pp() | {"tp": TensorParallel(degree=2), "cp": ContextParallel(degree=2)}}),
    "experts over ranks": (
        4,
        {
            "parallel": pp() | {"fsdp": FSDP(), "ep": ExpertParallel(degree=2), "activation_checkpointing": FULL},
            "model_changes": SPARSE,
            "shards": 2,
            "precision": "bf16",
        },
    ),
    "further tokens": (2, {"parallel": pp(), "model_changes": {"mtp": MultiTokenPrediction(depth=1)}}),
    "another model": (2, {"parallel": pp(), "model": SplittableModel()}),
}


def plans(job: Any, ranks: int) -> tuple[list[RankPlan], list[str]]:
    """The plan, and what was reported."""
    leave_group()
    reports: list[str] = []
    return [*make_plan(job, Catalog.installed(), ranks, reports.append).ranks], reports


def whole(job: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[RankPlan]:
    """The plan with every micro-batch played."""
    with monkeypatch.context() as patched:
        patched.setattr(Repetition, "_call", lambda self, what, play, arguments: play())
        return plans(job, ranks)[0]


def extrapolated(job: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[RankPlan]:
    """The plan of few micro-batches, all played."""
    with monkeypatch.context() as patched:
        patched.setattr(estimate, "simulate", partial(simulate.simulate, repeat=False))
        return plans(job, ranks)[0]


def failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is noted here each time that a step cannot be repeated."""
    noted: list[str] = []
    plan: Callable[..., RankPlan] = simulate._Rank.plan

    def watched(self: Any, *args: Any, **kwargs: Any) -> RankPlan:
        result = plan(self, *args, **kwargs)
        noted.append(result.failure)
        return result

    monkeypatch.setattr(simulate._Rank, "plan", watched)
    return noted


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_figures_are_those_of_a_step_played_in_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, changes = LAYOUTS[name]
    job = job_of(**changes)
    noted = failures(monkeypatch)
    repeated, _ = plans(job, ranks)
    assert set(noted) == {""}, "all ranks are repeated"
    for planned, full in zip(repeated, whole(job, ranks, monkeypatch), strict=True):
        assert planned.memory == full.memory
        assert planned.traffic == full.traffic
        assert planned == full
    assert set(noted) == {""}, "and none was played otherwise than asked"


def test_of_many_micro_batches_four_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []
    play = Repetition._play

    def watched(self: Repetition, visit: Any, call: Any) -> Any:
        played.append(visit.number)
        return play(self, visit, call)

    monkeypatch.setattr(Repetition, "_play", watched)
    _, reports = plans(job_of(micro_batches=20, parallel=pp()), 2)
    assert played == [0, 1, 18, 19] * 2
    assert not lacks(reports[1], "rank 0 of 2", "micro-batch 1 of 20")


def test_micro_batches_that_differ_are_all_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that computes more in every third micro-batch."""
    build = SplittableModel.build

    def uneven(self: SplittableModel, context: Any) -> Any:
        model = build(self, context)
        calls = [0]

        def more(module: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            calls[0] += torch.is_grad_enabled()
            return tuple(tensor * tensor for tensor in output) if calls[0] % 3 == 0 else output

        model.layers["0"].register_forward_hook(more)
        return model

    monkeypatch.setattr(SplittableModel, "build", uneven)
    noted = failures(monkeypatch)
    job = job_of(parallel=pp(), model=SplittableModel())
    repeated, _ = plans(job, 2)
    assert [failure.partition(":")[0] for failure in noted] == ["NotAlike", "", ""]
    assert repeated == extrapolated(job, 2, monkeypatch)


@pytest.mark.parametrize(
    "schedule", [*(["interleaved_zero_bubble"] if splits_backward(torch.__version__) else []), "looped_bfs"]
)
def test_other_orders_of_backward_passes_are_played(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One divides each backward pass, the other runs that of the last micro-batch first."""
    job = job_of(parallel=pp(schedule), model_changes={"layers": 4})
    noted = failures(monkeypatch)
    repeated, _ = plans(job, 2)
    assert noted[0]
    assert [rank.failure for rank in repeated] == ["", ""]
    assert repeated == extrapolated(job, 2, monkeypatch)


def test_ranks_that_are_not_played_have_gradients_as_those_that_are() -> None:
    """Of six pipeline ranks the first and the last are played; the four others are alike."""
    stages = {"pp": PipelineParallel(degree=6), "fsdp": FSDP()}
    job = job_of(parallel=stages, model_changes={"layers": 12}, shards=2, precision="bf16")
    ranks, reports = plans(job, 12)
    assert [rank.memory is not None for rank in ranks] == [True, False, False, False, False, True]
    assert all(rank.gradients == rank.weights and rank.optimizer >= 2 * rank.weights for rank in ranks)
    assert len({(rank.gradients, rank.optimizer) for rank in ranks[1:-1]}) == 1
    assert sum("building" in text for text in reports) == 5, "one is built again, without a prediction"


def test_sizes_that_were_predicted_wrongly_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {"pp": PipelineParallel(degree=5)}
    job = job_of(parallel=stages, model_changes={"layers": 5})
    right, _ = plans(job, 5)
    predict = simulate.StateLog.predict
    monkeypatch.setattr(simulate.StateLog, "predict", lambda self, parameters: predict(self, parameters) and (1, 1))
    wrong, _ = plans(job, 5)
    assert wrong == right


def test_equal_parameters_of_different_sizes_predict_nothing() -> None:
    states = simulate.StateLog()
    states.add(["norm", "matrix"], [(4, 8), (16, 32)])
    assert states.predict(["matrix", "norm", "matrix"]) == (36, 72)
    assert states.predict(["norm", "bias"]) is None
    states.add(["norm"], [(4, 12)])
    assert states.predict(["norm"]) is None


def test_a_loss_is_played_four_times_also_where_fsdp_takes_over_the_gradient_of_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played: list[int] = []
    play = Repetition._play_loss

    def watched(self: Repetition, key: Any, visit: Any, *rest: Any) -> Any:
        played.append(visit.number)
        return play(self, key, visit, *rest)

    monkeypatch.setattr(Repetition, "_play_loss", watched)
    plans(job_of(micro_batches=20, shards=2, parallel=pp() | {"fsdp": FSDP()}), 4)
    assert played == [0, 1, 18, 19]


@frozen(kw_only=True)
class PartOfAnother(LossComponent):
    """A loss whose count is a part of another output."""

    def build(self, context: Any) -> Any:
        inner = CrossEntropy().build(context)

        def loss(head: Any, hidden: torch.Tensor, batch: Any) -> LossOutput:
            output = inner(head, hidden, batch)
            return output._replace(count=output.per_sequence[1][0])

        return loss


def test_a_loss_that_cannot_be_repeated_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(parallel=pp(), loss=PartOfAnother())
    noted = failures(monkeypatch)
    repeated, _ = plans(job, 2)
    assert noted == ["", ""], "the sections are repeated all the same"
    assert repeated == whole(job, 2, monkeypatch)
