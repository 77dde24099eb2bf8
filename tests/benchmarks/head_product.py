"""The head's product for a few rows, as in generation: x Wᵀ beside W xᵀ, with the greedy choice, in CPU time.

python tests/benchmarks/head_product.py
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch.nn import functional as F

TABLES = [(1000, 64), (4096, 128), (8000, 256), (32000, 512), (50304, 1024)]


def seconds(function):
    start = time.process_time()
    function()
    return time.process_time() - start


@torch.inference_mode()
def ratio(weight, rows, rounds):
    """Returns the median time of x Wᵀ in microseconds, and the ratio of W xᵀ to it; both in turns."""
    x = torch.randn(rows, weight.shape[1], dtype=weight.dtype)
    plain, transposed = [], []
    for _ in range(rounds + 1):  # the first warms up
        plain.append(seconds(lambda: F.linear(x, weight).argmax(-1)))
        transposed.append(seconds(lambda: F.linear(weight, x).t().argmax(-1)))
    return 1e6 * median(plain[1:]), median(transposed[1:]) / median(plain[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"{'table':>14} {'rows':>5} {'x Wt, us':>10} {'W xt / x Wt':>12}")
    for vocabulary, dim in TABLES:
        weight = torch.randn(vocabulary, dim, dtype=getattr(torch, options.dtype))
        for rows in options.rows:
            time_, share = ratio(weight, rows, options.rounds)
            print(f"{vocabulary:>7} x {dim:>4} {rows:>5} {time_:>10.0f} {share:>12.2f}", flush=True)


if __name__ == "__main__":
    main()
