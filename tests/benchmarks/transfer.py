"""Whether rates that were tuned on a small model suit a wide and a deep one, with `mup` and without.

    python tests/benchmarks/transfer.py --record runs.jsonl             # hours of one core; continues where it was
    python tests/benchmarks/transfer.py --record runs.jsonl --fit       # only the table of what is there

A base (2 layers) is trained at a grid of rates, a factor of two apart, and so are 4 and 8 times its width and
4 times its depth. The base's best rate should be as good for each of them as its own best one: the table has the excess
of its loss, in percent. Losses are means over the last tenth of the steps, of tokens that no run has seen before; all
runs of a seed see the same ones. A run that diverged has an infinite loss.

The lowest of noisy means is not the best rate: two rates a factor of two apart differ in less than two seeds do. So the
logarithm of the loss is fitted by a parabola in that of the rate, over the rates within a factor of `REACH` of the
lowest mean, with a constant for each seed, and both the best rate and the excess are of the parabola. Intervals of 90 %
are from draws of whole seeds with replacement, the base's among them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge_core.config.load import load_job
from forge_testing.curves import Training

JOB: Mapping[str, Any] = {
    "train.global_batch_size": 16,
    "train.seq_len": 64,
    "train.device": "cpu",
    "model.type": "transformer",
    "model.attention.type": "gqa",
    "model.attention.qk_norm": True,
    "model.ffn.type": "swiglu",
    "data.tokenizer.type": "bytes",
    "data.sources": [{"type": "python_stdlib"}],
    "scheduler.type": "cosine",
    "scheduler.min_ratio": 0.0,
}
LAYERS, HEAD = 2, 8
REACH, DRAWS = 2, 1000  # Octaves; draws of seeds
SIZES: Mapping[str, tuple[int, int]] = {
    # Factors on width and depth
    "base": (1, 1),
    "width x 4": (4, 1),
    "width x 8": (8, 1),
    "depth x 4": (1, 4),
}
OPTIMIZERS: Mapping[str, tuple[Mapping[str, Any], Sequence[float]]] = {
    "adamw": ({"optimizer.type": "adamw"}, [2.0**-n for n in range(9, 3, -1)]),
    "muon": ({"optimizer.type": "muon"}, [2.0**-n for n in range(7, 1, -1)]),
    "muon_rms": (
        {"optimizer.type": "muon", "optimizer.scaling": "match_rms_adamw"},
        [2.0**-n for n in range(10, 2, -1)],
    ),
    "lion": ({"optimizer.type": "lion"}, [2.0**-n for n in range(13, 5, -1)]),
    "soap": ({"optimizer.type": "soap"}, [2.0**-n for n in range(10, 2, -1)]),
}


def keys(width: int, layers: int, section: str) -> dict[str, Any]:
    """The keys of a model of a size, below a table."""
    sizes = {"dim": width, "layers": layers, "attention.heads": width // HEAD, "ffn.hidden": 3 * width}
    return {f"{section}.{key}": value for key, value in sizes.items()}


def loss(size: tuple[int, int], optimizer: Mapping[str, Any], rate: float, options: Any, mup: str, seed: int) -> float:
    """The loss of one run; `mup` is the parametrisation, empty for none."""
    width, layers = size[0] * options.width, size[1] * LAYERS
    wanted = {**JOB, **optimizer, **keys(width, layers, "model"), "optimizer.lr": rate, "job.seed": seed}
    wanted |= {"train.steps": options.steps, "scheduler.warmup_steps": options.steps // 10}
    if mup:
        wanted |= keys(options.width, LAYERS, "plugins.mup.base") | {"plugins.mup.parametrization": mup}
    with Training.of(load_job(overrides=wanted)) as training:
        losses = training.curve(options.steps).losses[-max(1, options.steps // 10) :]
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf


class Curve(NamedTuple):
    """A parabola through logarithms of losses, against the binary logarithm of the rate."""

    height: float
    slope: float
    bend: float
    lowest: float
    highest: float

    @property
    def best(self) -> float:
        """The logarithm of the best rate; at the end of the range where the parabola has no minimum within it."""
        if self.bend > 0:
            return min(max(-self.slope / (2 * self.bend), self.lowest), self.highest)
        return min((self.lowest, self.highest), key=self.at)

    def at(self, rate: float) -> float:
        return self.height + rate * (self.slope + rate * self.bend)


def fitted(losses: Mapping[float, Sequence[float]]) -> Curve:
    """The curve of a size.

    Args:
        losses: by the logarithm of the rate, one for each seed, in the same order.
    """
    means = {rate: sum(values) / len(values) for rate, values in losses.items()}
    lowest = min(means, key=means.__getitem__)
    near = sorted(rate for rate in means if abs(rate - lowest) <= REACH and math.isfinite(means[rate]))
    # A seed's own level (its start and its tokens) is not noise of the comparison, so each has a constant
    levels = [sum(math.log(losses[rate][seed]) for rate in near) / len(near) for seed in range(len(losses[lowest]))]
    overall = sum(levels) / len(levels)
    x = np.array([rate for rate in near for _ in levels])
    y = np.array([math.log(losses[rate][seed]) - level + overall for rate in near for seed, level in enumerate(levels)])
    bend, slope, height = np.polyfit(x, y, 2)
    return Curve(float(height), float(slope), float(bend), near[0], near[-1])


def excess(base: Mapping[float, Sequence[float]], large: Mapping[float, Sequence[float]]) -> tuple[float, float, float]:
    """The base's and the large model's best rate (logarithms), and the excess of the large one's loss in percent."""
    tuned, own = fitted(base).best, fitted(large)
    rate = min(max(tuned, own.lowest - 1), own.highest + 1)
    return tuned, own.best, 100 * math.expm1(own.at(rate) - own.at(own.best))


