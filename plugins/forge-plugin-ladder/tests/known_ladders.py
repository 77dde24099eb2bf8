"""Synthetic ladders of a known law, as Besiroglu et al. 2024 (arXiv:2404.10102) estimate it."""

from __future__ import annotations

import math

import numpy as np

from forge_plugin_ladder import Point

LAW = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}
EXPONENT = LAW["beta"] / (LAW["alpha"] + LAW["beta"])


def loss_of(n, d):
    return LAW["E"] + LAW["A"] * n ** -LAW["alpha"] + LAW["B"] * d ** -LAW["beta"]


def ladder(noise=0.0, seed=0, drift=0.0, budgets=6, sizes=7, loss=loss_of):
    """Points from 1e15 to 1e18 FLOPs, C = 6 N D; `drift` moves the middle of the sizes with the budget."""
    generator, points = np.random.default_rng(seed), []
    for flops in map(float, np.geomspace(1e15, 1e18, budgets)):
        middle = math.sqrt(flops / 120) * (3 * (flops / 1e15) ** -drift if drift else 1)
        for n in map(float, middle * np.geomspace(1 / 8, 8, sizes)):
            d = flops / 6 / n
            seen = float(loss(n, d) * np.exp(generator.normal(0, noise) if noise else 0.0))
            name = f"{flops:.2e}-{n:.2e}"
            points.append(Point(run=name, parameters=n, parameters_total=1.1 * n, tokens=d, flops=flops, loss=seen))
    return points
