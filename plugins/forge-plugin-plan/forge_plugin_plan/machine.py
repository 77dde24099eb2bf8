"""What a GPU and its network can do, by data sheets or by measurement."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_plan import collectives
from forge_plugin_plan.fake_world import Line
from forge_plugin_plan.gpus import GPU, GPUS
from forge_plugin_plan.measurements import Collective, Measurements, seconds_of
from forge_plugin_plan.meter import Transfer

LAUNCH_S = 4e-6
"""Seconds that the host takes to start a kernel, at least: CUDA's own call takes about as long; Python's share is
more."""


@frozen(kw_only=True)
class Machine:
    """Rates per second, and waits in seconds."""

    name: str
    memory: float
    """Bytes of a GPU."""
    flops: float
    """FLOP/s of matrix products."""
    of_flops: str
    """Where `flops` is from, for people."""
    peak: float | None
    """FLOP/s by which utilisation is stated; None: no data sheet is known."""
    bandwidth: float
    """Bytes between memory and processors."""
    link: float
    """Bytes to the other GPUs of a node, in one direction; 0: unknown."""
    network: float
    """Bytes in one direction from each GPU to other nodes."""
    launch: float = LAUNCH_S
    measured: Sequence[Collective] = ()

    @classmethod
    def of_data_sheet(cls, gpu: GPU, network: float) -> Machine:
        """Returns what the data sheet of a GPU states."""
        return cls(
            name=gpu.name,
            memory=gpu.memory,
            flops=gpu.flops,
            of_flops="bf16",
            peak=gpu.flops,
            bandwidth=gpu.bandwidth,
            link=gpu.link,
            network=network,
        )

    @classmethod
    def calibrated(cls, found: Measurements, gpu: GPU | None, network: float, dtype: str) -> Machine:
        """Returns what was measured, and for the rest what the data sheet states.

        Args:
            found: the measurements.
            gpu: GPU whose data sheet has the rest; None: the one that was measured, if it is in the table.
            network: as in `Machine`.
            dtype: compute dtype of the job, as `bfloat16`.

        Raises:
            JobError: no products of this dtype were measured.
        """
        product = found.product(dtype)
        if product is None:
            dtypes = ", ".join(sorted({each.dtype for each in found.products})) or "none"
            raise JobError(f"--calibrate: no products of {dtype} were measured, in which the job computes; of {dtypes}")
        sheet = gpu or _in_table(found)
        # The rate of links is only needed for kinds that were not measured; a large collective is near it
        whole = [each for each in found.collectives if each.ranks == each.per_node]
        largest = max(whole, key=lambda each: each.bytes, default=None)
        link = sheet.link if sheet else 0.0
        if largest is not None and not sheet:
            link = Transfer(largest.kind, "", largest.bytes, largest.ranks).sent / largest.seconds
        return cls(
            name=sheet.name if sheet else found.device,
            memory=sheet.memory if sheet else found.memory or float("inf"),
            flops=product.flops,
            of_flops=f"{dtype}, measured",
            peak=sheet.flops if sheet else None,
            bandwidth=found.bandwidth,
            link=link,
            network=network,
            launch=found.launch,
            measured=found.collectives,
        )

    def wait(self, transfer: Transfer, line: Line, rate: float) -> float:
        """Returns the seconds of a collective beyond its bytes at `rate`: measured, or else by NCCL's model."""
        points = self.points(transfer, line)
        seconds = seconds_of(points, transfer.whole) if points else collectives.seconds(transfer, line, rate)
        return seconds - transfer.sent / rate

    def points(self, transfer: Transfer, line: Line) -> list[Collective]:
        """Returns the measured collectives of the same kind and as many ranks, on as many nodes."""
        wanted = (transfer.kind, line.ranks, line.per_node)
        return [each for each in self.measured if (each.kind, each.ranks, each.per_node) == wanted]

    def within_node(self, line: Line) -> float:
        """Returns the rate between GPUs of a node.

        Raises:
            JobError: it is unknown.
        """
        if not self.link:
            raise JobError(f"--calibrate has no collective within a node, which {line} needs; name a GPU by --gpu too")
        return self.link


def _in_table(found: Measurements) -> GPU | None:
    """Returns the GPU of the table that was measured: the one of its name whose memory is nearest."""
    # torch calls an H100 "NVIDIA H100 80GB HBM3", and both A100 have one first word
    named = [gpu for gpu in GPUS.values() if gpu.name.split()[0] in found.device]
    return min(named, key=lambda gpu: abs(gpu.memory - found.memory), default=None)
