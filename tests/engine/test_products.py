"""Which library multiplies float32 matrices on a CPU: as exact, and a choice that a job can undo."""

from __future__ import annotations

import pytest
import torch

from forge_core.engine import products
from forge_core.engine.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def slow_mkl(monkeypatch):
    monkeypatch.setattr(products, "_mkl_is_slow", lambda: True)


@pytest.mark.usefixtures("slow_mkl")
def test_auto_leaves_float32_to_onednn_only_where_it_keeps_it():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 512, generator=generator) for _ in range(2))
    products.set_float32_matmul("auto", CPU)
    error = (a @ b.T - (a.double() @ b.double().T)).abs().max()
    assert error < 3e-4, "float32, and not bfloat16, whose error is a thousand times that of float32"


@pytest.mark.parametrize(("keeps", "precision", "choice"), [(True, "medium", "oneDNN"), (False, "highest", "BLAS")])
@pytest.mark.usefixtures("slow_mkl")
def test_what_was_tried_decides_and_is_told(monkeypatch, keeps, precision, choice):
    monkeypatch.setattr(products, "_keeps_float32", lambda: keeps)
    products.set_float32_matmul("auto", CPU)
    assert torch.get_float32_matmul_precision() == precision
    assert [told[1] for told in products.float32_choice("auto", CPU)] == [choice]


@pytest.mark.usefixtures("slow_mkl")
@pytest.mark.parametrize(("asked", "device"), [("highest", CPU), ("high", CPU), ("auto", torch.device("cuda"))])
def test_what_a_job_asks_for_is_taken_and_no_choice_is_told(asked, device):
    products.set_float32_matmul(asked, device)
    assert torch.get_float32_matmul_precision() == asked.replace("auto", "highest")
    assert not list(products.float32_choice(asked, device))


def test_products_that_round_to_bfloat16_are_noticed(monkeypatch):
    assert products._keeps_float32()
    matmul = torch.Tensor.matmul
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: matmul(a.bfloat16(), b.bfloat16()).float())
    assert not products._keeps_float32()


@pytest.mark.parametrize(
    ("vendor", "capability", "slow"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has another BLAS than MKL")
def test_mkl_is_slow_on_amd_processors_with_avx512(monkeypatch, tmp_path, vendor, capability, slow):
    info = tmp_path / "cpuinfo"
    info.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(products, "CPU_INFO", info)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    products._mkl_is_slow.cache_clear()
    try:
        assert products._mkl_is_slow() is slow
    finally:
        products._mkl_is_slow.cache_clear()


@pytest.mark.usefixtures("slow_mkl")
@pytest.mark.parametrize(
    ("keys", "told"), [({}, True), ({"float32_matmul": "highest"}, False), ({"precision": "bf16"}, False)]
)
def test_the_plan_of_a_run_tells_of_a_choice_that_was_made(make_job, catalog, keys, told):
    lines = []
    Trainer(make_job(**keys), catalog=catalog, echo=lines.append).run()
    assert any(line.startswith("products ") for line in "\n".join(lines).splitlines()) is told
