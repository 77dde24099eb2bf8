"""`Executor.evaluate` with a measure in the place of the job's loss."""

from __future__ import annotations

import torch
from attrs import define, frozen

from forge_core.contracts.components import ExecutorComponent
from forge_core.data.loader import evaluation_batches
from forge_core.engine.executor import Plain
from forge_core.losses import loss_output
from forge_testing import Numbers


def test_a_measure_takes_the_place_of_the_loss(make_job, build):
    run = build(make_job(micro_batch_size=2))
    seen = []

    def spread(head, hidden, batch):
        assert not torch.is_grad_enabled()
        seen.append(len(hidden))
        valid = batch["labels"] != -100
        values = head.logits(hidden).std(-1).where(valid, 0)
        return loss_output(values.sum(), values, valid)

    batches = list(evaluation_batches(run.held_out, 0, run.job, run.context))
    loss = run.executor.evaluate(batches).loss_sum
    output = run.executor.evaluate(batches, spread)
    assert seen == [2] * len(batches)
    expected = torch.cat([run.model.head.logits(run.model(batch)).std(-1).sum(-1) for batch in batches])
    torch.testing.assert_close(output.per_sequence[0], expected.detach())
    torch.testing.assert_close(output.loss_sum, expected.detach().sum())
    assert output.count == sum(batch["labels"].numel() for batch in batches)
    assert run.executor.evaluate(batches).loss_sum == loss


@define
class Recording:
    """Passes on to the core's executor, and keeps how many micro-batches it was given."""

    executor: object
    given: list

    def train_step(self, batches, denominator):
        return self.executor.train_step(batches, denominator)

    def evaluate(self, batches, measure=None):
        self.given.append(len(batches))
        return self.executor.evaluate(batches, measure)


GIVEN = []


@frozen(kw_only=True)
class Records(ExecutorComponent):
    def build(self, context, model, loss, stages):
        return Recording(Plain().build(context, model, loss, stages), GIVEN)


def test_held_out_sequences_come_as_many_micro_batches_at_a_time_as_a_step_has(make_job, train):
    """Else the ranks of a pipeline evaluate in turn, and all but one of them wait."""
    GIVEN.clear()
    data = {"sources": (Numbers(held_out=7),)}
    job = make_job(global_batch_size=6, micro_batch_size=2, data=data, steps=1, executor=Records())
    summary = train(job)
    assert GIVEN == [3, 1]
    assert summary.evaluation["eval/tokens"] == 7 * job.train.seq_len
