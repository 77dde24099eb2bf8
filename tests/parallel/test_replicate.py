"""One curve: two and four ranks with whole copies of the model train like one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from forge_core.contracts.components import TrainingHook
from forge_core.engine.trainer import Trainer
from forge_core.parallel.mesh import sum_gradients
from forge_core.parallel.stages import Replicate
from forge_testing import Numbers, tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems

DATA = {"sources": (Numbers(ignored=7, held_out=5),)}


def job(folder, **changes):
    settings = {
        "global_batch_size": 8,
        "precision": "fp64",
        "grad_clip_norm": 0.5,
        "data": DATA,
        "eval": {"interval": 2},
    }
    return tiny_job(str(folder), None, **(settings | changes))


def records(folder):
    return [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    Trainer(job(folder), echo=lambda text: None).run()
    return records(folder)


@pytest.mark.parametrize(("ranks", "micro_batch_size"), [(2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("named", [False, True])
def test_the_curve_is_that_of_one_process(tmp_path, single, ranks, micro_batch_size, named):
    stages = {"parallel": {"replicate": Replicate()}} if named else {}

    def train(rank):
        return Trainer(job(tmp_path, micro_batch_size=micro_batch_size, **stages), echo=lambda text: None).run().loss

    losses = run_on_ranks(ranks, train)
    assert len(set(losses)) == 1, "every rank reports the global loss"
    for found, expected in zip(records(tmp_path), single, strict=True):
        for key in ("loss", "grad_norm", "eval/loss", "eval/tokens", "tokens"):
            if key in expected:
                assert found[key] == pytest.approx(expected[key], rel=1e-9), key


def test_without_the_reduction_the_curve_differs(tmp_path, single, monkeypatch):
    from forge_core.parallel.stages import ReplicateStage

    monkeypatch.setattr(ReplicateStage, "complete_gradients", lambda self, model: None)
    run_on_ranks(2, lambda rank: Trainer(job(tmp_path), echo=lambda text: None).run() and None)
    assert records(tmp_path)[-1]["eval/loss"] != pytest.approx(single[-1]["eval/loss"], rel=1e-6)


def test_a_checkpoint_of_two_ranks_continues_on_one_and_back(tmp_path, single):
    def train(steps):
        return Trainer(job(tmp_path, steps=steps), echo=lambda text: None).run() and None

    run_on_ranks(2, lambda rank: train(1))
    train(3)
    run_on_ranks(2, lambda rank: train(4))
    found = [r["loss"] for r in records(tmp_path) if "loss" in r]
    assert found == pytest.approx([r["loss"] for r in single if "loss" in r], rel=1e-9)


def test_ranks_agree_on_a_stop_that_one_of_them_asks_for(tmp_path):
    class Stop(TrainingHook):
        def on_step_end(self, context):
            import torch.distributed as dist

            if dist.get_rank() == 1 and context.step == 2:
                context.request_stop("I want to")

    def train(rank):
        summary = Trainer(job(tmp_path), hooks=[Stop()], echo=lambda text: None).run()
        return summary.step, summary.stopped

    assert run_on_ranks(2, train) == [(2, "I want to (rank 1)"), (2, "I want to")]


def test_the_reason_to_skip_an_update_is_printed_whichever_rank_gives_it(tmp_path):
    class Skip(TrainingHook):
        may_skip: ClassVar[bool] = True
        reasons: ClassVar[list[str]] = []

        def on_gradients(self, context):
            import torch.distributed as dist

            if dist.get_rank() == 1 and context.step == 2:
                context.skip_update("the gradient jumps")

        def on_step_end(self, context):
            self.reasons.append(context.requests.skip)

    def train(rank):
        printed = []
        Trainer(job(tmp_path), hooks=[Skip()], echo=printed.append).run()
        return Skip.reasons, [line for line in printed if "skipped" in line]

    (first, printed), (second, _) = run_on_ranks(2, train)
    [line] = printed
    assert line.startswith("step 2: ")
    assert line.endswith(": the gradient jumps (rank 1)")
    assert first == ["", "the gradient jumps (rank 1)", "", ""]
    assert second == ["", "the gradient jumps", "", ""]


def test_a_bad_number_of_ranks_is_refused_with_the_arithmetic(tmp_path):
    from forge_core.parallel.layout import plan_layout

    layout, problems = plan_layout(job(tmp_path, parallel={"replicate": Replicate(replicate=3)}), 4)
    check_problems(problems, at("parallel", "replicate 3", "4 ranks"))
    layout, problems = plan_layout(job(tmp_path), 4)
    assert (str(layout), problems) == ("replicate 4", [])


def test_a_gradient_that_one_rank_does_not_have_is_that_of_the_others():
    """As where a router sends one rank's tokens past an expert."""

    def summed(rank):
        used, unused, frozen = (torch.nn.Parameter(torch.zeros(3)) for _ in range(3))
        frozen.requires_grad_(False)
        used.grad = torch.full((3,), 1.0 + rank)
        unused.grad = None if rank else torch.full((3,), 5.0)
        sum_gradients([used, unused, frozen], dist.all_reduce)
        return used.grad.tolist(), unused.grad.tolist(), frozen.grad

    assert run_on_ranks(2, summed) == [([3.0] * 3, [5.0] * 3, None)] * 2


def test_gradients_of_bfloat16_parameters_are_summed_in_float32():
    """As of three ranks whose parts a bfloat16 could not add to 1, in float32 and in bfloat16 gradients."""
    wide, narrow = (torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)) for _ in range(2))
    wide.grad_dtype = torch.float32
    wide.grad = torch.tensor([1.0])
    narrow.grad = torch.tensor([1.0], dtype=torch.bfloat16)

    def reduce(flat):
        for _ in range(2):
            flat += 2**-8

    sum_gradients([wide, narrow], reduce)
    assert (wide.grad.dtype, narrow.grad.dtype) == (torch.float32, torch.bfloat16)
    assert wide.grad.item() == narrow.grad.item() == 1 + 2**-7
