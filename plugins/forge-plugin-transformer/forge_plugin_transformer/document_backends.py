"""Chooses how attention stays within documents, from measurements, `document_backends.toml`.

`benchmarks/document_backends.py` writes that file; run it again on another kind of machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_transformer.attention_backends import (
    DTYPES,
    HALF,
    Backend,
    Kernel,
    backend_problem,
    distance,
    scoring_kernels,
)
from forge_plugin_transformer.scoring import PLAIN, Scoring

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.job import Job
    from forge_plugin_transformer.kinds import AttentionBackendComponent

WayOrAuto = Literal["auto", "mask", "segments", "varlen"]
"""Values of the key `documents`."""
Way = Literal["mask", "segments", "varlen"]
"""`mask`: every pair of positions is computed, and pairs across documents are masked. `segments`: document by document,
short ones in groups. `varlen`: torch's kernel for sequences of several lengths."""

SUPPORTED: Mapping[str, Mapping[Way, frozenset[Kernel]]] = {
    "cpu": {"segments": frozenset({"torch", "flash", "gemm"}), "mask": frozenset({"torch", "flash", "math", "gemm"})},
    "cuda": {
        "varlen": frozenset({"torch", "flash"}),
        "mask": frozenset({"torch", "efficient", "math", "cudnn", "gemm"}),
    },
}
"""Kernels for each way, by device, the way with the least computation first. `varlen` needs half precision."""
ELSEWHERE: Mapping[Way, frozenset[Kernel]] = {"mask": frozenset({"torch", "math", "gemm"})}
"""The same for any other device. `segments` reads the bounds of documents on the host, which would wait for it."""


@frozen
class DocumentChoice:
    """A way, and the reason for it."""

    way: Way
    why: str
    matters: bool = True
    """Whether the job's packing separates documents, so that the run's summary should show the choice."""

    @property
    def reason(self) -> str:
        """Returns `why`, and the wait that the way costs, for the run's summary."""
        return f"{self.why}; the host waits once a micro-batch, for the bounds" if self.way == "varlen" else self.why


@frozen
class DocumentMeasurement:
    """Milliseconds of one forward and backward pass, by way: one number for each document length."""

    device: str
    dtype: str
    kernel: Kernel
    seq_len: int
    head_dim: int
    milliseconds: Mapping[Way, Sequence[float]]

    def mean(self, way: Way) -> float:
        """Returns the mean over document lengths."""
        return sum(self.milliseconds[way]) / len(self.milliseconds[way])

    def fastest(self) -> Way:
        """Returns the way with the least mean over document lengths."""
        return min(self.milliseconds, key=self.mean)


@frozen
class DocumentTable:
    """The committed measurements."""

    measured: str
    """Date and machine."""
    documents: Sequence[int]
    """Document lengths that were measured."""
    rows: Sequence[DocumentMeasurement]

    def choose(self, device: str, dtype: str, kernel: Kernel, seq_len: int, head_dim: int) -> DocumentChoice:
        """Returns the fastest way at the nearest measured shape; if none is measured, the one that computes least."""
        rows = [row for row in self.rows if (row.device, row.dtype, row.kernel) == (device, dtype, kernel)]
        if not rows:
            return unmeasured(device, dtype, kernel)
        nearest = min(rows, key=lambda row: distance((row.seq_len, row.head_dim), (seq_len, head_dim)))
        times = ", ".join(f"{way} {nearest.mean(way):.3g} ms" for way in nearest.milliseconds)
        shape = f"length {nearest.seq_len}, head_dim {nearest.head_dim}"
        lengths = " to ".join(str(length) for length in (min(self.documents), max(self.documents)))
        why = f"fastest for documents of {lengths} at {shape}: {times}; {self.measured}"
        return DocumentChoice(nearest.fastest(), why)


def unmeasured(device: str, dtype: str, kernel: Kernel, scoring: Scoring = PLAIN) -> DocumentChoice:
    """Returns the way that computes least."""
    least, *others = able(device, dtype, kernel, scoring)
    if not others:
        return DocumentChoice(least, f"the only way with the kernel {kernel}{' and sinks' if scoring.sinks else ''}")
    window = " and a window" if scoring.window else ""
    message = f"nothing is measured for {dtype} on {device} with the kernel {kernel}{window}"
    return DocumentChoice(least, f"computes less than {', '.join(others)}; {message}")


