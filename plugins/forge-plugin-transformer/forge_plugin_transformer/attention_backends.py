"""Chooses the attention kernel from measurements, `attention_backends.toml`.

`benchmarks/attention_backends.py` writes that file; run it again on another kind of machine.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_transformer.scoring import PLAIN, Scoring

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext

Backend = Literal["auto", "flash", "efficient", "math", "cudnn", "gemm"]
Kernel = Literal["torch", "flash", "efficient", "math", "cudnn", "gemm"]
"""Kernels to choose from; `torch` leaves the choice to `scaled_dot_product_attention`, call by call."""


DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
"""Compute dtype of each `train.precision`."""
HALF = frozenset({"bfloat16", "float16"})
FLOATS = HALF | {"float32", "float64"}
SUPPORTED: Mapping[str, Mapping[str, frozenset[str]]] = {
    "cpu": {"flash": FLOATS, "math": FLOATS, "gemm": FLOATS},
    "cuda": {"flash": HALF, "cudnn": HALF, "efficient": HALF | {"float32"}, "math": FLOATS, "gemm": FLOATS},
}
"""Dtypes that each backend supports, by device."""
ELSEWHERE: Mapping[str, frozenset[str]] = {"math": FLOATS, "gemm": FLOATS}
"""What any other device supports: kernels that consist of torch's operators."""
WITH_SINKS: Mapping[str, Sequence[Kernel]] = {"cpu": ("flash", "gemm", "math"), "cuda": ("gemm", "math")}
"""Kernels that compute sinks, by device, the one to prefer without measurements first."""
WITH_SOFT_CAP: Sequence[Kernel] = ("gemm", "math")
"""Kernels that cap scores, likewise."""


WIDEST = 256
"""Greatest width of a head that CUDA has these kernels for: `NARROW`."""
NARROW: frozenset[Kernel] = frozenset({"torch", "flash", "cudnn"})  # torch takes flash where documents are kept apart
WITH_MASK: Mapping[str, Sequence[Kernel]] = {
    "cpu": ("flash", "gemm", "math"),
    "cuda": ("torch", "efficient", "cudnn", "math", "gemm"),
}
"""Kernels that take a matrix of all pairs, by device, likewise."""


def scoring_kernels(device: str, scoring: Scoring) -> Sequence[Kernel] | None:
    """Returns the kernels that compute such scores on a device, the one to prefer first; None: all of them."""
    if scoring.dense_mask:
        able = WITH_MASK.get(device, ("torch", "math", "gemm"))
        if not scoring.plain_softmax:
            # On a CPU, `flash` has sinks without a matrix only
            able = [kernel for kernel in WITH_SOFT_CAP if kernel in able]
        # Blocks of `gemm` end at the diagonal
        return [kernel for kernel in able if kernel != "gemm" or scoring.causal]
    if scoring.soft_cap:
        return WITH_SOFT_CAP
    return WITH_SINKS.get(device, ("gemm", "math")) if scoring.sinks else None


def width_kernels(
    device: str, dtype: str, head_dim: int, among: Sequence[Kernel] | None = None
) -> Sequence[Kernel] | None:
    """Returns those of several kernels (None: of all) that compute heads of this width; None: all of them."""
    if device != "cuda" or head_dim <= WIDEST:
        return among
    able: Sequence[Any] = [name for name, dtypes in SUPPORTED[device].items() if dtype in dtypes and name not in NARROW]
    return [kernel for kernel in able if among is None or kernel in among]


@frozen
class Choice:
    """A kernel, and the reason for it."""

    kernel: Kernel
    why: str


@frozen
class Measurement:
    """CPU or device milliseconds of one forward and backward pass, by kernel."""

    device: str
    dtype: str
    seq_len: int
    head_dim: int
    milliseconds: Mapping[Kernel, float]
    products: str = ""
    """Library of matrix products, where there is a choice; see `forge_kit.nn.products.multiplied_by`."""

    def fastest(self) -> Kernel:
        """Returns the kernel with the least time; of equal times, the one that is listed first."""
        return min(self.milliseconds, key=self.milliseconds.__getitem__)

    def among(self, kernels: Sequence[Kernel] | None) -> Measurement:
        """Returns the measurements of these kernels alone; None: of all."""
        if kernels is None:
            return self
        return attrs.evolve(self, milliseconds={k: time for k, time in self.milliseconds.items() if k in kernels})


