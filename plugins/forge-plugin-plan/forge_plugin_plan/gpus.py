"""Data sheets of GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_core.metrics.flops import DENSE_BF16_TFLOPS

NETWORK_GBITS = 400.0
"""Gbit/s of a node's network per GPU: one adapter of the kind that is usual since the H100."""


@frozen(kw_only=True)
class GPU:
    """Figures of a data sheet. Bytes are decimal, rates are per second, and link rates are for one direction."""

    name: str
    memory: float
    bandwidth: float
    """Bytes between memory and processors."""
    link: float
    """Bytes to the other GPUs of its node."""

    @property
    def flops(self) -> float:
        """Dense FLOP/s in bf16."""
        return 1e12 * next(tflops for part, tflops in DENSE_BF16_TFLOPS.items() if self.name.startswith(part))


GPUS: Mapping[str, GPU] = {
    "a100": GPU(name="A100 SXM 80 GB", memory=80e9, bandwidth=2.039e12, link=300e9),
    "a100-40gb": GPU(name="A100 SXM 40 GB", memory=40e9, bandwidth=1.555e12, link=300e9),
    "l40s": GPU(name="L40S", memory=48e9, bandwidth=0.864e12, link=32e9),
    "h800": GPU(name="H800 SXM", memory=80e9, bandwidth=3.35e12, link=200e9),
    "h100": GPU(name="H100 SXM", memory=80e9, bandwidth=3.35e12, link=450e9),
    "h200": GPU(name="H200 SXM", memory=141e9, bandwidth=4.8e12, link=450e9),
    "b200": GPU(name="B200 SXM", memory=180e9, bandwidth=8e12, link=900e9),
}
"""NVLink, or PCIe 4 for the L40S."""


def find_gpu(name: str) -> GPU:
    """Returns the GPU of a name.

    Raises:
        JobError: it is not in the table.
    """
    if name.lower() not in GPUS:
        raise JobError(f"--gpu {name}: not in the table; there are {', '.join(GPUS)}")
    return GPUS[name.lower()]
