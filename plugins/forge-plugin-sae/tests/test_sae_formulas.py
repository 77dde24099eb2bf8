"""Activations, their gradients and the losses, beside the papers' formulas written as loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forge_plugin_sae import L1, BatchTopK, JumpReLU, TopK
from forge_plugin_sae.settings import Training
from forge_plugin_sae.training import Trainer, geometric_median

PRE = torch.randn(6, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CPU = torch.device("cpu")


def trainer(activation, width=5, target_width=None, **keys):
    defaults = {"latents": 12, "lr": 0.01, "warmup": 0, "batch": 16, "buffer": 16, "precision": "fp64"}
    return Trainer(Training(activation=activation, **{**defaults, **keys}), width, target_width, "seed", CPU)


def rows(count, width=5, seed=1):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_topk_keeps_the_largest_positive_of_each_row():
    expected = np.zeros_like(PRE.numpy())
    for row, values in enumerate(PRE.numpy()):
        for at in np.argsort(values)[-7:]:
            expected[row, at] = max(values[at], 0)
    assert (expected != 0).sum() < 7 * 6  # some rows have fewer than 7 positive ones
    np.testing.assert_array_equal(TopK(k=7).activation(10)(PRE), expected)


def test_batch_topk_keeps_the_largest_of_all_rows_and_infers_by_the_mean_of_their_smallest():
    module = BatchTopK(k=2, threshold_decay=0.9).activation(10).double().train()
    batches, smallest = [PRE, PRE * 2, PRE + 0.1], []
    for batch in batches:
        least = np.sort(batch.numpy().ravel())[-12]
        expected = np.where(batch.numpy() >= least, batch.numpy(), 0)
        np.testing.assert_array_equal(module(batch), expected)
        smallest.append(least)
    weights = np.array([0.81, 0.9, 1.0])
    threshold = (weights * smallest).sum() / weights.sum()
    assert float(module.threshold) == pytest.approx(threshold, rel=1e-12)
    np.testing.assert_array_equal(module.infer(PRE), np.where(PRE.numpy() > float(module.threshold), PRE.numpy(), 0))


def test_a_batch_without_an_active_latent_leaves_the_threshold():
    module = BatchTopK(k=2).activation(10).double().train()
    module(PRE)
    before = float(module.threshold)
    module(-PRE.abs())
    assert float(module.threshold) == before > 0


@pytest.mark.parametrize("target", [0.0, 2.0])
def test_jumprelu_has_the_gradients_of_its_estimators(target):
    settings = JumpReLU(target_l0=target, coefficient=0.7, bandwidth=0.4, threshold=0.3)
    module = settings.activation(10).double()
    pre, up = PRE.clone().requires_grad_(), torch.arange(60.0, dtype=torch.float64).view(6, 10)
    latents = module(pre)
    ((latents * up).sum() + module.penalty(pre, latents)).backward()
    z, theta, width = PRE.numpy(), float(module.threshold[0]), 0.4
    active = z > theta
    l0 = active.sum(1).mean()
    slope = 0.7 * (2 * (l0 / target - 1) / target if target else 1)
    expected = np.zeros(10)
    for row in range(6):
        for at in range(10):
            if abs(z[row, at] - theta) < width / 2:
                expected[at] += -theta / width * up[row, at] - slope / width / 6
    np.testing.assert_allclose(latents.detach(), z * active)
    np.testing.assert_allclose(pre.grad.numpy(), up.numpy() * active)
    np.testing.assert_allclose(module.threshold.grad, expected, rtol=1e-12)
    assert float(module.penalty(pre, latents)) == pytest.approx(0.7 * ((l0 / target - 1) ** 2 if target else l0))


def test_thresholds_never_become_negative():
    module = JumpReLU().activation(3)
    module.threshold.data.fill_(-1.0)
    assert module(torch.tensor([[-0.5, 0.5, 0.0]])).tolist() == [[0.0, 0.5, 0.0]]


def test_l1_adds_the_mean_sum_of_latents():
    module = L1(coefficient=0.3).activation(10)
    expected = 0.3 * np.maximum(PRE.numpy(), 0).sum(1).mean()
    assert float(module.penalty(PRE, module(PRE))) == pytest.approx(expected)


def test_an_update_is_adam_on_the_sphere():
    """Of a plain autoencoder, beside torch's Adam on a loss written anew."""
    own, x = trainer(L1(coefficient=0.1), grad_clip_norm=0.5), rows(16)
    own.start_from(x)
    weights = {n: p.detach().clone().requires_grad_() for n, p in own.coder.named_parameters()}
    adam = torch.optim.Adam(weights.values(), 0.01)
    for _ in range(5):
        loss = own.update(x, x)
        latents = ((x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]).relu()
        error = x - latents @ weights["W_dec"] - weights["b_dec"]
        expected = (error**2).sum(1).mean() + 0.1 * latents.sum(1).mean()
        assert float(loss) == pytest.approx(expected.item(), rel=1e-12)
        expected.backward()
        with torch.no_grad():
            decoder = weights["W_dec"]
            for row in range(12):
                decoder.grad[row] -= torch.dot(decoder.grad[row], decoder[row]) * decoder[row]
        torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        adam.step()
        adam.zero_grad()
        decoder.data /= decoder.data.norm(dim=1, keepdim=True)
        for name, parameter in own.coder.named_parameters():
            torch.testing.assert_close(parameter.data, weights[name].data, rtol=1e-12, atol=1e-12)


