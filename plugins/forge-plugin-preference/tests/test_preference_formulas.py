"""Each loss against the formulas of the papers and of TRL, written out here: values, gradients, and whole steps.

TRL's are those of `dpo_trainer.py`, `kto_trainer.py`, `cpo_trainer.py` (SimPO) and `orpo_trainer.py` at f2cd57710.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from preference_runs import LENGTH, WithHooks, pair_lines, preference_job, prepared, single_lines, write_lines
from torch import Tensor
from torch.nn.functional import logsigmoid, sigmoid

from forge_core.engine.build import build_context, build_tokenizer
from forge_core.engine.evaluation import evaluate
from forge_core.engine.step import Stepper, metrics
from forge_plugin_losses.teacher import load_trained
from forge_plugin_preference import DPO, IPO, KTO, ORPO, Answers, Pairs, SimPO
from forge_plugin_preference.encoding import answering
from forge_testing.catalogs import installed
from forge_testing.curves import Training


def trl_dpo(c: Tensor, r: Tensor, n: Tensor, m: Tensor, ref_c: Tensor, ref_r: Tensor, beta: float) -> Tensor:
    return -logsigmoid(beta * ((c - ref_c) - (r - ref_r)))


def trl_conservative(c, r, n, m, ref_c, ref_r, beta, smoothing=0.2):
    z = beta * ((c - r) - (ref_c - ref_r))
    return -logsigmoid(z) * (1 - smoothing) - logsigmoid(-z) * smoothing


def trl_ipo(c, r, n, m, ref_c, ref_r, beta):
    return ((c - ref_c) / n - (r - ref_r) / m - 1 / (2 * beta)) ** 2


def paper_ipo(c, r, n, m, ref_c, ref_r, beta):
    return ((c - ref_c) - (r - ref_r) - 1 / (2 * beta)) ** 2


def trl_simpo(c, r, n, m, ref_c, ref_r, beta, gamma=0.7):
    return -logsigmoid(beta * ((c / n - r / m) - gamma / beta))


def trl_orpo(c, r, n, m, ref_c, ref_r, beta):
    """Its cross-entropy is of the answer here, as in the paper."""

    def log1mexp(x: Tensor) -> Tensor:  # log(1 - exp(x)), TRL's own way
        return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))

    log_odds = (c / n - r / m) - (log1mexp(c / n) - log1mexp(r / m))
    return -c / n - beta * logsigmoid(log_odds)


PAIRED: dict[str, tuple[Any, Callable[..., Tensor]]] = {
    "dpo": (DPO(beta=0.3), trl_dpo),
    "dpo, smoothed": (DPO(beta=0.3, label_smoothing=0.2), trl_conservative),
    "ipo": (IPO(beta=0.3), trl_ipo),
    "ipo, summed": (IPO(beta=0.3, by_token=False), paper_ipo),
    "simpo": (SimPO(beta=0.3, gamma=0.7), trl_simpo),
    "orpo": (ORPO(beta=0.3), trl_orpo),
}


def numbers(seed: int) -> tuple[Tensor, ...]:
    """Log p of both answers, their tokens, and log p under the reference: from likely to very unlikely."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(1, 40, (64,), generator=generator).double() for _ in range(2)]
    scale = torch.logspace(-3, 1, 64, dtype=torch.float64)
    log_p = [-(torch.rand(64, generator=generator, dtype=torch.float64) + 0.1) * scale * n for n in (*tokens, *tokens)]
    return log_p[0].requires_grad_(), log_p[1].requires_grad_(), *tokens, *log_p[2:]


