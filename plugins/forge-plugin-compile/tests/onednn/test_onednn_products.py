"""float32 products by oneDNN: as exact as BLAS's, and in no run whose job does not name the plugin."""

from __future__ import annotations

import pytest
import torch

from forge_core.contracts.contexts import BuildContext
from forge_core.engine.build import build_context
from forge_core.engine.trainer import Trainer
from forge_kit.nn.products import multiplied_by, multiply_float32_by, size_multiple
from forge_plugin_compile.onednn import OneDNN, products

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.get_float32_matmul_precision(), products._active, multiplied_by(torch.float32)
    yield
    torch.set_float32_matmul_precision(before[0])
    products._active = before[1]
    multiply_float32_by(before[2])


@pytest.fixture
def slow_mkl(monkeypatch):
    monkeypatch.setattr(products, "_mkl_is_slow", lambda: True)


def is_exact() -> bool:
    # Without AVX-512, torch takes no float32 product to oneDNN, whatever it is allowed.
    has_onednn = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_onednn and products._keeps_float32()


@pytest.fixture
def by_onednn(monkeypatch):
    """oneDNN multiplies. Where it rounds to bfloat16, torch's own products stand in: whether it is asked, and for which
    products, is tested on every processor."""
    if not is_exact():
        monkeypatch.setattr(products, "_asking_onednn", lambda call, *given, **more: call(*given, **more))
    products.take_over()


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
    products.give_back()
    assert torch.equal(found, a @ b)
    assert not asked


@pytest.mark.usefixtures("by_onednn")
@pytest.mark.skipif(not is_exact(), reason="oneDNN multiplies no float32 here, or rounds it to bfloat16")
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
def test_what_was_tried_decides_and_is_told(monkeypatch, make_job, catalog, tmp_path, keeps, choice):
    monkeypatch.setattr(products, "_keeps_float32", lambda: keeps)
    plugin = OneDNN()
    context = build_context(make_job(plugins={"onednn": plugin}), catalog, tmp_path)
    assert [told[1] for told in plugin.choices(context)] == [choice]
    assert multiplied_by(torch.float32) == choice
    assert size_multiple(torch.float32) == (32 if keeps else 1)


@pytest.fixture
def after(make_job, catalog, tmp_path, slow_mkl, monkeypatch):
    """Surroundings of a job that is built after one with the plugin, in one process."""
    monkeypatch.setattr(products, "_keeps_float32", lambda: True)

    def build(plugins, **keys) -> BuildContext:
        build_context(make_job(plugins={"onednn": OneDNN()}), catalog, tmp_path)
        assert products._active
        return build_context(make_job(plugins=plugins, **keys), catalog, tmp_path)

    return build


def test_a_job_that_does_not_name_it_has_blas_even_after_one_that_does(after):
    after({})
    assert not products._active
    assert multiplied_by(torch.float32) == "BLAS"


@pytest.mark.parametrize("asked", ["high", "medium"])
def test_a_job_that_asks_for_less_precision_has_torchs_own_way(after, asked):
    context = after({"onednn": OneDNN()}, float32_matmul=asked)
    assert not products._active
    assert torch.get_float32_matmul_precision() == asked
    assert not list(OneDNN().choices(context))


def test_it_does_nothing_on_an_accelerator(slow_mkl, make_job):
    assert OneDNN().forge_configure_backend(make_job(), torch.device("cuda")) is None
    assert not products._active


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


@pytest.mark.parametrize("missing", ["mkl", "mkldnn"])
def test_without_mkl_or_onednn_there_is_nothing_to_choose(monkeypatch, missing):
    for name in ("mkl", "mkldnn"):
        monkeypatch.setattr(getattr(torch.backends, name), "is_available", lambda name=name: name != missing)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: pytest.fail("asked for the processor"))
    products._mkl_is_slow.cache_clear()
    try:
        assert products._mkl_is_slow() is False
    finally:
        products._mkl_is_slow.cache_clear()


@pytest.mark.parametrize(("keys", "told"), [({}, True), ({"precision": "bf16"}, False)])
def test_the_summary_of_a_run_tells_which_library_multiplies(make_job, catalog, keys, told):
    lines = []
    Trainer(make_job(plugins={"onednn": OneDNN()}, **keys), catalog=catalog, echo=lines.append).run()
    assert any(line.startswith("products ") for line in "\n".join(lines).splitlines()) is told
