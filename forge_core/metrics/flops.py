"""Peak FLOP/s of devices, for the model FLOPs utilisation (MFU)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forge_core.devices import query_device
from forge_core.job import Job

DENSE_BF16_TFLOPS: Mapping[str, float] = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "A10G": 70.0,
    "B200": 2250.0,
}
"""Vendors' dense bf16 figures (no sparsity), by a substring of the device's name; the first match counts, so that the
variants of an H100 come before the plain name."""


def peak_flops(job: Job, device: torch.device) -> float | None:
    """Peak FLOP/s of one device: `metrics.peak_tflops`, else the table's figure, else None."""
    if job.metrics.peak_tflops:
        return job.metrics.peak_tflops * 1e12
    name = query_device(device, "get_device_name") or ""
    # None for other devices: an MFU by a guessed peak would be taken for a measurement.
    return next((tflops * 1e12 for part, tflops in DENSE_BF16_TFLOPS.items() if part in name), None)
