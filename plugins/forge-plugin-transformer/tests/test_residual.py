"""How parts join the residual stream: plain addition, hyper-connections, mHC, and a residual of a stranger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from forge_core.config.load import load_job
from forge_core.parallel.initialise import check_finite, materialise
from forge_plugin_transformer import (
    HyperConnections,
    InitStd,
    LayerNorm,
    ManifoldHyperConnections,
    RMSNorm,
)
from forge_plugin_transformer.modules.residual import KEPT, HyperConnection, ManifoldHyperConnection
from forge_testing.refusals import at, refuses
from forge_testing.tiny import BESIDE_MODEL

MakeModel = Callable[..., Any]
WIDE = torch.float64
PLAIN_NORM = RMSNorm(eps=1e-30)
"""The last norm then does not depend on the size of its input, to which n equal streams add up."""


def moved(module: torch.nn.Module, std: float = 0.5) -> torch.nn.Module:
    """The module with noise on every parameter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=std)
    return module


def ready(module: Any) -> Any:
    """A module of float64 with its initial values."""
    module = module.double()
    materialise(module, torch.device("cpu"), seed=0)
    check_finite(module)
    return module


# --- hyper-connections ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_stream_starts_as_plain_addition_to_the_bit(make_model: MakeModel, ids: Tensor, dynamic: bool) -> None:
    one = make_model(residual_connection=HyperConnections(streams=1, dynamic=dynamic), residual_scale=0.7)
    batch = {"input_ids": ids}
    assert torch.equal(one(batch), make_model(residual_scale=0.7)(batch))
    (x,) = one.embed(batch)
    assert x.shape == (2, 16, 32)


@pytest.mark.parametrize("keys", [{}, {"norm_placement": "post"}, {"norm_placement": "both", "norm": LayerNorm()}])
def test_every_stream_starts_as_the_stream_of_plain_addition(make_model: MakeModel, ids: Tensor, keys: Any) -> None:
    keys = {"norm": PLAIN_NORM, **keys}
    several, plain = make_model(residual_connection=HyperConnections(streams=3), **keys), make_model(**keys)
    batch = {"input_ids": ids}
    (streams,), (x,) = several.embed(batch), plain.embed(batch)
    for name in plain.layers:
        (streams,), (x,) = several.layers[name]((streams,), batch), plain.layers[name]((x,), batch)
        assert torch.equal(streams, x.unsqueeze(2).expand_as(streams))
    torch.testing.assert_close(several(batch), plain(batch), atol=1e-5, rtol=1e-5)


def straightforward(h: Tensor, module: HyperConnection, branch: Callable[[Tensor], Tensor]) -> Tensor:
    """Equations 2, 5 and 10 to 13 of arXiv 2409.19606 for one position, stream by stream: (n, D) to (n, D)."""
    n = len(h)
    first = module.part % n
    a_m = torch.tensor([1.0 if i == first else 0.0 for i in range(n)], dtype=WIDE) + module.static[:, 0]
    a_r = torch.eye(n, dtype=WIDE) + module.static[:, 1 : n + 1]
    b = torch.ones(n, dtype=WIDE) + module.static[:, n + 1]
    if module.dynamic is not None:
        normed = F.layer_norm(h, h.shape[-1:])
        a_m = a_m + module.scale[0] * torch.tanh(normed @ module.dynamic[0])
        a_r = a_r + module.scale[0] * torch.tanh(normed @ module.dynamic[1 : n + 1].T)
        b = b + module.scale[1] * torch.tanh(normed @ module.dynamic[n + 1])
    result = branch(sum(a_m[i] * h[i] for i in range(n)))
    return torch.stack([b[j] * result + sum(a_r[i, j] * h[i] for i in range(n)) for j in range(n)])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_it_computes_the_equations_of_the_paper(streams: int, dynamic: bool) -> None:
    with torch.device("meta"):
        module = HyperConnection(6, streams, part=3, dynamic=dynamic, dtype=WIDE)
    moved(ready(module))
    h = torch.randn(2, 5, streams, 6, dtype=WIDE, requires_grad=True)
    matrix = torch.randn(6, 6, dtype=WIDE)
    branch = lambda x: torch.sin(x @ matrix)  # noqa: E731
    expected = torch.stack([torch.stack([straightforward(own, module, branch) for own in row]) for row in h])
    x = h if streams > 1 else h.squeeze(2)
    out = module(x, branch).view_as(h)
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=1e-12)
    weights = torch.randn_like(out)
    tensors = [h, *module.parameters()]
    gradients = [torch.autograd.grad((result * weights).sum(), tensors) for result in (out, expected)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, atol=1e-12, rtol=1e-11)


def test_parts_read_the_streams_in_turns(make_model: MakeModel) -> None:
    model = make_model(residual_connection=HyperConnections(streams=3))
    modules = [module for module in model.modules() if isinstance(module, HyperConnection)]
    assert [module.start[:, 0].argmax().item() for module in modules] == [0, 1, 2, 0]


