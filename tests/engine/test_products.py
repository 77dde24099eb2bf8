"""Which library multiplies float32 matrices on a CPU: as exact, and a choice that a job can undo."""

from __future__ import annotations

import pytest
import torch

from forge_core import products
from forge_core.engine.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.get_float32_matmul_precision(), products._by_onednn
    yield
    torch.set_float32_matmul_precision(before[0])
    products._by_onednn = before[1]


@pytest.fixture
def slow_mkl(monkeypatch):
    monkeypatch.setattr(products, "_mkl_is_slow", lambda: True)


@pytest.fixture
def by_onednn(slow_mkl):
    products.set_float32_matmul("auto", CPU)
    if not (torch.backends.mkldnn.is_available() and products._by_onednn):
        pytest.skip("this torch has no oneDNN, or it rounds to bfloat16 on this processor")


@pytest.fixture
def asked(monkeypatch):
    """The dtypes of the products for which oneDNN is asked."""
    dtypes, ask = [], products._asking_onednn

    def note(*given, **more):
        dtypes.append(given[-1].dtype)
        return ask(*given, **more)

    monkeypatch.setattr(products, "_asking_onednn", note)
    return dtypes


def matrices(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


PRODUCTS = {
    "mm": lambda a, b, c: a[0] @ b[0],
    "mm.out": lambda a, b, c: torch.mm(a[0], b[0], out=torch.empty_like(c[0])),
    "addmm": lambda a, b, c: torch.addmm(c[0, 0], a[0], b[0]),
    "addmm, scaled": lambda a, b, c: torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=3),
    "addmm.out": lambda a, b, c: torch.addmm(c[0], a[0], b[0], out=torch.empty_like(c[0])),
    "addmm_": lambda a, b, c: c[0].clone().addmm_(a[0], b[0], beta=2),
    "transposed": lambda a, b, c: a[0].mT.contiguous().mT @ b[0].mT.contiguous().mT,
    "every other row": lambda a, b, c: a[0].repeat_interleave(2, 0)[::2] @ b[0],
    "expanded": lambda a, b, c: a[0, :1].expand_as(a[0]) @ b[0],
    "bmm": lambda a, b, c: a @ b,
    "bmm.out": lambda a, b, c: torch.bmm(a, b, out=torch.empty_like(c)),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5, alpha=3),
    "baddbmm.out": lambda a, b, c: torch.baddbmm(c, a, b, out=torch.empty_like(c)),
    "baddbmm_": lambda a, b, c: c.clone().baddbmm_(a, b),
}


@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize(("size", "taken"), [(128, True), (144, False), (32, False)])
def test_every_product_is_that_of_float32_whoever_computes_it(asked, product, size, taken):
    operands = matrices((3, size, size), (3, size, size), (3, size, size))
    found = product(*operands)
    assert bool(asked) is taken
    torch.testing.assert_close(found, product(*(each.double() for each in operands)).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("by_onednn")
def test_gradients_are_those_of_float32(asked):
    a, b = (each.requires_grad_() for each in matrices((256, 128), (128, 256)))
    (a @ b).square().sum().backward()
    exact = 2 * (a.detach().double() @ b.detach().double()) @ b.detach().double().T
    torch.testing.assert_close(a.grad, exact.float(), rtol=1e-4, atol=1e-3)
    assert asked == [torch.float32] * 3


@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_of_other_dtypes_are_left_alone(asked, dtype):
    a, b = matrices((256, 128), (128, 256), dtype=dtype)
    found = a @ b
    products._by_onednn = False
    assert torch.equal(found, a @ b)
    assert not asked


@pytest.mark.usefixtures("by_onednn")
def test_it_is_onednn_that_computes(capfd):
    a, b = matrices((256, 256), (256, 256))
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        a @ b
        taken = capfd.readouterr().out
        a[:-1] @ b
    assert "matmul" in taken
    assert "matmul" not in capfd.readouterr().out
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"


@pytest.mark.parametrize(("keeps", "choice"), [(True, "oneDNN"), (False, "BLAS")])
@pytest.mark.usefixtures("slow_mkl")
def test_what_was_tried_decides_and_is_told(monkeypatch, keeps, choice):
    monkeypatch.setattr(products, "_keeps_float32", lambda: keeps)
    products.set_float32_matmul("auto", CPU)
    assert [told[1] for told in products.float32_choice("auto", CPU)] == [choice]
    assert products.size_multiple(torch.float32) == (32 if keeps else 1)


@pytest.mark.usefixtures("slow_mkl")
@pytest.mark.parametrize(("asked", "device"), [("highest", CPU), ("high", CPU), ("auto", torch.device("cuda"))])
def test_what_a_job_asks_for_is_taken_and_no_choice_is_told(asked, device):
    products.set_float32_matmul("auto", CPU)
    products.set_float32_matmul(asked, device)
    assert not products._by_onednn
    assert torch.get_float32_matmul_precision() == asked.replace("auto", "highest")
    assert not list(products.float32_choice(asked, device))


def test_products_that_round_to_bfloat16_are_noticed(monkeypatch):
    monkeypatch.setattr(products, "_asking_onednn", lambda call, a, b: call(a.bfloat16(), b.bfloat16()).float())
    assert not products._keeps_float32()
    monkeypatch.setattr(products, "_asking_onednn", lambda call, a, b: call(a, b))
    assert products._keeps_float32()


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
