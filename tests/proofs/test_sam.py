"""`sam.py`: a run against a plain loop, what is random, what modules attach, two ranks."""

from __future__ import annotations

import pytest
import torch
from attrs import define
from torch.nn.functional import cross_entropy

from forge_core import TrainingHook
from forge_testing import curves
from forge_testing.curves import Difference
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import refuses

SAM = """
train = { precision = "fp64", micro_batch_size = 2, grad_clip_norm = 0.0 }
executor = { type = "PROOFS/sam.py:SAM", radius = 0.5 }
"""


@define(kw_only=True, slots=False)
class Keep(TrainingHook):
    """The batches of each step, and the weights before and after."""

    def __attrs_post_init__(self):
        self.batches, self.weights = [], []  # no fields: those would be state

    def on_step_begin(self, context):
        self.batches.append(context.batches)
        self.weights.append({name: p.detach().clone() for name, p in context.model.named_parameters()})

    def on_train_end(self, context):
        self.weights.append({name: p.detach().clone() for name, p in context.model.named_parameters()})


def test_a_run_equals_a_plain_loop(job_of, train, build):
    job, keep = job_of("sam", SAM), Keep()
    train(job, keep)
    run = build(job)
    model, optimizer = run.model, run.optimizer
    model.load_state_dict(keep.weights[0])

    def gradients(batches):
        ids, labels = (torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels"))
        logits = model.head.logits(model({"input_ids": ids}))
        return torch.autograd.grad(cross_entropy(logits.flatten(0, 1), labels.flatten()), list(model.parameters()))

    for batches, after in zip(keep.batches, keep.weights[1:], strict=True):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        here = gradients(batches)
        norm = torch.cat([gradient.flatten() for gradient in here]).norm()
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), here, strict=True):
                parameter += 0.5 * gradient / norm
        for parameter, gradient in zip(model.parameters(), gradients(batches), strict=True):
            parameter.grad = gradient
        model.load_state_dict(before)
        optimizer.step()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def test_it_learns_otherwise_than_the_plain_executor(job_of, train, records):
    train(job_of("sam", SAM))
    train(job_of("plain", SAM.replace("executor", "#")))
    sam, plain = records("sam", "loss"), records("plain", "loss")
    assert sam[0] == plain[0]
    assert sam[-1] != plain[-1]


def test_both_passes_drop_the_same(job_of, train, records):
    """So that a way of no length leaves a run as it is."""
    train(job_of("sam", SAM.replace("0.5", "1e-13"), "--model.dropout=0.5"))
    train(job_of("plain", SAM.replace("executor", "#"), "--model.dropout=0.5"))
    assert records("sam", "loss") == pytest.approx(records("plain", "loss"), rel=1e-9)


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_what_modules_attach_counts_once_in_metrics(recompute, job_of, train, records):
    penalised = ("--model.type=forge_testing:PenalisedModel", f"--model.recompute={recompute}")
    train(job_of("sam", SAM, *penalised))
    train(job_of("plain", SAM.replace("executor", "#"), *penalised))
    for key in ("aux/forwards.0", "aux/token"):
        assert records("sam", key)[0] == records("plain", key)[0]


def test_two_ranks_train_like_one(job_of, catalog):
    text = SAM + 'model.type = "forge_testing:SplittableModel"\n'
    expected = curves.train(job_of("one", text), catalog)
    jobs = [job_of(name, text, f"--parallel.{name}.type={name}", *more, ranks=2) for name, *more in LAYOUTS]
    for curves_of_rank in run_on_ranks(2, lambda rank: [curves.train(job, catalog) for job in jobs]):
        for found, (layout, *_) in zip(curves_of_rank, LAYOUTS, strict=True):
            difference = Difference.between(found, expected)
            assert max(difference.loss, difference.norm, difference.gradient) < 1e-9, (layout, difference)
            assert difference.weights < 1e-7, (layout, difference)


LAYOUTS = [("replicate",), ("fsdp",), ("tp", "--parallel.tp.degree=2")]


def test_a_pipeline_is_refused(job_of):
    with refuses("executor", "sam.py:SAM'", "parallel.pp"):
        job_of("pp", SAM + "parallel.pp.degree = 2\n", ranks=2)
