"""A stack of experts, its backends, and what `moe` and its routers refuse."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from forge_core.contracts.layout import Layout
from forge_kit.nn import products
from forge_plugin_moe import Hash, MoE, SigmoidTopK, SoftmaxTopK
from forge_plugin_moe.modules.experts import Experts, StackedLinear, SwiGLUForm, runs_grouped
from forge_plugin_transformer import GroupedQueryAttention, InitStd, NoFFN, Transformer
from forge_testing import job_problems, tiny_job
from forge_testing.refusals import at, check_problems, problems_of, refuses
from forge_testing.runs import tiny_run

T, K, E, D = 11, 3, 4, 8


GPT_OSS = {"bias": True, "swiglu": SwiGLUForm(alpha=1.702, limit=2.0, offset=1.0)}


def stack_of(grouped=False, experts=range(E), dtype=torch.float64, **form):
    stack = Experts(len(experts), D, 16, init=InitStd(inner=0.02, residual=0.02), grouped=grouped, **form).to(dtype)
    for number, parameter in enumerate(stack.parameters()):
        every = torch.randn(E, *parameter.shape[1:], generator=torch.Generator().manual_seed(number))
        parameter.data.copy_(every[experts.start : experts.stop])
    return stack


def inputs_of(dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    chosen = torch.rand(T, E, generator=generator).argsort(1)[:, :K]
    chosen = chosen.masked_fill(torch.rand(T, K, generator=generator) < 0.3, -1)
    tokens, weights = (torch.randn(T, width, generator=generator) for width in (D, K))
    return tokens.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_(), chosen


def gradients(stack, inputs):
    y = stack(*inputs)
    return y.detach(), *torch.autograd.grad(y.square().sum(), [*inputs[:2], *stack.parameters()])


class TestAStack:
    def test_gives_the_weighted_sum_over_each_tokens_experts(self):
        stack, (tokens, weights, chosen) = stack_of(), inputs_of()
        gate, up, down = (module.weight for module in (stack.gate, stack.up, stack.down))
        for x, own, experts, y in zip(tokens, weights, chosen, stack(tokens, weights, chosen), strict=True):
            terms = [
                w * (down[e] @ (F.silu(gate[e] @ x) * (up[e] @ x))) for w, e in zip(own, experts, strict=True) if e >= 0
            ]
            torch.testing.assert_close(y, sum(terms, torch.zeros(D, dtype=torch.float64)))

    @pytest.mark.parametrize(
        "form",
        [
            {"bias": True},
            {"swiglu": SwiGLUForm(alpha=1.702)},
            {"swiglu": SwiGLUForm(limit=0.7)},
            {"swiglu": SwiGLUForm(offset=-0.5)},
            GPT_OSS,
        ],
    )
    def test_gives_it_with_biases_and_other_forms_of_swiglu(self, form):
        stack, (tokens, weights, chosen) = stack_of(**form), inputs_of()
        none = torch.zeros(E, 1, dtype=torch.float64)
        (g, bg), (u, bu), (d, bd) = (
            (m.weight, none if m.bias is None else m.bias) for m in (stack.gate, stack.up, stack.down)
        )
        alpha, limit, offset = stack.swiglu
        limit = limit or 1e9

        def of_expert(e, x):
            gate, up = (g[e] @ x + bg[e]).clamp(max=limit), (u[e] @ x + bu[e]).clamp(-limit, limit)
            return d[e] @ (gate / (1 + torch.exp(-alpha * gate)) * (up + offset)) + bd[e]

        for x, own, experts, y in zip(tokens, weights, chosen, stack(tokens, weights, chosen), strict=True):
            terms = [w * of_expert(e, x) for w, e in zip(own, experts, strict=True) if e >= 0]
            torch.testing.assert_close(y, sum(terms, torch.zeros(D, dtype=torch.float64)))

    @pytest.mark.parametrize(("grouped", "by_onednn"), [(False, False), (True, False), (True, True)])
    def test_may_weight_what_experts_read(self, monkeypatch, grouped, by_onednn):
        """Also with rows for no choice, where sizes are multiples."""
        dtype = torch.float32 if grouped else torch.float64
        monkeypatch.setitem(products._libraries, torch.float32, "oneDNN" if by_onednn else "BLAS")
        stack = stack_of(grouped=grouped, dtype=dtype, bias=True, weight_input=True)
        (tokens, weights, chosen), plain = inputs_of(dtype), stack_of(bias=True)
        y, *found = gradients(stack, (tokens, weights, chosen))

        def of_choice(x, w, expert):
            # One token for one expert, with the weight 1, whose input has the weight
            return plain((w * x)[None], torch.ones(1, 1), expert.view(1, 1))[0]

        x, own = (t.detach().double().requires_grad_() for t in (tokens, weights))
        expected = torch.stack(
            [sum((of_choice(x[t], own[t, k], chosen[t, k]) for k in range(K)), torch.zeros(D)) for t in range(T)]
        )
        wanted = [expected, *torch.autograd.grad(expected.square().sum(), [x, own, *plain.parameters()])]
        for value, other in zip((y, *found), wanted, strict=True):
            tolerance = {"rtol": 1e-4, "atol": 1e-2} if grouped else {}
            torch.testing.assert_close(value.double(), other.detach(), **tolerance)

    def test_has_the_gradients_of_finite_differences(self):
        stack, (tokens, weights, chosen) = stack_of(**GPT_OSS), inputs_of()

        def compute(x, w, *biases):
            named = {f"{name}.bias": bias for name, bias in zip(("gate", "up", "down"), biases, strict=True)}
            return torch.func.functional_call(stack, named, (x, w, chosen))

        biases = [m.bias.detach().requires_grad_() for m in (stack.gate, stack.up, stack.down)]
        assert torch.autograd.gradcheck(compute, (tokens, weights, *biases))

    def test_need_not_ask_for_a_number_that_it_is_told(self):
        stack, (tokens, weights, chosen) = stack_of(), inputs_of()
        told = stack(tokens, weights, chosen, rows=int((chosen >= 0).sum()))
        assert torch.equal(told, stack(tokens, weights, chosen))

    @pytest.mark.parametrize(
        ("dtype", "by_onednn", "multiple"),
        [(torch.float32, False, 1), (torch.float32, True, 32), (torch.bfloat16, False, 32)],
    )
    def test_has_few_sizes_where_each_costs_a_kernel(self, monkeypatch, dtype, by_onednn, multiple):
        sizes, compute = [], F.grouped_mm
        monkeypatch.setitem(products._libraries, torch.float32, "oneDNN" if by_onednn else "BLAS")
        monkeypatch.setattr(F, "grouped_mm", lambda a, b, offs: sizes.append(offs.diff()) or compute(a, b, offs=offs))
        gradients(stack_of(grouped=True, dtype=dtype), inputs_of(dtype))
        assert len(sizes) == 9
        assert all((size % multiple == 0).all() for size in sizes)
        assert sum(int(size.sum()) for size in sizes) > 0

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize(("inputs", "outputs"), [(8, 3), (2, 8), (1, 5)])
    def test_takes_widths_that_are_no_multiples_of_16_bytes(self, inputs, outputs, compiled):
        """As the few columns of an adapter."""
        grouped, loop = (StackedLinear(E, inputs, outputs, std=1.0, grouped=grouped) for grouped in (True, False))
        torch.nn.init.normal_(grouped.weight, generator=torch.Generator().manual_seed(0))
        loop.load_state_dict(grouped.state_dict())
        x = torch.randn(T, inputs, generator=torch.Generator().manual_seed(1)).requires_grad_()
        ends = torch.tensor([2, 2, 7, T], dtype=torch.int32)

        def computed(module):
            product = torch.compile(module, backend="aot_eager") if compiled and module is grouped else module
            y = product(x, ends)
            return y.detach(), *torch.autograd.grad(y.square().sum(), [x, module.weight])

        for one, other in zip(computed(grouped), computed(loop), strict=True):
            torch.testing.assert_close(one, other)

    @pytest.mark.parametrize("form", [{}, GPT_OSS], ids=["plain", "gpt-oss"])
    def test_of_some_experts_gives_their_part(self, form):
        tokens, weights, chosen = inputs_of()
        parts = []
        for experts in (range(1), range(1, E)):
            local = (chosen - experts.start).where((chosen >= experts.start) & (chosen < experts.stop), -1)
            parts.append(stack_of(experts=experts, **form)(tokens, weights, local))
        torch.testing.assert_close(sum(parts), stack_of(**form)(tokens, weights, chosen))

    def test_calls_the_overlap_function_once(self):
        calls = []
        stack_of()(*inputs_of(), overlap_fn=lambda: calls.append(1))
        assert calls == [1]

    @pytest.mark.parametrize("form", [{}, GPT_OSS], ids=["plain", "gpt-oss"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gives_the_same_with_each_backend(self, dtype, form):
        stacks = (stack_of(grouped, dtype=dtype, **form) for grouped in (True, False))
        found, expected = (gradients(stack, inputs_of(dtype)) for stack in stacks)
        for seen, right in zip(found, expected, strict=True):
            assert (seen - right).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2) * right.abs().max()

    def test_casts_its_weights_as_if_all_at_once(self):
        """Expert by expert, where they are wider than the tokens; one has none of these."""
        tokens, weights, chosen = inputs_of(torch.bfloat16)
        inputs = (tokens, weights, chosen.masked_fill(chosen == 2, -1))
        wide = stack_of(grouped=True, dtype=torch.float32)
        found, expected = gradients(wide, inputs), gradients(stack_of(grouped=True, dtype=torch.bfloat16), inputs)
        assert all(gradient.dtype == torch.float32 and not gradient[2].any() for gradient in found[3:])
        assert all(gradient[:2].any() for gradient in found[3:])
        for seen, right in zip(found, expected, strict=True):
            assert torch.equal(seen, right.to(seen.dtype))

    def test_keeps_no_cast_of_its_weights(self):
        stack, kept = stack_of(grouped=True, dtype=torch.float32), []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda same: same):
            stack(*inputs_of(torch.bfloat16))
        assert {tensor.dtype for tensor in kept if tensor.ndim == 3} == {torch.float32}


def job(folder, **keys):
    model = Transformer(dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=2), ffn=MoE(**keys))
    return tiny_job(str(folder), model=model)


class TestWhatIsRefused:
    def test_a_gate_of_no_experts(self, tmp_path):
        found = problems_of(job(tmp_path, hidden=16, shared_gate=True))
        check_problems(found, at("model.ffn.shared_gate", "shared_experts"))
        assert not job_problems(job(tmp_path, hidden=16, shared_gate=True, shared_experts=1))

    @pytest.mark.parametrize(
        ("router", "expected"),
        [
            (SoftmaxTopK(groups=3), at("model.ffn.router.groups", "3 groups", "8 experts")),
            (SigmoidTopK(top_k=9), at("model.ffn.router.top_k", "9 of 8")),
            (SoftmaxTopK(top_k=5, groups=4, top_groups=2), at("model.ffn.router.top_k", "5 of 4", "2 groups")),
            (SigmoidTopK(groups=2, top_groups=3), at("model.ffn.router.top_groups", "3 of 2")),
            (Hash(top_k=9), at("model.ffn.router.top_k", "9 of 8")),
        ],
    )
    def test_more_experts_or_groups_than_there_are(self, tmp_path, router, expected):
        check_problems(problems_of(job(tmp_path, experts=8, hidden=16, router=router)), expected)

    @pytest.mark.parametrize(
        "router",
        [SoftmaxTopK(groups=4), SigmoidTopK(top_k=8), SoftmaxTopK(top_k=4, groups=4, top_groups=2), Hash(top_k=8)],
    )
    def test_but_not_as_many(self, router):
        assert not [*MoE(experts=8, router=router).problems(None, Layout()), *router.problems(None, Layout())]

    def test_dense_layers_may_be_without_a_feed_forward_part(self, tmp_path):
        ffn = MoE(experts=4, hidden=8, every=2, dense=NoFFN())
        model = Transformer(dim=16, layers=2, vocab_size=32, attention=GroupedQueryAttention(heads=2), ffn=ffn)
        built = tiny_run(tmp_path, model=model).model
        assert [name for name, _ in built.layers["0"].named_parameters() if name.startswith("ffn")] == []
        assert "ffn.experts.up.weight" in dict(built.layers["1"].named_parameters())

    def test_keys_of_swiglu_for_other_experts(self, tmp_path):
        expected = at("model.ffn.swiglu_limit", "relu2", "swiglu")
        check_problems(problems_of(job(tmp_path, hidden=16, activation="relu2", swiglu_limit=7.0)), expected)

    def test_a_backend_that_cannot_compute(self, tmp_path):
        model = job(tmp_path, hidden=16, backend="grouped_mm").model
        names = ('"grouped_mm"', "float64", "cpu", '"loop"', '"auto"', "layers.0.ffn")
        with refuses("model.ffn.backend", *names):
            tiny_run(tmp_path, model=model, precision="fp64")
        assert tiny_run(tmp_path, model=model, precision="fp32").model.layers["0"].ffn.backend == "grouped_mm"


class TestBiases:
    def test_start_at_zero_and_are_no_matrices_to_an_optimizer(self, tmp_path):
        ffn = MoE(hidden=16, bias=True, router=SoftmaxTopK(bias=True))
        run = tiny_run(tmp_path, model=Transformer(dim=16, layers=1, vocab_size=32, ffn=ffn))
        named = dict(run.model.named_parameters())
        biases = [name for name in named if name.endswith("bias")]
        assert len(biases) == 4
        assert not any(named[name].any() for name in biases)
        roles = run.model.parameter_roles()
        assert {roles[name] for name in biases} == {"bias", "router"}
        assert roles["layers.0.ffn.experts.up.weight"] == "stack"

    def test_count_no_flops(self, tmp_path):
        runs = (
            tiny_run(
                tmp_path / str(bias), model=Transformer(dim=16, layers=1, vocab_size=32, ffn=MoE(hidden=16, bias=bias))
            )
            for bias in (False, True)
        )
        plain, biased = (run.model.layers["0"].ffn.flops(8) for run in runs)
        assert plain == biased == 6 * (2 * 3 * 16 * 16 + 8 * 16)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)]
)
def test_a_graph_breaks_where_grouped_products_do_not_run(device, precision, dtype):
    breaks = MoE().graph_break(precision, device, "inductor")
    assert bool(breaks) != runs_grouped(torch.device(device), dtype)