def drawn(rates: Mapping[float, Mapping[int, float]], seeds: Sequence[int]) -> dict[float, list[float]]:
    """The losses of these seeds by rate, from lowest to highest."""
    return {rate: [of_seed[seed] for seed in seeds] for rate, of_seed in sorted(rates.items())}


def table(record: Path) -> None:
    """Print best rates and excesses of all complete seeds of a record."""
    runs: dict[tuple[str, str], dict[str, dict[float, dict[int, float]]]] = {}
    for line in record.read_text().splitlines():
        run = json.loads(line)
        sizes = runs.setdefault((run["optimizer"], run["mup"]), {})
        sizes.setdefault(run["size"], {}).setdefault(math.log2(run["rate"]), {})[run["seed"]] = run["loss"]
    for (name, mup), sizes in runs.items():
        seeds = sorted(set.intersection(*(set(of_seed) for rates in sizes.values() for of_seed in rates.values())))
        print(f"\n{name}, {mup or 'without the plugin'}; seeds {seeds}")
        if not seeds:
            continue

        generator = np.random.default_rng(0)
        draws = generator.choice(seeds, (DRAWS, len(seeds)))
        for size in sizes:
            tuned, own, percent = excess(drawn(sizes["base"], seeds), drawn(sizes[size], seeds))
            percents = [excess(drawn(sizes["base"], draw), drawn(sizes[size], draw))[2] for draw in draws]
            low, high = np.percentile(percents, [5, 95])
            row = "  ".join(f"{sum(values) / len(values):.4f}" for values in drawn(sizes[size], seeds).values())
            rates = f"best {2**own:.4g}, base {2**tuned:.4g}"
            print(f"{size:10}  {row}  {rates}: excess {percent:.2f} % [{low:.2f}, {high:.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="JSON lines, one for each run")
    parser.add_argument("--fit", action="store_true", help="train nothing")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"], choices=[*OPTIMIZERS])
    parser.add_argument("--parametrizations", nargs="+", default=["complete_p", ""], help='"": without the plugin')
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--seeds", nargs="+", type=int, default=[*range(4)])
    parser.add_argument("--rates", nargs="+", type=float, help="in place of the optimizer's")
    parser.add_argument("--width", type=int, default=32, help="of the base")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    options.record.touch()
    known = {
        (run["optimizer"], run["mup"], run["size"], run["rate"], run["seed"])
        for run in map(json.loads, options.record.read_text().splitlines())
    }
    # Seeds outermost: whoever ends it early has fewer seeds of everything
    wanted = itertools.product(options.seeds, options.optimizers, options.parametrizations, options.sizes)
    for seed, name, mup, size in [] if options.fit else wanted:
        optimizer, rates = OPTIMIZERS[name]
        for rate in options.rates or rates:
            if (name, mup, size, rate, seed) in known:
                continue
            value = loss(SIZES[size], optimizer, rate, options, mup, seed)
            run = {"optimizer": name, "mup": mup, "size": size, "rate": rate, "seed": seed, "loss": value}
            with options.record.open("a") as file:
                file.write(json.dumps(run) + "\n")
    table(options.record)


if __name__ == "__main__":
    main()
