"""The hook `stragglers`."""

from __future__ import annotations

import math
import socket
import statistics
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from traceback import walk_stack
from typing import TYPE_CHECKING, ClassVar

from attrs import define, field, frozen
from attrs.validators import ge, gt

from forge_core import Problem, TrainingHook
from forge_core.contracts.components import WhenResumed

if TYPE_CHECKING:
    import torch

    from forge_core import Job
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.layout import Layout

SAMPLE_S = 0.02
PRODUCTS = 20
REMEMBERED = 64
"""Changes of ratios, of all ranks together, that say how noisy the machine is."""
CAUTION = 2.0
"""Times the median change by which a ratio must exceed `slow`."""
MATMUL = (256, 4096)
"""Side of the micro-benchmark's matrices on a CPU and an accelerator: some tenths of a millisecond to milliseconds."""


@frozen(kw_only=True)
class Look:
    """Measurements of a rank since the look before."""

    host: str
    own_s: float
    """Seconds of a step in which this rank did not wait for others."""
    waited: float
    """Part of the time in which it waited for others."""
    matmul_ms: float


@define(kw_only=True, slots=False)
class Stragglers(TrainingHook):
    """Finds the rank that all others wait for.

    Every `every` steps, each rank times its own matrix product, and reports how long its steps take without waits for
    other ranks. A thread measures these waits: it samples the position of the main thread fifty times per second. On a
    GPU, the host does not stop where the device waits, so there the product, data and hooks distinguish the ranks.

    Logs `wait_share`, the mean part of a step in which ranks wait for others, and `slowest_rank`.
    """

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    every: int = field(default=50, validator=ge(1))
    """Steps between looks."""
    slow: float = field(default=1.15, validator=gt(1))
    """A rank is slow whose step or product takes more than this many times the median of the other ranks, and as much
    more as that ratio usually changes from one look to the next, as it does on a busy machine."""
    steps: int = field(default=3, validator=ge(1))
    """Looks in a row in which a rank must be slow to be named."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if layout.world_size == 1:
            yield Problem("", "a single rank waits for nobody; leave this hook out, or start several ranks")

    def on_train_begin(self, context: TrainContext) -> None:
        """Start the meter. In the main thread, which the meter then samples."""
        self._in_a_row: dict[int, int] = {}
        self._since: dict[int, int] = {}
        self._noise = Noise()
        self._waits = WaitMeter()
        self._mark: tuple[int, float, float] | None = None

    def on_step_end(self, context: StepContext) -> None:
        """Exchange measurements every `every` steps; the first of these steps only sets the mark. Collective."""
        if context.step % self.every:
            return
        now, waited = time.monotonic(), self._waits.seconds
        # The first window has compilation and allocation in it, and counts for nothing
        if self._mark is not None and context.step > self._mark[0]:
            self._look(context, context.step - self._mark[0], now - self._mark[1], waited - self._mark[2])
        self._mark = (context.step, time.monotonic(), self._waits.seconds)

    def on_train_end(self, context: TrainContext) -> None:
        """Stop the meter, whose thread would sample on for as long as the process lives."""
        self._waits.stop()

    def on_exception(self, context: TrainContext, error: BaseException) -> None:
        self._waits.stop()

    def _look(self, context: StepContext, steps: int, passed: float, waited: float) -> None:
        from forge_core.parallel.mesh import gather_objects, global_rank
        from forge_kit.tools.metrics import FAULTY_RANK

        mine = Look(
            host=socket.gethostname(),
            # The meter's resolution, at least: at zero now and then, ratios to it would look like a machine's noise
            own_s=max(passed - waited, SAMPLE_S) / steps,
            waited=min(waited / passed, 1.0),
            matmul_ms=matmul_ms(next(context.model.parameters()).device),
        )
        looks = gather_objects(mine)
        context.log("wait_share", statistics.mean(look.waited for look in looks))
        context.log("slowest_rank", max(range(len(looks)), key=lambda rank: looks[rank].own_s))
        # Judged before `add`: the first slow look would otherwise widen the noise that it is compared with
        slow = slow_ranks(looks, self.slow, self._noise)
        self._noise.add(looks)
        for rank in range(len(looks)):
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1 if rank in slow else 0
            if self._in_a_row[rank] == 1:
                self._since[rank] = context.step - steps
            # Equal and not at least: a rank that stays slow is named once
            if self._in_a_row[rank] == self.steps:
                context.log(FAULTY_RANK, rank)
                if global_rank() == 0:
                    warnings.warn(describe(rank, looks, slow[rank], self._since[rank]), stacklevel=2)


class WaitMeter:
    """Seconds that the main thread has spent inside torch.distributed, measured by a thread that looks at its stack."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-wait-meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread at its next sample, `SAMPLE_S` from now at most."""
        self._over.set()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(SAMPLE_S):
            now = time.monotonic()
            # A process that was stopped did not wait for others meanwhile
            passed, last = min(now - last, 2 * SAMPLE_S), now
            if waits(sys._current_frames().get(self._main)):
                self.seconds += passed


