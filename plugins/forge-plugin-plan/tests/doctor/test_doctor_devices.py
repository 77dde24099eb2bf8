"""`doctor` on devices of any vendor: the pretended one stands for those that no machine here has."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_plugin_plan.devices import wait_for
from forge_testing.pretend import NAME, on_device

CPU = torch.device("cpu")
calls: list[tuple[torch.device, ...]] = []


def of_a_rank() -> dict[str, Any]:
    from forge_plugin_plan.doctor import rank

    rank.SIZES = (64,)  # larger products take seconds where bfloat16 is emulated
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None
    return {
        "kind": found.type,
        "facts": rank.facts(found.type, torch.accelerator.device_count()),
        "products": rank.product_on(torch.device(found.type, 0)),
        "library": rank.library_of(found.type),
        "of the CPU": rank.library_of("cpu"),
    }


def test_a_device_of_another_vendor_is_found_and_multiplies():
    found = on_device(of_a_rank)
    assert found["kind"] == NAME
    assert found["facts"]["gpus"][0].startswith(NAME)
    assert found["facts"]["nccl"] is None
    products = found["products"]
    assert products["right"]
    assert products["device"] == f"{NAME}:0"
    assert products["exact"] == ["float32", "float64"]
    assert products["dtype"] == "bfloat16"
    # Ranks meet by gloo on the host, where no library is known for the device
    assert found["library"] == found["of the CPU"] == ""


@pytest.mark.parametrize(
    ("synchronize", "given"), [(lambda: calls.append(()), ()), (lambda device=None: calls.append((device,)), (CPU,))]
)
def test_a_device_is_waited_for_whether_its_module_takes_one_or_not(monkeypatch, synchronize, given):
    calls.clear()
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=synchronize))
    wait_for(CPU)
    assert calls == [given]


def test_the_function_of_mps_takes_no_device():
    """The reason for the above."""
    assert not signature(torch.mps.synchronize).parameters
