"""`Executor.evaluate` with a measure in the place of the job's loss."""

from __future__ import annotations

import torch

from forge_core.data.loader import evaluation_batches
from forge_core.losses import loss_output


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