def test_dead_latents_learn_what_the_others_leave():
    own, x = trainer(TopK(k=2, auxiliary=0.5), dead_after=16), rows(16)
    own.coder.b_enc.data[4:] = -100  # eight that are never active
    own.update(x, x)
    pre, error = own.coder.pre_activations(x), x - own.coder(x)
    pre = pre + torch.linspace(90, 110, 12)  # now some of these would be
    got = own._revival_loss(pre, error.detach())
    expected = np.zeros(16)
    decoder, left = own.coder.W_dec.detach().numpy(), error.detach().numpy()
    for row, values in enumerate(pre.detach().numpy()):
        dead = [at for at in range(12) if own.dead[at]]
        largest = sorted(dead, key=lambda at: -values[at])[:2]  # half of the width
        guess = sum(max(values[at], 0) * decoder[at] for at in largest)
        expected[row] = ((left[row] - guess) ** 2).sum()
    assert own.dead.sum() >= 8
    assert float(got) == pytest.approx(expected.mean() / ((left - left.mean(0)) ** 2).sum(1).mean(), rel=1e-12)
    got.backward()
    assert own.coder.W_dec.grad[own.dead].abs().sum() > 0
    assert own.coder.W_dec.grad[~own.dead].abs().sum() == 0


def test_the_geometric_median_is_nearest_to_all_points():
    points = torch.cat([rows(40), torch.full((5, 5), 1000.0, dtype=torch.float64)])
    median = geometric_median(points, iterations=1000, tolerance=1e-12)
    units = (points - median) / (points - median).norm(dim=1, keepdim=True)
    assert units.sum(0).norm() < 1e-6  # its gradient
    assert median.norm() < 1


def test_known_directions_are_found():
    size = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    true = torch.nn.functional.normalize(torch.randn(16, 12, **size), dim=1)
    active = (torch.rand(40000, 16, **size) < 0.1) * (0.5 + torch.rand(40000, 16, **size))
    own = trainer(TopK(k=2), 12, latents=32, batch=128, buffer=1024, lr=0.005, dead_after=2000)
    own.add(active @ true + 3)
    own.finish()
    assert own.updates == own.inferred()["updates"] == 313
    similar = (true @ own.coder.W_dec.T).detach().max(1).values
    assert (similar > 0.9).double().mean() > 0.9
    assert float(own.metrics()["explained_variance"]) > 0.6