@cache
def committed_table() -> DocumentTable:
    """Loads the table that is part of this distribution."""
    content: dict[str, Any] = tomllib.loads(files(__package__).joinpath("document_backends.toml").read_text("utf-8"))
    rows = [DocumentMeasurement(**row) for row in content["measurement"]]
    return DocumentTable(f"{content['date']}, {content['machine']}", content["documents"], rows)


def choose_documents(
    documents: WayOrAuto, kernel: Kernel, context: BuildContext, head_dim: int, scoring: Scoring = PLAIN
) -> DocumentChoice:
    """Choose the way for the sequence length of the job. With a window or sinks, nothing is measured.

    Raises:
        JobError: the job sets a way that the kernel does not support there.
    """
    device, dtype = context.device.type, str(context.dtype).removeprefix("torch.")
    # The blocks of a mask are as documents
    matters = context.job.data.packing.needs_boundaries or scoring.mask is not None
    if documents == "auto":
        if scoring.dense_mask:
            return DocumentChoice("mask", f"the only way with {type(scoring.mask).__name__}", matters)
        length = context.job.train.seq_len
        # The measurements are of plain attention: a window changes the cost of each way, and sinks exclude ways
        if scoring.window_in(length) or scoring.sinks:
            choice = unmeasured(device, dtype, kernel, scoring)
        else:
            choice = committed_table().choose(device, dtype, kernel, length, head_dim)
        return attrs.evolve(choice, matters=matters)
    if problem := documents_problem(documents, device, dtype, kernel, scoring):
        raise JobError([Problem("model.attention.documents", f"{problem} (building {context.path})")])
    return DocumentChoice(documents, "set by the job", matters)


def kernel_problems(backend: Backend, documents: WayOrAuto, job: Job, scoring: Scoring = PLAIN) -> Iterator[Problem]:
    """Yields problems with the keys `backend` and `documents` of an attention, if the job names its device.

    Otherwise building it raises.
    """
    if job.train.device == "auto":
        return
    device, dtype = job.train.device, DTYPES[job.train.precision]
    if problem := backend_problem(backend, device, dtype, scoring):
        yield Problem("backend", problem)
        return
    # The kernel that auto takes is chosen when the model is built; until then the preferred one stands for it
    among: Sequence[Kernel] = scoring_kernels(device, scoring) or ("torch",)
    if problem := documents_problem(documents, device, dtype, among[0] if backend == "auto" else backend, scoring):
        yield Problem("documents", problem)


def plugged_problems(
    backend: AttentionBackendComponent, documents: WayOrAuto, scoring: Scoring = PLAIN
) -> Iterator[Problem]:
    """Yields problems with the keys `backend` and `documents` of an attention whose kernel is a component."""
    name, computes = type(backend).__name__, backend.computes
    if lacks := [option for option in scoring.options() if option not in computes]:
        does = f"; of the variations it computes {', '.join(computes)}" if computes else ""
        yield Problem("backend", f"{name} does not compute {', '.join(lacks)}{does}; take another kernel")
    if documents != "auto":
        yield Problem("documents", f"{name} keeps documents apart itself; leave this out")


def documents_problem(
    documents: WayOrAuto, device: str, dtype: str, kernel: Kernel, scoring: Scoring = PLAIN
) -> str | None:
    """Returns why a kernel does not support a way on a device in a dtype, with those it does; None if it does."""
    ways = able(device, dtype, kernel, scoring)
    if documents == "auto" or documents in ways:
        return None
    sinks = " with sinks" if scoring.sinks else ""
    mask = f" and the mask {type(scoring.mask).__name__}" if scoring.dense_mask else ""
    message = f"{documents} does not go with the kernel {kernel}{sinks}{mask} on {device} in {dtype}"
    return f"{message}; there are {', '.join(('auto', *ways))}"


def able(device: str, dtype: str, kernel: Kernel, scoring: Scoring = PLAIN) -> list[Way]:
    """Returns the ways that a kernel supports, the one with the least computation first."""
    ways = [way for way, kernels in SUPPORTED.get(device, ELSEWHERE).items() if kernel in kernels]
    if dtype not in HALF:
        # `varlen_attn` calls the flash kernel of CUDA, which has no float32
        ways = [way for way in ways if way != "varlen"]
    if scoring.dense_mask:
        return [way for way in ways if way == "mask"]
    # With a mask, torch returns no normalisers, which sinks are computed from.
    by_torch = scoring.sinks and kernel in ("torch", "flash")
    return [way for way in ways if not (by_torch and way == "mask")]