@pytest.mark.parametrize("name", PAIRED)
def test_pairs_give_the_losses_of_trl(name: str) -> None:
    loss, formula = PAIRED[name]
    c, r, n, m, ref_c, ref_r = numbers(1)
    actual = loss.losses(Answers(c, n, ref_c), Answers(r, m, ref_r))
    expected = formula(c, r, n, m, ref_c, ref_r, loss.beta)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    gradients = [torch.autograd.grad(values.sum(), (c, r)) for values in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("z", [0.0, 1.5])
def test_single_answers_give_the_losses_of_trl(z: float) -> None:
    loss = KTO(beta=0.3, desirable_weight=1.3, undesirable_weight=0.6)
    c, r, n, m, ref_c, ref_r = numbers(2)
    desirable = torch.arange(128) < 64
    answers = Answers(torch.cat([c, r]), torch.cat([n, m]), torch.cat([ref_c, ref_r]))
    actual = loss.losses(answers, desirable, torch.full((128,), z, dtype=torch.float64))
    chosen = 1.3 * (1 - sigmoid(0.3 * ((c - ref_c) - z)))
    rejected = 0.6 * (1 - sigmoid(0.3 * (z - (r - ref_r))))
    torch.testing.assert_close(actual, torch.cat([chosen, rejected]), rtol=1e-9, atol=1e-12)
    gradients = [torch.autograd.grad(v.sum(), (c, r)) for v in (actual, chosen.sum() + rejected.sum())]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_certain_answers_keep_the_odds_ratio_finite() -> None:
    certain, other = torch.zeros(1, requires_grad=True), torch.tensor([-1.0])
    loss = ORPO().losses(Answers(certain, torch.ones(1)), Answers(other, torch.ones(1)))
    assert torch.isfinite(loss).all()
    assert torch.isfinite(torch.autograd.grad(loss.sum(), certain)[0]).all()


# --- whole steps -----------------------------------------------------------------------------------------------------

STEPS = {
    "dpo": DPO,
    "dpo, with nll": lambda reference, beta: DPO(reference=reference, beta=beta, nll_weight=0.3),
    "ipo": IPO,
    "simpo": lambda reference, beta: SimPO(beta=beta, gamma=0.7),
    "orpo": lambda reference, beta: ORPO(beta=beta),
    "kto": KTO,
    "kto, z = 0": lambda reference, beta: KTO(reference=reference, beta=beta, estimate_z=False, desirable_weight=2.0),
}


def whole_batch(folder: Path, loss: Any, packed: bool) -> Any:
    """A job whose batch has every example once."""
    folder.mkdir(exist_ok=True)
    lines = single_lines(10) if isinstance(loss, KTO) else pair_lines(8)
    source = Pairs(path=write_lines(folder / "few.jsonl", lines), packed=packed, row_examples=4)
    job = preference_job(folder, loss, steps=1, global_batch_size=1)
    data = attrs.evolve(job.data, sources=(source,))
    context = build_context(attrs.evolve(job, data=data), installed(), None)
    rows = len(source.build(attrs.evolve(context, tokenizer=build_tokenizer(job, context))))
    train = attrs.evolve(job.train, global_batch_size=rows, micro_batch_size=rows // 2 if rows % 2 == 0 else rows)
    return attrs.evolve(job, data=data, train=train)


def step_of(job: Any) -> tuple[dict[str, float], list[Tensor], Training]:
    """Metrics and gradients of the first step."""
    with Training.of(job, installed()) as training:
        loader = WithHooks(training.run, training.loader)
        _, sums = Stepper(training.run).gradients(loader.next_step(), 0)
        values = {name: float(value) for name, value in metrics(sums).items() if isinstance(name, str)}
    return values, [item.parameter.grad.clone() for item in training.run.parameters], training


def by_formula(job: Any, training: Training, rows: Any = None) -> tuple[Tensor, list[Tensor]]:
    """The mean loss over examples, every document in a row by itself, all logits at once; and its gradients."""
    run, loss = training.run, job.loss
    reference = load_trained(Path(prepared().reference), run.context).model
    examples = [example for row in rows or run.datasets[0].rows for example in row]

    def log_p(model: Any, document: Any) -> Tensor:
        ids = torch.from_numpy(document.ids).long()
        hidden = model({"input_ids": ids[None, :-1]})
        values = model.head.logits(hidden)[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return values[torch.from_numpy(document.learned[1:])]

    def pair(example: Any) -> Tensor:
        (c, r), (ref_c, ref_r) = ([log_p(m, d) for d in example.documents] for m in (run.model, reference))
        lengths = [torch.tensor(float(len(values))).double() for values in (c, r)]
        sums = [values.sum() for values in (c, r)]
        references = [values.sum().detach() for values in (ref_c, ref_r)]
        formula = {DPO: trl_dpo, IPO: trl_ipo, SimPO: trl_simpo, ORPO: trl_orpo}[type(loss)]
        value = formula(*sums, *lengths, *references, loss.beta)
        return value - getattr(loss, "nll_weight", 0.0) * sums[0] / lengths[0]

    def ratio(document: Any) -> Tensor:
        return log_p(run.model, document).sum() - log_p(reference, document).sum().detach()

    def single(example: Any, z: Tensor) -> Tensor:
        value = loss.beta * (ratio(example.documents[0]) - z)
        if example.desirable[0]:
            return loss.desirable_weight * (1 - sigmoid(value))
        return loss.undesirable_weight * (1 - sigmoid(-value))

    if isinstance(loss, KTO):
        ordered = sorted(examples, key=lambda example: example.line)
        others = [*ordered[1:], *ordered[:1]]
        mismatched = [answering(a.documents[0], b.documents[0]) for a, b in zip(ordered, others, strict=True)]
        z = torch.stack([ratio(each) for each in mismatched]).mean().detach().clamp(min=0)
        mean = torch.stack([single(each, z if loss.estimate_z else z * 0) for each in examples]).mean()
    else:
        mean = torch.stack([pair(each) for each in examples]).mean()
    return mean, list(torch.autograd.grad(mean, [item.parameter for item in run.parameters]))


@pytest.mark.parametrize("name", STEPS)
def test_steps_on_packed_rows_equal_the_formula_on_separate_documents(name: str, tmp_path: Path) -> None:
    loss = STEPS[name](reference=prepared().reference, beta=0.5)
    job = whole_batch(tmp_path, loss, packed=True)
    values, gradients, training = step_of(job)
    assert max(map(len, training.run.datasets[0].rows)) > 1
    mean, expected = by_formula(job, training)
    objective = values[loss.metric] + getattr(loss, "nll_weight", 0.0) * values.get("loss/nll", 0.0)
    assert objective == pytest.approx(mean.item(), rel=1e-10)
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_packed_rows_and_rows_of_one_example_give_the_same(name: str, tmp_path: Path) -> None:
    loss = STEPS[name](reference=prepared().reference, beta=0.5)
    (packed, gradients, one), (values, expected, other) = (
        step_of(whole_batch(tmp_path / str(packed), loss, packed)) for packed in (True, False)
    )
    assert len(one.run.datasets[0]) < len(other.run.datasets[0])
    assert packed.pop("loss") == pytest.approx(values.pop("loss"), rel=1e-12)
    assert packed == pytest.approx(values, rel=1e-10)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-14)


def test_rows_are_not_longer_than_the_job_says(tmp_path: Path) -> None:
    job = whole_batch(tmp_path, SimPO(), packed=True)
    with Training.of(job, installed()) as training:
        assert {len(training.run.datasets[0][n]["labels"]) for n in range(5)} == {LENGTH}


@pytest.mark.parametrize("loss", [DPO, KTO])
def test_the_evaluation_is_the_formula_on_what_is_held_out(loss: Any, tmp_path: Path) -> None:
    """The last batch is filled with rows that do not count."""
    job = preference_job(tmp_path, loss)
    with Training.of(job, installed()) as training:
        # Trained first: the z of KTO is then above 0
        attrs.evolve(training, loader=WithHooks(training.run, training.loader)).curve(3)
        rows = training.run.held_out.datasets[0].rows
        assert len(rows) % job.train.global_batch_size
        found = evaluate(training.run, 0)
        mean, _ = by_formula(job, training, rows)
    assert found.get("eval/kto/z", 1.0) > 0
    assert found[f"eval/{job.loss.metric}"] == pytest.approx(mean.item(), rel=1e-10)
