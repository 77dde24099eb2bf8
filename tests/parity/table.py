"""Trains every layout of the table and prints how far it is from one process.

python tests/parity/table.py [--images] [--only NAME]

In float64, five steps: the largest difference of losses, gradient norms, gradients of the first step, and evaluation,
and the weights' distance relative to what the steps changed. In float32, twenty steps: that of losses.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence

import torch
from images import IMAGE_ROWS
from layouts import ROWS, Row

from forge_testing.curves import Curve, Difference, train
from forge_testing.processes import run_on_ranks

HEAD = ("layout", "with", "loss", "norm", "gradients", "weights", "evaluation", "fp32 loss")
FLOAT32_STEPS = 20


def both(row: Row, folder: str, parallel: bool = True) -> tuple[Curve, list[float]]:
    """The curve in float64, and the losses in float32."""
    wide = train(row.job(folder, parallel))
    return wide, train(row.job(folder, parallel, precision="fp32", steps=FLOAT32_STEPS)).losses


def lines(rows: Sequence[Row]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({row.ranks for row in rows}):
            chosen = [row for row in rows if row.ranks == ranks]
            found = run_on_ranks(ranks, lambda rank, c=chosen: [both(row, folder) for row in c], timeout=900)[0]
            for row, (curve, losses) in zip(chosen, found, strict=True):
                expected, expected_losses = both(row, folder, parallel=False)
                d = Difference.between(curve, expected)
                narrow = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
                numbers = (d.loss, d.norm, d.gradient, d.weights, d.evaluation, narrow)
                yield "| " + " | ".join([row.name, row.features, *(f"{number:.0e}" for number in numbers)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--images", action="store_true", help="the rows of vision-language models")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, gloo on the CPU\n")
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for line in lines([row for row in (IMAGE_ROWS if options.images else ROWS) if options.only in row.name]):
        print(line, flush=True)


if __name__ == "__main__":
    main()
