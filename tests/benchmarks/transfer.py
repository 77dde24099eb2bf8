"""Whether rates that were tuned on a small model suit a wide and a deep one, with `mup` and without.

    python tests/benchmarks/transfer.py --record runs.jsonl             # hours of one core; continues where it was
    python tests/benchmarks/transfer.py --record runs.jsonl --fit       # only the table of what is there

A base (width 32, 2 layers) is trained at rates a factor of two apart, and so are 4 and 8 times its width and 4 times
its depth. The base's best rate should be as good for each of them as its own best one: the table has the excess of its
loss, in percent. At the base's sizes the plugin changes nothing, so that both columns have one base. A loss is of the
same held-out text for all runs, after the last step, when the rate has decayed to 0. A run that diverged has an
infinite loss.

Two settings make curves with a clear minimum, 5 to 20 % below both ends: initial values that suit the width of the
base (0.02, the default, is meant for widths above 1,000), and a rate of the embedding that stays as it is while the
others vary, by a table of `[[optimizer.groups]]`. Both were tuned at the base, like the rate itself.

The lowest of noisy losses is not the best rate. So the logarithm of the loss is fitted by a parabola in that of the
rate, over the rates whose mean loss is at most `NEAR` times the lowest, with a constant for each seed, by least
squares: farther away curves are no parabolas, and seeds differ more. Intervals of 90 % are from draws of the parabolas'
coefficients, the base's among them. Their deviation is that of single losses from the parabolas of all sizes of an
optimizer, with noise and what is no parabola in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from forge_core.config.load import load_job
from forge_testing.curves import Training

JOB: Mapping[str, Any] = {
    "train.global_batch_size": 16,
    "train.seq_len": 64,
    "train.device": "cpu",
    "model.type": "transformer",
    "model.attention.type": "gqa",
    "model.ffn.type": "swiglu",
    "model.init_std": 0.1,
    "data.tokenizer.type": "bytes",
    "data.sources": [{"type": "python_stdlib", "held_out_every": 20}],
    "evaluations.held_out.sequences": 256,
    "optimizer.groups": [{"match": "embedding.*", "lr": 2.0**-4}],
    "scheduler.type": "cosine",
    "scheduler.min_ratio": 0.0,
}
WIDTH, LAYERS, HEAD = 32, 2, 16
NEAR, DRAWS = 1.1, 4000
BASE = "base"
SIZES: Mapping[str, tuple[int, int]] = {
    # Factors on width and depth
    BASE: (1, 1),
    "width x 4": (4, 1),
    "depth x 4": (1, 4),
    "width x 8": (8, 1),
}
OPTIMIZERS: Mapping[str, tuple[Mapping[str, Any], Sequence[float]]] = {
    "adamw": ({"optimizer.type": "adamw"}, [2.0**-n for n in range(10, 4, -1)]),
    "muon": ({"optimizer.type": "muon"}, [2.0**-n for n in range(7, 1, -1)]),
    "muon_rms": (
        {"optimizer.type": "muon", "optimizer.scaling": "match_rms_adamw"},
        [2.0**-n for n in range(8, 2, -1)],
    ),
    "lion": ({"optimizer.type": "lion"}, [2.0**-n for n in range(13, 5, -1)]),
    "soap": ({"optimizer.type": "soap"}, [2.0**-n for n in range(10, 2, -1)]),
}


def keys(width: int, layers: int, section: str) -> dict[str, Any]:
    """The keys of a model of a size, below a table."""
    sizes = {"dim": width, "layers": layers, "attention.heads": width // HEAD, "ffn.hidden": 2 * width}
    return {f"{section}.{key}": value for key, value in sizes.items()}


def loss(size: tuple[int, int], optimizer: Mapping[str, Any], rate: float, steps: int, mup: str, seed: int) -> float:
    """The loss of one run; `mup` is the parametrisation, empty for none."""
    wanted = {**JOB, **optimizer, **keys(size[0] * WIDTH, size[1] * LAYERS, "model")}
    wanted |= {"optimizer.lr": rate, "job.seed": seed, "train.steps": steps, "scheduler.warmup_steps": steps // 10}
    if mup:
        wanted |= keys(WIDTH, LAYERS, "plugins.mup.base") | {"plugins.mup.parametrization": mup}
    with Training.of(load_job(overrides=wanted)) as training:
        held_out = training.curve(steps).evaluation["eval/loss"]
    return held_out if math.isfinite(held_out) else math.inf


@frozen
class Curve:
    """Losses of a size, and a parabola through their logarithms, against the binary logarithm of the rate."""

    means: Mapping[float, float]
    """Mean logarithm of the losses, by logarithm of the rate."""
    coefficients: np.ndarray
    """Of the parabola, that of the square first; or draws of them, (draws, 3)."""
    lowest: float
    highest: float
    """The logarithms of rates between which the parabola holds."""

    def value(self, rate: np.ndarray) -> np.ndarray:
        """The logarithm of the loss: of the parabola where it holds, and between means of measured losses elsewhere."""
        bend, slope, height = self.coefficients.T
        measured = np.interp(rate, list(self.means), list(self.means.values()))
        holds = (rate >= self.lowest) & (rate <= self.highest)
        return np.where(holds, height + rate * (slope + rate * bend), measured)

    def best(self) -> np.ndarray:
        """The logarithm of the best rate; at the end of the range where the parabola has no minimum within it."""
        bend, slope = self.coefficients.T[:2]
        low, high = np.full_like(bend, self.lowest), np.full_like(bend, self.highest)
        end = np.where(self.value(low) < self.value(high), low, high)
        with np.errstate(divide="ignore", invalid="ignore"):
            middle = np.clip(-slope / (2 * bend), low, high)
        return np.where(bend > 0, middle, end)


@frozen
class Fit:
    """Least squares of a parabola, through the logarithms of the losses of one size."""

    means: Mapping[float, float]
    """Mean logarithm of the losses, by logarithm of the rate."""
    near: Sequence[float]
    """The logarithms of rates whose losses are fitted."""
    solution: np.ndarray
    """Coefficients: the parabola's, that of the square first, and the levels of seeds."""
    inverse: np.ndarray
    """Their covariance, over the variance of a single loss."""
    squares: float
    """Sum of the squares of what is left."""
    freedom: int

    @classmethod
    def of(cls, losses: Mapping[float, Mapping[int, float]]) -> Fit:
        """Fit losses by logarithm of the rate and by seed."""
        logs = {rate: {seed: math.log(loss) for seed, loss in of_seed.items()} for rate, of_seed in losses.items()}
        means = {rate: float(np.mean(list(of_seed.values()))) for rate, of_seed in sorted(logs.items())}
        near = [rate for rate, mean in means.items() if mean <= min(means.values()) + math.log(NEAR)]
        points = [(rate, seed, log) for rate in near for seed, log in logs[rate].items()]
        seeds = sorted({seed for _, seed, _ in points})
        # A seed's own level (its start and its tokens) is not noise of the comparison, so each has a column. They add
        # up to 0: the parabola is that of the mean seed
        levels = [[(seed == each) - (seed == seeds[-1]) for each in seeds[:-1]] for _, seed, _ in points]
        rows = [[rate**2, rate, 1, *level] for (rate, _, _), level in zip(points, levels, strict=True)]
        design, wanted = np.array(rows, float), np.array([log for *_, log in points])
        solution = np.linalg.lstsq(design, wanted)[0]
        squares = float(((wanted - design @ solution) ** 2).sum())
        inverse = np.linalg.pinv(design.T @ design)
        return cls(means, near, solution, inverse, squares, len(points) - len(solution))

    def curve(self) -> Curve:
        return Curve(self.means, self.solution[:3], self.near[0], self.near[-1])

    def drawn(self, variance: float, freedom: int, seed: int) -> Curve:
        """Draws of the curve, given the variance of a single loss and its degrees of freedom."""
        draw = np.random.default_rng(seed)
        normal = draw.multivariate_normal(np.zeros(len(self.solution)), variance * self.inverse, DRAWS)
        # Student's t, since the variance is an estimate
        drawn = self.solution + normal / np.sqrt(draw.chisquare(freedom, (DRAWS, 1)) / freedom)
        return Curve(self.means, drawn[:, :3], self.near[0], self.near[-1])


