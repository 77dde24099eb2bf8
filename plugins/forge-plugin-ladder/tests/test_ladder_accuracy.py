"""Accuracy in a second step: against a known curve and an independent search."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from attrs import evolve
from known_ladders import ladder, loss_of
from scipy.optimize import curve_fit

from forge_core.contracts.errors import ExitCode, JobError
from forge_plugin_ladder.accuracy import curve, fit_curve
from forge_plugin_ladder.command import command
from forge_plugin_ladder.points import write_points

CURVE = np.array([0.25, 0.85, 3.0, 3.9])


def measured(noise=0.0, values=CURVE, **settings):
    """A ladder whose task has four answers, of which the best sizes solve most."""
    generator, points = np.random.default_rng(1), ladder(**settings)
    found = [curve(values, np.array(point.loss)) + generator.normal(0, noise) for point in points]
    return [evolve(point, accuracy=float(each)) for point, each in zip(points, found, strict=True)]


def test_a_known_curve_is_found_and_no_start_overflows():
    found = fit_curve(measured(), [])
    assert found.values == pytest.approx(CURVE, rel=1e-4)
    assert found.at(50.0) == pytest.approx(0.25)
    assert found.at(-50.0) == pytest.approx(0.85)


def test_a_noisy_curve_is_that_of_least_squares():
    points = measured(noise=0.01)
    losses, accuracies = (np.array([getattr(point, name) for point in points]) for name in ("loss", "accuracy"))

    def form(loss, low, high, k, middle):
        return low + (high - low) / (1 + np.exp(k * (loss - middle)))

    # Levenberg and Marquardt's search, without bounds
    other, _ = curve_fit(form, losses, accuracies, p0=CURVE * 1.1)
    assert fit_curve(points, []).values == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (measured(values=np.array([0.25, 0.26, 3.0, 3.9])), "has not left chance yet"),
        (measured()[:5], "a fit needs 6"),
        ([evolve(measured()[0], accuracy=math.nan), *measured()[1:]], "1 of 42 points have no accuracy"),
    ],
    ids=["chance", "too few", "missing"],
)
def test_what_has_no_curve_is_refused(points, message):
    with pytest.raises(JobError, match=message):
        fit_curve(points, [])


def test_a_larger_run_is_predicted_in_two_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ladder.toml").write_text(
        'job = "none.toml"\nmetric = "downstream/arc/bits_per_byte"\naccuracy = "downstream/arc/acc"\n'
        "[sizes.one]\ndim = 8\n[budgets]\nflops = [1e15]\n"
    )
    write_points(tmp_path / "measured.json", measured(noise=0.01, seed=2))
    own = ["ladder.toml", "--points", "measured.json"]
    assert command(["fit", *own, "--resamples", "40"]) == ExitCode.FINISHED
    assert "mean deviation of accuracies 0." in capsys.readouterr().out
    assert command(["predict", *own, "--flops", "1e19", "--json"]) == ExitCode.FINISHED
    [found] = json.loads(capsys.readouterr().out)
    truth = float(curve(CURVE, np.array(loss_of(found["parameters"], found["tokens"]))))
    assert found["accuracy_interval"][0] < truth < found["accuracy_interval"][1]
    assert found["accuracy"] == pytest.approx(truth, abs=0.03)
    assert command(["predict", *own, "--flops", "1e19"]) == ExitCode.FINISHED
    assert "accuracy" in capsys.readouterr().out
    # A fit of another second step is none of this ladder
    (tmp_path / "ladder.toml").write_text((tmp_path / "ladder.toml").read_text().replace("arc/acc", "arc/acc_norm"))
    with pytest.raises(JobError, match="with other accuracy"):
        command(["predict", *own, "--flops", "1e19"])