def waits(frame: object) -> bool:
    """Whether a thread stands inside torch.distributed."""
    # The innermost frames only: a wait in a collective shows there, and this runs fifty times per second
    frames = islice(walk_stack(frame), 12) if frame is not None else ()  # type: ignore[arg-type]
    return any("/torch/distributed/" in inner.f_code.co_filename for inner, _ in frames)


def matmul_ms(device: torch.device) -> float:
    """Milliseconds of a product of two square matrices on this rank's device: the fastest of some."""
    import torch

    size = MATMUL[device.type != "cpu"]
    wait = torch.get_device_module(device).synchronize
    # On a CPU, bfloat16 may be emulated, which takes many times as long
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    one = torch.ones(size, size, device=device, dtype=dtype)
    fastest = float("inf")
    for _ in range(PRODUCTS):  # the first one loads the kernel, and is never the fastest
        wait()
        began = time.perf_counter()
        one @ one
        wait()
        fastest = min(fastest, time.perf_counter() - began)
    return 1e3 * fastest


def of_others(looks: Sequence[Look], rank: int) -> tuple[float, float]:
    """Returns the median product and the median step of the other ranks."""
    others = [other for number, other in enumerate(looks) if number != rank]
    return statistics.median(other.matmul_ms for other in others), statistics.median(other.own_s for other in others)


class Noise:
    """How much the ratios of ranks to the others change from one look to the next: as factors, 1 without noise.

    A rank that is always slow changes nothing here. On a machine that others use too, ranks are slow in turns, and
    three looks in a row would name one of them now and then.
    """

    def __init__(self) -> None:
        self._before: list[tuple[float, float]] = []
        self._changes: tuple[deque[float], deque[float]] = (deque(maxlen=REMEMBERED), deque(maxlen=REMEMBERED))

    @property
    def product(self) -> float:
        """Of matrix products."""
        return self._factor(0)

    @property
    def step(self) -> float:
        """Of steps without waits."""
        return self._factor(1)

    def add(self, looks: Sequence[Look]) -> None:
        """Take the next looks of all ranks into account."""
        now = []
        for rank, look in enumerate(looks):
            product, own = of_others(looks, rank)
            now.append((_log(look.matmul_ms, product), _log(look.own_s, own)))
        # Not strict: the first looks have none before them
        for before, after in zip(self._before, now, strict=False):
            for changes, one, other in zip(self._changes, before, after, strict=True):
                changes.append(abs(other - one))
        self._before = now

    def _factor(self, which: int) -> float:
        changes = self._changes[which]
        return math.exp(CAUTION * statistics.median(changes)) if changes else 1.0


def _log(value: float, other: float) -> float:
    return math.log(value / other) if value > 0 < other else 0.0


def slow_ranks(looks: Sequence[Look], slow: float, noise: Noise | None = None) -> Mapping[int, str]:
    """Returns the ranks that are slower than the median of the others, each with a description of the slow part."""
    found = {}
    noise = noise or Noise()
    for rank, look in enumerate(looks):
        product, own = of_others(looks, rank)
        if look.matmul_ms > slow * noise.product * product:
            found[rank] = f"computes at {product / look.matmul_ms:.2f} of the others"
        elif look.own_s > slow * noise.step * own:
            found[rank] = f"takes {1e3 * look.own_s:.3g} ms for a step without waits, the others {1e3 * own:.3g}"
    return found


def describe(rank: int, looks: Sequence[Look], what: str, since: int) -> str:
    """A warning that names the slow rank and its cost."""
    others = [look for number, look in enumerate(looks) if number != rank]
    product = statistics.median(look.matmul_ms for look in others)
    share = statistics.mean(look.waited for look in others)
    text = f"rank {rank} on {looks[rank].host} {what} since step {since:,}"
    text += f" (matrix product {looks[rank].matmul_ms:.3g} ms, median {product:.3g})"
    return f"{text}; the others wait for {share:.0%} of each step"