# --- mHC -----------------------------------------------------------------------------------------------------------


def test_mhc_computes_what_deepseek_v4_does() -> None:
    streams, dim = 4, 8
    config = DeepseekV4Config(hidden_size=dim, hc_mult=streams, hc_sinkhorn_iters=7, hc_eps=1e-3, rms_norm_eps=1e-2)
    theirs = DeepseekV4HyperConnection(config).double()
    with torch.device("meta"):
        ours = ManifoldHyperConnection(dim, streams, iterations=7, eps=1e-3, norm_eps=1e-2, std=0.5, dtype=WIDE)
    moved(ready(ours))
    with torch.no_grad():
        theirs.fn.copy_(ours.weight)
        theirs.base.copy_(ours.start + ours.bias)
        theirs.scale.copy_(ours.scale)
    x, matrix = torch.randn(2, 5, streams, dim, dtype=WIDE), torch.randn(dim, dim, dtype=WIDE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        post, comb, collapsed = theirs(x)
    # The block of DeepSeek-V4, `DeepseekV4DecoderLayer.forward`
    expected = post.unsqueeze(-1) * (collapsed @ matrix).unsqueeze(-2) + comb.mT @ x
    torch.testing.assert_close(ours(x, lambda read: read @ matrix), expected, atol=1e-12, rtol=1e-12)


def test_the_mixing_matrix_of_mhc_is_doubly_stochastic() -> None:
    with torch.device("meta"):
        module = ManifoldHyperConnection(4, 5, iterations=200, eps=1e-15, norm_eps=1e-6, std=0.5, dtype=WIDE)
    pre, post, mix = ready(module).coefficients(torch.randn(1, 3, 5, 4, dtype=WIDE))
    for dimension in (-1, -2):
        torch.testing.assert_close(mix.sum(dimension), torch.ones(1, 3, 5, dtype=WIDE))
    # Near the initial values, to which the position adds a hundredth
    assert mix.diagonal(dim1=-2, dim2=-1).mean().item() == pytest.approx(KEPT, abs=0.02)
    assert pre.sum(-1).mean().item() == pytest.approx(1, abs=0.02)
    assert post.mean().item() == pytest.approx(1, abs=0.02)


def test_mhc_starts_close_to_plain_addition(make_model: MakeModel, ids: Tensor) -> None:
    keys = {"norm": PLAIN_NORM, "dtype": WIDE, "init_std": 0.02}
    model, plain = make_model(residual_connection=ManifoldHyperConnections(streams=3), **keys), make_model(**keys)
    batch = {"input_ids": ids}
    torch.testing.assert_close(model(batch), plain(batch), atol=0.05, rtol=0.05)
    for module in model.modules():
        if isinstance(module, ManifoldHyperConnection):
            module.weight.data.zero_()
    torch.testing.assert_close(model(batch), plain(batch), atol=1e-4, rtol=1e-4)


# --- within a model ------------------------------------------------------------------------------------------------

SEVERAL = [HyperConnections(streams=3), HyperConnections(streams=2, dynamic=False), ManifoldHyperConnections(streams=3)]


@pytest.mark.parametrize("connection", SEVERAL, ids=lambda each: type(each).__name__)
def test_a_compiled_block_of_streams_has_no_graph_break(make_model: MakeModel, ids: Tensor, connection: Any) -> None:
    model, batch = moved(make_model(residual_connection=connection), 0.1), {"input_ids": ids}
    expected = model(batch)
    for layer in model.layers.values():
        layer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(batch), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("connection", SEVERAL, ids=lambda each: type(each).__name__)
def test_decoding_streams_with_a_cache_gives_the_same(make_model: MakeModel, ids: Tensor, connection: Any) -> None:
    model = moved(make_model(residual_connection=connection), 0.1).eval().requires_grad_(False)
    cache, positions = model.new_cache(2, 16), torch.arange(16).expand(2, -1)
    parts = zip(ids.split([9, 1, 1, 1, 4], 1), positions.split([9, 1, 1, 1, 4], 1), strict=True)
    decoded = torch.cat([model.decode({"input_ids": i, "positions": p}, cache) for i, p in parts], 1)
    torch.testing.assert_close(decoded, model({"input_ids": ids}), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("connection", "each"),
    [
        (HyperConnections(streams=3), 12 * 32 * 3 * 5),
        (HyperConnections(streams=3, dynamic=False), 6 * 32 * 3 * 5),
        (HyperConnections(streams=1, dynamic=False), 6 * 32 * 3),
        (ManifoldHyperConnections(streams=3), 6 * 32 * 3 * 5 + 6 * 15 * 96),
    ],
)
def test_flops_count_coefficients_and_what_they_are_made_of(make_model: MakeModel, connection: Any, each: int) -> None:
    plain, model = make_model(), make_model(residual_connection=connection)
    assert model.flops(64) - plain.flops(64) == 2 * 2 * each
    assert [own - other for own, other in zip(model.layer_flops(64), plain.layer_flops(64), strict=True)] == [
        2 * each
    ] * 2


@pytest.mark.parametrize("connection", SEVERAL, ids=lambda each: type(each).__name__)
def test_flops_are_those_that_torch_counts(connection: Any) -> None:
    dim, streams = 16, connection.stream_count()
    keys = {"init": InitStd(0.1, 0.1), "part": 0}
    with torch.device("meta"):
        module = connection.build(SimpleNamespace(dtype=WIDE), dim=dim, **keys)
    x = torch.randn(1, 5, streams, dim, dtype=WIDE, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        ready(module)(x, torch.tanh).sum().backward()
    # What a part returns is multiplied element by element, which torch does not count
    assert counter.get_total_flops() / 5 == module.flops(5) - 6 * dim * streams


def test_roles_leave_only_matrices_to_weight_decay(make_model: MakeModel) -> None:
    model = make_model(residual_connection=HyperConnections())
    roles = model.parameter_roles()
    assert {name.rpartition(".")[2]: roles[name] for name in roles if "residual" in name} == {
        "static": "bias",
        "dynamic": "matrix",
        "scale": "norm",
    }
    assert "residual" not in str([*make_model().state_dict()])


# --- jobs ----------------------------------------------------------------------------------------------------------

SCALED = '''
from attrs import field, frozen

from forge_plugin_transformer import ResidualComponent


@frozen(kw_only=True)
class Scaled(ResidualComponent):
    """x + g * f(x) with a learned gain of each feature (LayerScale, Touvron et al. 2021)."""

    start: float = 0.5

    def build(self, context, dim, init, part):
        import torch
        from torch import nn

        class ScaledModule(nn.Module):
            def __init__(self, start):
                super().__init__()
                self.start = start
                self.gain = nn.Parameter(torch.empty(dim))

            def init_parameter(self, name, fill):
                fill.constant(self.start)

            def init_buffers(self, device):
                pass

            def forward(self, x, branch):
                return x + self.gain.to(x.dtype) * branch(x)

        return ScaledModule(self.start / (1 + part))
'''


def job_of(folder: Path, text: str) -> Any:
    path = folder / "job.toml"
    path.write_text(f'[model]\ntype = "transformer"\nvocab_size = 32\n{text}\n{BESIDE_MODEL}')
    return load_job(path)


def test_a_residual_of_a_stranger_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: MakeModel, ids: Tensor
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scaled.py").write_text(SCALED)
    text = '[model.residual_connection]\ntype = "./scaled.py:Scaled"\nstart = 0.8'
    component = job_of(tmp_path, text).model.residual_connection
    assert (type(component).__name__, component.start) == ("Scaled", 0.8)
    for keys in ({}, {"residual": "parallel", "norm_placement": "shared"}):
        model, batch = make_model(residual_connection=component, **keys), {"input_ids": ids}
        (x,) = model.embed(batch)
        block = model.layers["1"]
        attention, ffn = (getattr(block, f"{name}_residual").gain[0].item() for name in ("attention", "ffn"))
        assert (attention, ffn) == pytest.approx((0.8 / 3, 0.8 / 4))
        if keys:
            normed = block.attention_norm(x)
            expected = x + attention * block.attention(normed, {}) + ffn * block.ffn(normed, {})
        else:
            middle = x + attention * block.update("attention", x, {})
            expected = middle + ffn * block.update("ffn", middle, {})
        torch.testing.assert_close(block((x,), {})[0], expected)
        assert model.parameter_roles()["layers.1.ffn_residual.gain"] == "norm"
        assert model.tensor_parallel_plan()["layers.1.ffn_residual"] == "sequence"


def test_several_streams_are_refused_where_parts_read_one(tmp_path: Path) -> None:
    text = 'residual = "parallel"\n[model.residual_connection]\ntype = "hyper_connections"'
    with refuses("model.residual", "model.residual_connection has 4", '"sequential"'):
        job_of(tmp_path, text)
    one = text.replace('connections"', 'connections"\nstreams = 1')
    assert job_of(tmp_path, one).model.residual_connection == HyperConnections(streams=1)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ('type = "hyper_connections"\nstreams = 0', at("model.residual_connection.streams", 1, 0)),
        ('type = "manifold_hyper_connections"\nstreams = 1', at("model.residual_connection.streams", 2, 1)),
        ('type = "hyper_conections"', at("model.residual_connection.type", "hyper_connections")),
    ],
)
def test_mistakes_are_named(tmp_path: Path, table: str, expected: Any) -> None:
    from forge_core.contracts.errors import JobError
    from forge_testing.refusals import check_problems

    with pytest.raises(JobError) as caught:
        job_of(tmp_path, f"[model.residual_connection]\n{table}")
    check_problems(caught.value.problems, expected)
