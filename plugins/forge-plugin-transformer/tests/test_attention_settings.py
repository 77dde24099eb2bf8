"""Keys of windows, patterns, sinks and caps: which attention they make, what it costs, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from forge_plugin_transformer import AttentionPattern, GroupedQueryAttention, NoRope, PlainRope
from forge_plugin_transformer.attention_backends import Measurement, Table, committed_table
from forge_testing.refusals import ExpectedProblem, at, refuses, refuses_all

PATTERN = """
[model.attention]
type = "pattern"
layers = ["near", "near", "full"]
[model.attention.kinds.near]
type = "gqa"
heads = 4
window = 8
rope.theta = 1e4
[model.attention.kinds.full]
type = "gqa"
heads = 4
rope.theta = 1e6
"""


def test_a_pattern_of_a_job_file(load_model: Callable[..., Any], make_model: Callable[..., Any]) -> None:
    attention = load_model(PATTERN).attention
    near = GroupedQueryAttention(heads=4, window=8, rope=PlainRope(theta=1e4))
    full = GroupedQueryAttention(heads=4, rope=PlainRope(theta=1e6))
    assert attention == AttentionPattern(layers=("near", "near", "full"), kinds={"near": near, "full": full})
    assert list(attention.of_layers()) == [near, full]
    model = make_model(attention=attention, layers=5)
    assert [layer.attention.scoring.window for layer in model.layers.values()] == [8, 8, 0, 8, 8]
    rates = [layer.attention.rotary.frequencies[1] for layer in model.layers.values()]
    assert [round(rate ** -(8 / 2)) for rate in rates] == [10**4, 10**4, 10**6, 10**4, 10**4]


def test_a_pattern_goes_on_in_the_modules_of_multi_token_prediction() -> None:
    """A list as long as the model begins again there."""
    kinds = {"near": GroupedQueryAttention(window=3), "full": GroupedQueryAttention()}
    component = AttentionPattern(layers=("near", "full", "full"), kinds=kinds)

    class Context:
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def build(self, part: GroupedQueryAttention, **_: Any) -> int:
            return part.window

    assert [component.build(Context(layer), dim=8, init=None) for layer in range(5)] == [3, 0, 0, 3, 0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (('"full"]', '"near"]'), at("model.attention.kinds.full", "`layers`")),
        (
            ("heads = 4\nwindow", "heads = 3\nwindow"),
            at("model.attention.kinds.near.heads", 3),
        ),
        (("window = 8", "window = -1"), at("model.attention.kinds.near.window", ">= 0")),
        (("window = 8", "kv_heads = 3"), at("model.attention.kinds.near.kv_heads", 3, "heads")),
        (("window = 8", "widow = 8"), at("model.attention.kinds.near.widow", "'window'")),
        (
            ("window = 8", 'soft_cap = 5.0\nbackend = "flash"'),
            at("model.attention.kinds.near.backend", "flash"),
        ),
        (('layers = ["near", "near", "full"]', "layers = []"), at("model.attention.layers")),
        (
            ('type = "gqa"\nheads = 4\nwindow', "heads = 4\nwindow"),
            at("model.attention.kinds.near", "'near'"),
        ),
    ],
)
def test_mistakes_in_a_pattern_are_named_with_their_path(
    load_model: Callable[..., Any], change: tuple[str, str], expected: ExpectedProblem
) -> None:
    with refuses_all(expected):
        load_model(PATTERN.replace(*change))


def test_a_kind_under_another_name_is_missing_and_superfluous(load_model: Callable[..., Any]) -> None:
    with refuses_all(
        at("model.attention.layers", "[model.attention.kinds.near]", "'nears'"),
        at("model.attention.kinds.nears", "`layers`"),
    ):
        load_model(PATTERN.replace("kinds.near", "kinds.nears"))


def test_a_list_longer_than_the_model_is_refused(load_model: Callable[..., Any]) -> None:
    with refuses("model.attention.layers", "3 layers", 2):
        load_model(PATTERN, "layers = 2")
    assert load_model(PATTERN, "layers = 3").layers == 3


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            'soft_cap = 2.0\nbackend = "flash"',
            at("model.attention.backend", "flash", "soft_cap", "cpu", "auto", "math", "gemm"),
        ),
        (
            'sinks = true\nbackend = "flash"\ndocuments = "mask"',
            at("model.attention.documents", "mask", "flash"),
        ),
        (
            'soft_cap = 2.0\ndocuments = "varlen"',
            at("model.attention.documents", "varlen", "gemm", "cpu", "float32"),
        ),
        ("scale = -1.0", at("model.attention.scale", 0)),
    ],
)
def test_what_does_not_go_together_is_refused(
    load_model: Callable[..., Any], keys: str, expected: ExpectedProblem
) -> None:
    with refuses_all(expected):
        load_model(f"[model.attention]\n{keys}")


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
def test_sinks_on_cuda_are_for_two_kernels(
    make_model: Callable[..., Any], make_context: Callable[..., Any], backend: str
) -> None:
    context = make_context(device=torch.device("cuda"), dtype=torch.bfloat16)
    attention = GroupedQueryAttention(heads=4, sinks=True, backend=backend)  # type: ignore[arg-type]
    with refuses("model.attention.backend", backend, "sinks", "cuda", "auto, math, gemm"):
        make_model(context, attention=attention)


def test_what_only_building_shows_is_named_with_the_kind(
    make_model: Callable[..., Any], make_context: Callable[..., Any]
) -> None:
    kinds = {"near": GroupedQueryAttention(heads=4, backend="flash", window=4), "full": GroupedQueryAttention(heads=4)}
    context, attention = (
        make_context(device=torch.device("cuda")),
        AttentionPattern(layers=("full", "near"), kinds=kinds),
    )
    with refuses("model.attention.kinds.near.backend", "flash", "cuda", "float32"):
        make_model(context, attention=attention)


TABLE = Table("today", [Measurement("cpu", "float32", 512, 32, {"flash": 1.0, "math": 2.0, "gemm": 3.0})])


def test_auto_takes_the_fastest_that_can() -> None:
    assert TABLE.choose("cpu", "float32", 512, 32, among=("gemm", "math")).kernel == "math"
    assert TABLE.choose("cpu", "float32", 512, 32).kernel == "flash"
    assert TABLE.choose("cpu", "float64", 512, 32, among=("gemm", "math")).kernel == "gemm"
    assert committed_table().choose("cpu", "bfloat16", 2048, 64, among=("math", "flash")).kernel in ("math", "flash")


@pytest.mark.parametrize(
    ("keys", "kernels", "ways"),
    [
        ({"window": 8}, {"torch"}, {"segments"}),
        ({"window": 32}, {"torch"}, {"segments"}),
        ({"sinks": True}, {"flash"}, {"segments"}),
        ({"soft_cap": 1.0}, {"gemm"}, {"segments"}),
    ],
)
def test_auto_without_measurements(
    make_model: Callable[..., Any], keys: dict[str, Any], kernels: set[str], ways: set[str]
) -> None:
    model = make_model(attention=GroupedQueryAttention(heads=4, **keys), dtype=torch.float64)
    for layer in model.layers.values():
        assert {layer.attention.core.choice.kernel} == kernels
        assert {layer.attention.core.documents.way} == ways


def test_flops_count_what_the_window_leaves(make_model: Callable[..., Any]) -> None:
    """12 a visible pair and element: of scores and mixing, a multiplication and an addition, thrice."""

    def pairs(window: int, length: int) -> float:
        attention = make_model(attention=GroupedQueryAttention(heads=4, window=window)).layers["0"].attention
        weights = sum(parameter.numel() for parameter in attention.parameters())
        return float(attention.flops(length) - 6 * weights) / (12 * 32) * length

    for window, length in ((8, 64), (16, 64), (63, 64)):
        visible = sum(min(i + 1, window) for i in range(length))
        assert pairs(window, length) == pytest.approx(visible - min(window, length) / 2)  # half of the diagonal
    assert pairs(64, 64) == pairs(100, 64) == pairs(0, 64) == 64 * 64 / 2


def test_narrow_values_are_scaled_and_counted(make_model: Callable[..., Any]) -> None:
    """Against torch's attention of the layer's matrices; without biases, the factor may be one of the last matrix."""
    keys = {"heads": 4, "kv_heads": 2, "head_dim": 8, "rope": NoRope()}
    narrow = GroupedQueryAttention(**keys, v_head_dim=6, value_scale=0.25)
    layer = make_model(attention=narrow, dtype=torch.float64).layers["0"].attention
    x = torch.randn(2, 5, layer.q.in_features, dtype=torch.float64)
    widths = zip((layer.q, layer.k, layer.v), (8, 8, 6), strict=True)
    q, k, v = ((x @ matrix.weight.mT).unflatten(-1, (-1, width)).transpose(1, 2) for matrix, width in widths)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = mixed.transpose(1, 2).flatten(2) @ (0.25 * layer.o.weight).mT
    assert (layer(x, {}) - expected).abs().max() < 1e-12
    weights = sum(parameter.numel() for parameter in layer.parameters())
    assert layer.flops(64) == 6 * weights + 6 * 4 * (8 + 6) * 32


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("head_dim = 4\nv_head_dim = 6", at("model.attention.v_head_dim", 6, 4)),
        ("v_head_dim = 4\nk_eq_v = true", at("model.attention.v_head_dim", "k_eq_v")),
    ],
)
def test_mistakes_about_narrow_values(load_model: Callable[..., Any], keys: str, expected: ExpectedProblem) -> None:
    with refuses_all(expected):
        load_model(f'[model.attention]\ntype = "gqa"\n{keys}')


def test_a_window_is_told_by_the_module(make_model: Callable[..., Any]) -> None:
    keys = {"window": 8, "scale": 0.5, "soft_cap": 2.0, "sinks": True}
    attention = make_model(attention=GroupedQueryAttention(heads=4, **keys)).layers["0"].attention
    assert attention.core.mixing() == keys
    assert repr(attention.core).endswith("window=8, scale=0.5, soft_cap=2.0, sinks=True)")
    plain = make_model(attention=GroupedQueryAttention(heads=4)).layers["0"].attention
    assert plain.core.mixing() == {}


def test_sinks_are_as_biases_to_the_optimizer(make_model: Callable[..., Any]) -> None:
    model = make_model(attention=GroupedQueryAttention(heads=4, sinks=True))
    assert model.parameter_roles()["layers.0.attention.sinks.weight"] == "bias"
    assert model.layers["0"].attention.sinks.weight.shape == (4,)


def test_queries_grow_with_the_logarithm_of_their_position_in_a_document(make_model: Callable[..., Any]) -> None:
    """Two documents of a row, and the same as rows: against queries that are multiplied by hand."""
    keys = {"heads": 4, "kv_heads": 2, "backend": "math"}
    grown = make_model(attention=GroupedQueryAttention(**keys, query_growth=0.5, query_growth_length=3))
    plain = make_model(attention=GroupedQueryAttention(**keys))
    plain.load_state_dict(grown.state_dict())
    ids = torch.arange(16).view(2, 8) * 3 % 61
    positions = torch.arange(8)
    factor = 1 + 0.5 * torch.log(1.0 + positions // 3)
    without = plain({"input_ids": ids})
    for layer in plain.layers.values():
        layer.attention.qkv.register_forward_hook(
            lambda module, args, out: (out[0] * factor[None, :, None, None], *out[1:])
        )
    expected = plain({"input_ids": ids})
    assert (expected - without)[:, 3:].abs().amax(-1).min() > 1e-3
    torch.testing.assert_close(grown({"input_ids": ids}), expected)
    documents = torch.tensor([0, 1]).repeat_interleave(8)[None]
    packed = {"input_ids": ids.view(1, 16), "document_ids": documents, "positions": positions.repeat(2)[None]}
    torch.testing.assert_close(grown(packed).view_as(expected), expected)


@pytest.mark.parametrize("qk_norm", ["false", '"all"', '"layer"'])
def test_norms_that_a_layer_has_not_are_not_moved(load_model: Callable[..., Any], qk_norm: str) -> None:
    attention = f"[model.attention]\nheads = 4\nqk_norm = {qk_norm}\nqk_norm_rotated = true"
    with refuses_all(at("model.attention.qk_norm_rotated", "qk_norm", "head")):
        load_model(attention)