def excess(base: Curve, large: Curve) -> np.ndarray:
    """By how much, in percent, the loss at the base's best rate is above the one at the large model's own."""
    return 100 * np.expm1(large.value(base.best()) - large.value(large.best()))


def table(record: Path) -> None:
    """Print losses, best rates and excesses of all runs of a record."""
    runs: dict[str, dict[tuple[str, str], dict[float, dict[int, float]]]] = {}
    for line in record.read_text().splitlines():
        run = json.loads(line)
        of_size = runs.setdefault(run["optimizer"], {}).setdefault((run["size"], run["mup"]), {})
        of_size.setdefault(math.log2(run["rate"]), {})[run["seed"]] = run["loss"]
    for name, sizes in runs.items():
        # A parabola needs three rates
        fits = {size: Fit.of(losses) for size, losses in sizes.items() if len(losses) > 2}
        freedom = sum(fit.freedom for fit in fits.values())
        if (BASE, "") not in fits or not freedom:
            print(f"\n{name}: too few runs")
            continue
        variance = sum(fit.squares for fit in fits.values()) / freedom
        print(f"\n{name}; deviation {100 * math.sqrt(variance):.2f} %, {freedom} degrees of freedom")
        base = fits[BASE, ""]
        for (size, mup), fit in sorted(fits.items(), key=lambda pair: (pair[0][0] != BASE, pair[0][1], pair[0][0])):
            seeds = max(map(len, sizes[size, mup].values()))
            losses = "  ".join(f"2^{rate:.3g} {math.exp(mean):.3f}" for rate, mean in fit.means.items())
            print(f"{size}{f', {mup}' * bool(mup)}, up to {seeds} seeds: {losses}")
            drawn = fit.drawn(variance, freedom, seed=1)
            best, low, high = 2.0 ** np.array([fit.curve().best(), *np.percentile(drawn.best(), [5, 95])])
            print(f"    best rate {best:.4f} [{low:.4f}, {high:.4f}]", end="")
            if size != BASE:
                percents = excess(base.drawn(variance, freedom, seed=2), drawn)
                low, high = np.percentile(percents, [5, 95])
                print(f"; excess {excess(base.curve(), fit.curve()):.2f} % [{low:.2f}, {high:.2f}]", end="")
            print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="JSON lines, one for each run")
    parser.add_argument("--fit", action="store_true", help="train nothing")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon_rms"], choices=[*OPTIMIZERS])
    parser.add_argument("--parametrizations", nargs="+", default=["complete_p", ""], help='"": without the plugin')
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--seeds", nargs="+", type=int, default=[*range(3)])
    parser.add_argument("--rates", nargs="+", type=float, help="in place of the optimizer's")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    options.record.touch()
    known = {
        (run["optimizer"], run["mup"], run["size"], run["rate"], run["seed"])
        for run in map(json.loads, options.record.read_text().splitlines())
    }
    # Seeds outermost: whoever ends it early has fewer seeds of everything
    wanted = itertools.product(options.seeds, options.optimizers, options.sizes, options.parametrizations)
    for seed, name, size, mup in [] if options.fit else wanted:
        optimizer, rates = OPTIMIZERS[name]
        for rate in options.rates or rates:
            # The plugin changes nothing of the base
            run = {"optimizer": name, "mup": "" if size == BASE else mup, "size": size, "rate": rate, "seed": seed}
            if tuple(run.values()) in known:
                continue
            known.add(tuple(run.values()))
            run["loss"] = loss(SIZES[size], optimizer, rate, options.steps, run["mup"], seed)
            with options.record.open("a") as file:
                file.write(json.dumps(run) + "\n")
    table(options.record)


if __name__ == "__main__":
    main()