@frozen
class Table:
    """The committed measurements."""

    measured: str
    """Date and machine."""
    rows: Sequence[Measurement]

    def choose(
        self,
        device: str,
        dtype: str,
        seq_len: int,
        head_dim: int,
        products: str = "",
        among: Sequence[Kernel] | None = None,
    ) -> Choice:
        """Returns the fastest kernel at the nearest measured shape; `torch` for an unmeasured device or dtype.

        `among` are the kernels to choose from, if not all will do; without measurements the first of them is returned.
        """
        of_dtype = [row for row in self.rows if (row.device, row.dtype) == (device, dtype)]
        # A row without a library is valid for each: only some dtypes have a choice on a CPU
        rows = [row.among(among) for row in of_dtype if row.products in ("", products)]
        # None of the kernels to choose from may have been measured in a row
        rows = [row for row in rows if row.milliseconds]
        if not rows:
            unmeasured = f"nothing is measured for {dtype} on {device}"
            return Choice(among[0], unmeasured) if among else Choice("torch", f"torch chooses: {unmeasured}")
        nearest = min(rows, key=lambda row: distance((row.seq_len, row.head_dim), (seq_len, head_dim)))
        kernel = nearest.fastest()
        times = ", ".join(f"{name} {time:g} ms" for name, time in nearest.milliseconds.items())
        shape = f"length {nearest.seq_len}, head_dim {nearest.head_dim}"
        return Choice(kernel, f"fastest at {shape}: {times}; {self.measured}")


def distance(shape: tuple[int, int], other: tuple[int, int]) -> tuple[float, float]:
    """Distance of two shapes (seq_len, head_dim) in octaves: length first, then width of the heads."""
    return abs(math.log2(shape[0] / other[0])), abs(math.log2(shape[1] / other[1]))


@cache
def committed_table() -> Table:
    """Loads the table that is part of this distribution."""
    content: dict[str, Any] = tomllib.loads(files(__package__).joinpath("attention_backends.toml").read_text("utf-8"))
    rows = [Measurement(**row) for row in content["measurement"]]
    return Table(f"{content['date']}, {content['machine']}", rows)


def choose_backend(backend: Backend, context: BuildContext, head_dim: int, scoring: Scoring = PLAIN) -> Choice:
    """Choose the kernel for the sequence length of the job, among those that compute such scores.

    Raises:
        JobError: the job sets a kernel that cannot run there.
    """
    from forge_kit.nn.products import multiplied_by

    device, dtype = context.device.type, str(context.dtype).removeprefix("torch.")
    if backend == "auto":
        # `gemm` is as fast as the library of matrix products, so rows of another library are left out
        products = multiplied_by(context.dtype)
        among = width_kernels(device, dtype, head_dim, scoring_kernels(device, scoring))
        return committed_table().choose(device, dtype, context.job.train.seq_len, head_dim, products, among)
    # Not only in `problems`: with device = "auto" the device is not known before
    if problem := backend_problem(backend, device, dtype, scoring):
        raise JobError([Problem("model.attention.backend", f"{problem} (building {context.path})")])
    wide = width_kernels(device, dtype, head_dim)
    if wide is not None and backend not in wide:
        message = f"{backend} computes heads of {WIDEST} dimensions at most on {device}, and these have {head_dim}"
        hint = f"there are {', '.join(('auto', *wide))} (building {context.path})"
        raise JobError([Problem("model.attention.backend", f"{message}; {hint}")])
    return Choice(backend, "set by the job")


def backend_problem(backend: Backend, device: str, dtype: str, scoring: Scoring = PLAIN) -> str | None:
    """Returns why a backend cannot run on a device in a dtype, with those that can; None if it can."""
    supported, among = SUPPORTED.get(device, ELSEWHERE), scoring_kernels(device, scoring)
    runs = [name for name, dtypes in supported.items() if dtype in dtypes]
    able = [name for name in runs if among is None or name in among]
    if backend == "auto" or backend in able:
        return None
    if backend not in runs:
        return f"{backend} does not run on {device} in {dtype}; there are {', '.join(('auto', *able))}"
    # In the order of `scoring_kernels`: where several are set, the first decides which kernels remain
    lacks = "soft_cap" if scoring.soft_cap else "sinks"
    if scoring.dense_mask:
        beside = [name for name in ("soft_cap", "sinks") if getattr(scoring, name)]
        lacks = " and ".join([f"the mask {type(scoring.mask).__name__}", *beside])
    return f"{backend} does not compute {lacks} on {device}; there are {', '.join(('auto', *able))}"
