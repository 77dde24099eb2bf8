"""The gradient noise scale: unbiased by enumeration, and beside gradients that are computed here.

Its layouts are those of `test_training_stats.py`.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from attrs import define, frozen
from stats_jobs import job, lines
from torch.nn import functional as F

from forge_core import TrainingHook
from forge_core.contracts.components import LossComponent
from forge_plugin_taps.stats import NoiseScale
from forge_plugin_taps.stats.noise_scale import estimates
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.suites import HookSuite


class TestNoiseScale(HookSuite):
    component = NoiseScale(interval=2)


def test_the_mean_over_all_halves_is_the_covariance_of_the_samples():
    """Of n samples drawn without replacement, E|mean of b|² - |mean of n|² = tr Σ (1/b - 1/n), Σ with n - 1."""
    gradients = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = gradients.mean(0).square().sum()
    sizes = torch.tensor(4.0), torch.tensor(8.0)
    every = [
        torch.stack(estimates(gradients[list(half)].mean(0).square().sum(), whole, *sizes))
        for half in combinations(range(8), 4)
    ]
    variance, square = torch.stack(every).mean(0)
    trace = torch.cov(gradients.T).trace()
    assert variance.item() == pytest.approx(trace.item(), rel=1e-12)
    assert square.item() == pytest.approx((whole - trace / 8).item(), rel=1e-12)


@define(kw_only=True, slots=False)
class ByHand(TrainingHook):
    """Computes the gradients of even rows and of all rows by themselves."""

    def on_step_begin(self, context):
        rows = {key: torch.cat([batch[key] for batch in context.batches]) for key in ("input_ids", "labels")}
        self.squares, self.counts = [], []
        for part in (slice(None, None, 2), slice(None)):
            batch = {key: value[part] for key, value in rows.items()}
            logits = context.model.head(context.model(batch))
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            gradients = torch.autograd.grad(loss, [*context.model.parameters()])
            self.squares.append(sum(each.square().sum() for each in gradients).item())
            self.counts.append((batch["labels"] != -100).sum().item())


def test_a_sampled_step_has_the_numbers_of_the_definition(tmp_path):
    own = ByHand()
    found = lines(job(tmp_path, None, plugins={"noise_scale": NoiseScale(interval=2, smoothing=0.25)}), own)
    assert not found[1]
    small, whole = own.squares
    half, tokens = own.counts
    variance = (small - whole) / (1 / half - 1 / tokens)
    square = (tokens * whole - half * small) / (tokens - half)
    assert found[4]["stats/gradient_variance"] == pytest.approx(variance, rel=1e-11)
    assert found[4]["stats/gradient_square"] == pytest.approx(square, rel=1e-11)
    both = [(found[2][f"stats/{name}"], found[4][f"stats/{name}"]) for name in ("gradient_variance", "gradient_square")]
    upper, lower = (0.25 * first + second for first, second in both)
    assert found[4]["stats/noise_scale"] == pytest.approx(upper / lower, rel=1e-12)


@frozen(kw_only=True)
class OfPairs(LossComponent):
    """A loss whose rows belong together."""

    is_cross_entropy = False


def test_jobs_without_independent_rows_or_sampled_steps_are_refused(tmp_path):
    made = job(tmp_path, None, plugins={"noise": NoiseScale()}, loss=OfPairs(), global_batch_size=1, micro_batch_size=1)
    check_problems(
        problems_of(made),
        at("plugins.noise.interval", "train.steps 4", "100"),
        at("plugins.noise", "global_batch_size", "at least 2"),
        at("plugins.noise", "independent", "cross-entropy"),
    )
