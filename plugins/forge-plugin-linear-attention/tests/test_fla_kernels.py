"""The kernels of flash-linear-attention are called as its documentation has it, where they run.

Stand-ins for them compute each recurrence position by position, with the package's shapes and conditions: of its
functions `chunk_gated_delta_rule`, `chunk_kda` and `chunk_simple_gla` (fla 0.4). The real ones need a GPU: see
`tests/gpu`.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from forge_plugin_linear_attention import KDA, GatedDeltaNet, Mamba2
from forge_plugin_linear_attention.kernels import KernelChoice, choose_kernel
from forge_plugin_transformer import InitStd, Transformer
from forge_testing.refusals import refuses
from forge_testing.runs import tiny_run

B, S, DIM = 2, 21, 16
MIXERS = {
    "gated_deltanet": GatedDeltaNet(heads=4, key_heads=2, head_dim=4, value_dim=6),
    "kda": KDA(heads=2, head_dim=4, value_dim=6),
    "mamba2": Mamba2(heads=4, head_dim=6, state=5, groups=2),
}
CPU = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float64, path="layers.0.attention")


def recurrence(q, k, v, g, beta=None, scale=None, cu_seqlens=None):
    """(B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H) or (B, T, H, K), (B, T, H) -> (B, T, H, V)."""
    assert q.dtype == k.dtype == v.dtype
    assert q.shape == k.shape
    assert v.shape[:3] == q.shape[:3], "heads are of values"
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or (q.shape[0] == 1 and cu_seqlens.dtype == torch.int64)
    assert bounds[-1] == q.shape[1]
    decay = g.exp() if g.ndim == 4 else g.exp()[..., None].expand(k.shape)
    rows = []
    for start, stop in itertools.pairwise(bounds):
        assert start < stop
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        for t in range(start, stop):
            state = decay[:, t, :, :, None] * state
            seen = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            value = v[:, t] if beta is None else beta[:, t, :, None] * (v[:, t] - seen)
            state = state + k[:, t, :, :, None] * value[:, :, None]
            rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * scale, state))
    return torch.stack(rows, 1), None


@pytest.fixture
def package(monkeypatch):
    """`fla` with the recurrence in place of its kernels; returns the names of those that were called."""
    called = []

    def stand_in(name, with_beta):
        def kernel(q, k, v, g=None, *, scale=None, cu_seqlens=None, **beta):
            assert set(beta) == ({"beta"} if with_beta else set())
            called.append(name)
            return recurrence(q, k, v, g, beta.get("beta"), scale, cu_seqlens)

        return kernel

    def module(name, **contents):
        made = ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    module("fla")
    module("fla.ops")
    for folder, function in (("gated_delta_rule", True), ("kda", True), ("simple_gla", False)):
        name = f"chunk_{folder}"
        module(f"fla.ops.{folder}", **{name: stand_in(name, function)})
    return called


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "kernel"), [("gated_deltanet", 0), ("kda", 1), ("mamba2", 2)])
def test_a_layer_computes_the_same_by_its_kernels(package, name, kernel, packed):
    """Outputs and gradients; documents of one position and bounds at the end of a row among those that are packed."""
    torch.manual_seed(0)
    layer = MIXERS[name].build(CPU, DIM, InitStd(0.3, 0.3)).double()
    for parameter in layer.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5)
    x = torch.randn(B, S, DIM, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0] * 8 + [1] + [0] * 12, [3] * 20 + [4]])
    batch = {"document_ids": ids} if packed else {}
    results = []
    for chosen in ("torch", "fla"):
        layer.core.choice = KernelChoice(chosen, "set by the test")
        y = layer(x, batch)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], allow_unused=True)))
    for ours, theirs in zip(*results, strict=True):
        if ours is not None:
            torch.testing.assert_close(theirs, ours, rtol=1e-9, atol=1e-11)
    assert package == [("chunk_gated_delta_rule", "chunk_kda", "chunk_simple_gla")[kernel]]


def test_generation_has_the_torch_products(package):
    layer = MIXERS["kda"].build(CPU, DIM, InitStd(0.3, 0.3)).double()
    layer.core.choice = KernelChoice("fla", "set by the test")
    x = torch.randn(1, 3, DIM, dtype=torch.float64)
    layer(x, {"input_ids": torch.zeros(1, 3, dtype=torch.int64)}, layer.new_cache(1, 8))
    assert package == []


GPU = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, path="layers.0.attention")


def test_kernels_are_chosen_where_they_run(package, monkeypatch):
    assert choose_kernel("auto", GPU).kernel == "fla"
    assert choose_kernel("fla", GPU).described() == [("recurrence", "fla", "set by the job")]
    assert choose_kernel("torch", GPU).kernel == "torch"
    assert choose_kernel("auto", CPU).described() == []
    wide = SimpleNamespace(**{**vars(GPU), "dtype": torch.float32})
    assert choose_kernel("auto", wide).kernel == "torch"
    for context, fact in ((CPU, "CPU"), (wide, "float32")):
        with refuses("model.attention.kernel", "fla", fact, "layers.0.attention"):
            choose_kernel("fla", context)
    monkeypatch.delitem(sys.modules, "fla")
    assert choose_kernel("auto", GPU).kernel == "torch"
    with refuses("model.attention.kernel", "fla", "flash-linear-attention"):
        choose_kernel("fla", GPU)


def test_a_job_on_a_cpu_that_sets_them_is_refused(tmp_path):
    model = Transformer(dim=16, layers=1, vocab_size=32, attention=GatedDeltaNet(heads=4, kernel="fla"))
    with refuses("model.attention.kernel", "CPU"):
        tiny_run(tmp_path, model=model)
