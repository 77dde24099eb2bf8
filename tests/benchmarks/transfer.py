"""Whether rates that were tuned on a small model suit a wide and a deep one, with `mup` and without.

    python tests/benchmarks/transfer.py                     # about an hour of one slow core
    python tests/benchmarks/transfer.py --optimizers muon --seeds 0 1

A base (2 layers) is trained at a grid of rates, a factor of two apart, and so are 4 and 8 times its width and
4 times its depth. The base's best rate should be as good for each of them as its own best one: the table has the excess
of its loss, in percent. Losses are means over the last tenth of the steps, of tokens that no run has seen before; all
runs see the same ones. A run that diverged has an infinite loss.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

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
SIZES: Mapping[str, tuple[int, int]] = {
    # Factors on width and depth
    "base": (1, 1),
    "width x 4": (4, 1),
    "width x 8": (8, 1),
    "depth x 4": (1, 4),
}
OPTIMIZERS: Mapping[str, tuple[Mapping[str, Any], Sequence[float]]] = {
    "adamw": ({"optimizer.type": "adamw"}, [2.0**-n for n in range(10, 3, -1)]),
    "muon": ({"optimizer.type": "muon"}, [2.0**-n for n in range(9, 2, -1)]),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"], choices=[*OPTIMIZERS])
    parser.add_argument("--parametrizations", nargs="+", default=["complete_p", ""], help='"": without the plugin')
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rates", nargs="+", type=float, help="in place of the optimizer's")
    parser.add_argument("--width", type=int, default=16, help="of the base")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    for name in options.optimizers:
        optimizer, rates = OPTIMIZERS[name]
        rates = options.rates or rates
        for mup in options.parametrizations:
            begun, tuned = time.monotonic(), 0
            print(f"\n{name}, {mup or 'without the plugin'}; rates {', '.join(f'{rate:.3g}' for rate in rates)}")
            for size in options.sizes:
                means = [
                    sum(loss(SIZES[size], optimizer, rate, options, mup, seed) for seed in options.seeds)
                    / len(options.seeds)
                    for rate in rates
                ]
                best = min(range(len(rates)), key=means.__getitem__)
                tuned = best if size == options.sizes[0] else tuned
                excess = 100 * (means[tuned] / means[best] - 1)
                row = "  ".join(f"{mean:.4f}" for mean in means)
                print(f"{size:10}  {row}  best {rates[best]:.3g}  transferred {excess:+.2f} %", flush=True)
            print(f"{time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
