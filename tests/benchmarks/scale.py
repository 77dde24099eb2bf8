"""How costs grow with the work: each piece at several sizes, on one core, without a GPU.

python tests/benchmarks/scale.py                    # every piece
python tests/benchmarks/scale.py draw               # one

Seconds are CPU time of the process. docs/benchmarks.md#how-costs-grow has the table.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from forge_core.data.order import SampleOrder, whole_shares


def cpu_ms(function: Callable[[], object], rounds: int = 3) -> float:
    """Returns the least CPU time of a call, in milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def draw() -> None:
    """A rank among 512 draws one global batch: its own rows, and the turns of the others."""
    for decimals in (2, 6):
        for sources in (1, 50, 500):
            weights = [round(random.Random(number).random() + 0.01, decimals) for number in range(sources)]
            order = SampleOrder(
                [10**9] * sources, [str(n) for n in range(sources)], [(0, whole_shares(weights))], [None] * sources, 1
            )
            for batch in (480, 15_360, 245_760):
                share = max(1, batch // 512)

                def step(batch: int = batch, share: int = share, order: SampleOrder = order) -> None:
                    order.advance(batch // 2)
                    for _ in range(share):
                        next(order)
                    order.advance(batch - batch // 2 - share)

                print(f"{sources} sources, weights of {decimals} decimals, batch of {batch}: {cpu_ms(step):.2f} ms")


PIECES: dict[str, Callable[[], None]] = {"draw": draw}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", choices=[[], *PIECES], default=[])
    for name in parser.parse_args().pieces or PIECES:
        print(f"\n{name}: {PIECES[name].__doc__}")
        PIECES[name]()


if __name__ == "__main__":
    main()
