"""Products by another way than torch's: as exact as its own, and in no run whose job does not name the plugin."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge_core.contracts.contexts import BuildContext
from forge_core.engine.build import build_context
from forge_core.engine.trainer import Trainer
from forge_kit.nn.products import multiplied_by, multiply_by, size_multiple
from forge_plugin_compile.products import CPUProducts, dispatch, onednn
from forge_plugin_compile.products.bfloat16 import InFloat32
from forge_plugin_compile.products.onednn import ByOneDNN

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before():
    precision, ways = torch.get_float32_matmul_precision(), dispatch._ways
    yield
    torch.set_float32_matmul_precision(precision)
    dispatch.take_over(*ways)
    multiply_by(None, torch.float32, torch.bfloat16)


@pytest.fixture
def slow_mkl(monkeypatch):
    monkeypatch.setattr(onednn, "_mkl_is_slow", lambda: True)


def is_exact() -> bool:
    # Without AVX-512, torch takes no float32 product to oneDNN, whatever it is allowed.
    has_onednn = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_onednn and onednn._keeps_float32()


@pytest.fixture
def by_onednn(monkeypatch):
    """oneDNN multiplies. Where it rounds to bfloat16, torch's own products stand in: whether it is asked, and for which
    products, is tested on every processor."""
    if not is_exact():
        monkeypatch.setattr(onednn, "_asking_onednn", lambda call, *given, **more: call(*given, **more))
    dispatch.take_over(ByOneDNN())


@pytest.fixture
def asked(monkeypatch):
    """The dtypes of the products for which oneDNN is asked."""
    dtypes, ask = [], onednn._asking_onednn

    def note(*given, **more):
        dtypes.append(given[-1].dtype)
        return ask(*given, **more)

    monkeypatch.setattr(onednn, "_asking_onednn", note)
    return dtypes


@pytest.fixture
def in_float32(monkeypatch):
    """bfloat16 is multiplied in float32; the list has the kernels that were asked for it."""
    kernels, compute = [], InFloat32.compute

    def note(self, call, kernel, *given, **more):
        kernels.append(kernel)
        return compute(self, call, kernel, *given, **more)

    monkeypatch.setattr(InFloat32, "compute", note)
    dispatch.take_over(InFloat32())
    return kernels


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
    dispatch.take_over()
    assert torch.equal(found, a @ b)
    assert not asked


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize(("size", "taken"), [(32, True), (16, False)])
def test_bfloat16_products_are_rounded_once(in_float32, product, size, taken):
    operands = matrices((3, size, size), (3, size, size), (3, size, size), dtype=torch.bfloat16)
    found = product(*operands)
    assert bool(in_float32) is taken
    assert found.dtype == torch.bfloat16
    if taken:
        # Half of the last of eight bits; and where float32's own rounding moves a number across a tie
        exact = product(*(each.double() for each in operands))
        torch.testing.assert_close(found.double(), exact, rtol=2**-8 + 1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_bfloat16_and_its_gradients(in_float32, masked):
    operands = matrices(*[(1, 2, 24, 8)] * 3, dtype=torch.bfloat16)
    mask = torch.ones(24, 24, dtype=torch.bool).tril() if masked else None

    def attend(*given):
        given = [each.clone().requires_grad_() for each in given]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mixed = F.scaled_dot_product_attention(*given, attn_mask=mask, is_causal=not masked)
        return mixed, *torch.autograd.grad(mixed.square().sum(), given)

    found = attend(*operands)
    assert [kernel.endswith("backward") for kernel in in_float32] == [False, True]
    exact = attend(*(each.float() for each in operands))
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        # Gradients follow from an output that has been rounded.
        torch.testing.assert_close(ours.float(), theirs, rtol=0.02, atol=0.02)


def test_few_rows_are_left_to_torch(in_float32):
    a, b = matrices((7, 256), (256, 256), dtype=torch.bfloat16)
    a @ b
    assert not in_float32


@pytest.mark.usefixtures("in_float32")
def test_a_result_has_the_shape_that_torch_would_give_it():
    a, b = matrices((64, 32), (32, 64), dtype=torch.bfloat16)
    into = torch.empty(0, dtype=torch.bfloat16)
    assert torch.mm(a, b, out=into) is into
    assert torch.equal(into, a @ b)


@pytest.mark.parametrize(
    ("machine", "capability", "helps"),
    [("x86_64", "AVX2", True), ("AMD64", "DEFAULT", True), ("x86_64", "AVX512", False), ("aarch64", "DEFAULT", False)],
)
def test_bfloat16_is_slow_without_avx512(monkeypatch, machine, capability, helps):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert InFloat32.helps() is helps


@pytest.mark.parametrize(("helps", "told"), [(True, "float32, rounded once"), (False, "bfloat16")])
def test_a_job_in_bfloat16_is_told_how_it_multiplies(monkeypatch, make_job, catalog, tmp_path, helps, told):
    monkeypatch.setattr(InFloat32, "helps", lambda: helps)
    plugin = CPUProducts()
    context = build_context(make_job(plugins={"cpu_products": plugin}, precision="bf16"), catalog, tmp_path)
    assert [choice[1] for choice in plugin.choices(context)] == [told]
    assert any(isinstance(way, InFloat32) for way in dispatch._ways) is helps


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
    monkeypatch.setattr(onednn, "_keeps_float32", lambda: keeps)
    plugin = CPUProducts()
    context = build_context(make_job(plugins={"cpu_products": plugin}), catalog, tmp_path)
    assert [told[1] for told in plugin.choices(context)] == [choice]
    assert multiplied_by(torch.float32) == choice
    assert size_multiple(torch.float32) == (32 if keeps else 1)


@pytest.fixture
def after(make_job, catalog, tmp_path, slow_mkl, monkeypatch):
    """Surroundings of a job that is built after one with the plugin, in one process."""
    monkeypatch.setattr(onednn, "_keeps_float32", lambda: True)

    def build(plugins, **keys) -> BuildContext:
        build_context(make_job(plugins={"cpu_products": CPUProducts()}), catalog, tmp_path)
        assert dispatch._ways
        return build_context(make_job(plugins=plugins, **keys), catalog, tmp_path)

    return build


def test_a_job_that_does_not_name_it_has_blas_even_after_one_that_does(after):
    after({})
    assert not dispatch._ways
    assert multiplied_by(torch.float32) == "BLAS"


@pytest.mark.parametrize("asked", ["high", "medium"])
def test_a_job_that_asks_for_less_precision_has_torchs_own_way(after, asked):
    context = after({"cpu_products": CPUProducts()}, float32_matmul=asked)
    assert not any(isinstance(way, ByOneDNN) for way in dispatch._ways)
    assert torch.get_float32_matmul_precision() == asked
    assert not list(CPUProducts().choices(context))


def test_it_does_nothing_on_an_accelerator(slow_mkl, make_job):
    assert CPUProducts().forge_configure_backend(make_job(), torch.device("cuda")) is None
    assert not dispatch._ways


def test_products_that_round_to_bfloat16_are_noticed(monkeypatch):
    monkeypatch.setattr(onednn, "_asking_onednn", lambda call, a, b: call(a.bfloat16(), b.bfloat16()).float())
    assert not onednn._keeps_float32()
    monkeypatch.setattr(onednn, "_asking_onednn", lambda call, a, b: call(a, b))
    assert onednn._keeps_float32()


@pytest.mark.parametrize(
    ("vendor", "capability", "slow"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has another BLAS than MKL")
def test_mkl_is_slow_on_amd_processors_with_avx512(monkeypatch, tmp_path, vendor, capability, slow):
    info = tmp_path / "cpuinfo"
    info.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(onednn, "CPU_INFO", info)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    onednn._mkl_is_slow.cache_clear()
    try:
        assert onednn._mkl_is_slow() is slow
    finally:
        onednn._mkl_is_slow.cache_clear()


@pytest.mark.parametrize("missing", ["mkl", "mkldnn"])
def test_without_mkl_or_onednn_there_is_nothing_to_choose(monkeypatch, missing):
    for name in ("mkl", "mkldnn"):
        monkeypatch.setattr(getattr(torch.backends, name), "is_available", lambda name=name: name != missing)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: pytest.fail("asked for the processor"))
    onednn._mkl_is_slow.cache_clear()
    try:
        assert onednn._mkl_is_slow() is False
    finally:
        onednn._mkl_is_slow.cache_clear()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_summary_of_a_run_tells_who_multiplies(make_job, catalog, precision):
    lines = []
    job = make_job(plugins={"cpu_products": CPUProducts()}, precision=precision)
    Trainer(job, catalog=catalog, echo=lines.append).run()
    assert any(line.startswith("products ") for line in "\n".join(lines).splitlines())
