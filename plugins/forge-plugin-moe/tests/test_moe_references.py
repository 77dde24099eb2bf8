"""The same weights give what `transformers` computes: Mixtral, Qwen-MoE, experts of DeepSeek-V3 and of gpt-oss."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from forge_plugin_moe import MoE, SigmoidTopK, SoftmaxTopK
from forge_plugin_moe.huggingface_names import from_huggingface, to_huggingface
from forge_plugin_transformer import GroupedQueryAttention, PlainRope, RMSNorm, SwiGLU, Transformer
from forge_testing.refusals import naming
from forge_testing.runs import tiny_run

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "tie_word_embeddings": False, "num_experts_per_tok": 2}
ATTENTION = {"heads": 4, "kv_heads": 2}


def logits(model, ids, tmp_path):
    run = tiny_run(tmp_path, model=model, seq_len=ids.shape[1])
    return run.model, lambda: run.model.head.logits(run.model({"input_ids": ids}))


MODELS = {
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=8, sliding_window=None, rms_norm_eps=1e-5),
        {"attention": {**ATTENTION}, "ffn": MoE(experts=8, hidden=48, router=SoftmaxTopK(top_k=2)), "eps": 1e-5},
    ),
    "qwen3, first layer dense": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SIZES,
            intermediate_size=96,
            moe_intermediate_size=24,
            head_dim=8,
            num_experts=8,
            mlp_only_layers=[0],
            norm_topk_prob=True,
        ),
        {
            "attention": {**ATTENTION, "qk_norm": True},
            "ffn": MoE(experts=8, hidden=24, first_dense=1, dense=SwiGLU(hidden=96)),
            "eps": 1e-6,
        },
    ),
    "qwen2, every other layer, gated shared expert": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **SIZES,
            intermediate_size=96,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=48,
            num_experts=8,
            decoder_sparse_step=2,
            norm_topk_prob=False,
            qkv_bias=False,
        ),
        {
            "attention": {**ATTENTION},
            "ffn": MoE(
                experts=8,
                hidden=24,
                router=SoftmaxTopK(normalise="before"),
                shared_experts=2,
                shared_gate=True,
                every=2,
                dense=SwiGLU(hidden=96),
            ),
            "eps": 1e-6,
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path, name):
    kind, config, ours = MODELS[name]
    torch.manual_seed(0)
    theirs = kind(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    theta = config.rope_parameters["rope_theta"]
    attention = GroupedQueryAttention(**ours["attention"], rope=PlainRope(theta=theta))
    model = Transformer(
        dim=32, layers=3, vocab_size=64, attention=attention, ffn=ours["ffn"], norm=RMSNorm(eps=ours["eps"])
    )
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    network, compute = logits(model, ids, tmp_path)
    network.load_state_dict(from_huggingface(theirs.state_dict()))
    with torch.no_grad():
        seen, expected = compute(), theirs(ids).logits
    assert expected.std() > 0.5, "else nothing would be compared"
    assert (seen - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["qwen3, first layer dense", "qwen2, every other layer, gated shared expert"])
def test_transformers_reads_what_is_converted(tmp_path, name):
    """From files with a tensor for each matrix of each expert."""
    kind, config, _ = MODELS[name]
    torch.manual_seed(0)
    theirs = kind(config).eval()
    ours = from_huggingface(theirs.state_dict())
    files = to_huggingface(ours, shared="shared_expert")
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in files
    config.save_pretrained(tmp_path)
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, tmp_path / "model.safetensors")
    loaded = kind.from_pretrained(tmp_path).eval()
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, theirs(ids).logits)
    again = from_huggingface(files)
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[name], ours[name]) for name in ours)


def test_names_of_mixtrals_files():
    """Each matrix has numbers of its own, so that none takes another's place."""
    files = {
        f"model.layers.2.block_sparse_moe.experts.{number}.w{matrix}.weight": torch.full((2, 3), 10.0 * matrix + number)
        for number in range(4)
        for matrix in (1, 2, 3)
    }
    found = from_huggingface({**files, "model.layers.2.block_sparse_moe.gate.weight": torch.zeros(4, 3)})
    first = {name.removeprefix("layers.2.ffn."): tensor[..., 0, 0].tolist() for name, tensor in found.items()}
    assert first == {
        "router.weight": 0.0,
        "experts.gate.weight": [10, 11, 12, 13],
        "experts.down.weight": [20, 21, 22, 23],
        "experts.up.weight": [30, 31, 32, 33],
    }


def test_a_block_of_predictions_needs_the_number_of_layers():
    """Hugging Face counts it as a layer behind the others."""
    state = {"mtp.blocks.1.ffn.router.weight": torch.zeros(2, 4)}
    assert [*to_huggingface(state, layers=3)] == ["model.layers.4.mlp.gate.weight"]
    with pytest.raises(KeyError, match=naming("mtp.blocks.1.ffn.router.weight", "number of layers")):
        to_huggingface(state)


def test_a_missing_expert_is_named():
    files = {f"model.layers.0.mlp.experts.{number}.up_proj.weight": torch.zeros(2, 3) for number in (0, 1, 3)}
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.experts\.up\.weight: of 4 experts, 1 are missing.* 2"):
        from_huggingface(files)


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_are_those_of_deepseek_v3(tmp_path, normalise):
    """Sigmoid scores, a bias that only selects, the best groups by their two best members, shared experts."""
    config = DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=24,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=normalise,
    )
    torch.manual_seed(0)
    theirs = DeepseekV3MoE(config).eval()
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.normal_(0.0, 0.3)
    router = SigmoidTopK(top_k=3, groups=4, top_groups=2, scaling=2.5, normalise=normalise)
    ffn = MoE(experts=16, hidden=24, router=router, shared_experts=2)
    run = tiny_run(tmp_path, model=Transformer(dim=32, layers=1, vocab_size=8, ffn=ffn))
    ours = run.model.layers["0"].ffn
    state = {f"model.layers.0.mlp.{name}": tensor for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict(
        {name.removeprefix("layers.0.ffn."): tensor for name, tensor in from_huggingface(state).items()}
    )
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        seen, expected = ours(x, {}), theirs(x)
    assert expected.std() > 0.5
    assert (seen - expected).abs().max() < 1e-4


def gpt_oss_names(tensors):
    """Gate and up are columns in turns, and matrices are transposed."""
    fused, biases = tensors["experts.gate_up_proj"], tensors["experts.gate_up_proj_bias"]
    return {
        "router.weight": tensors["router.weight"],
        "router.bias": tensors["router.bias"],
        "experts.gate.weight": fused[..., ::2].mT,
        "experts.up.weight": fused[..., 1::2].mT,
        "experts.gate.bias": biases[..., ::2],
        "experts.up.bias": biases[..., 1::2],
        "experts.down.weight": tensors["experts.down_proj"].mT,
        "experts.down.bias": tensors["experts.down_proj_bias"],
    }


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp64", 1e-12)])
def test_experts_and_their_gradients_are_those_of_gpt_oss(tmp_path, precision, tolerance):
    """Biases of experts and router, and a bounded SwiGLU; one expert has no tokens."""
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[precision]
    config = GptOssConfig(
        hidden_size=32, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2, swiglu_limit=1.5
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs = GptOssMLP(config).to(dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.3)
        theirs.router.bias[4] = -100
    router = SoftmaxTopK(top_k=2, bias=True)
    ffn = MoE(experts=6, hidden=24, bias=True, swiglu_alpha=1.702, swiglu_limit=1.5, swiglu_offset=1.0, router=router)
    run = tiny_run(tmp_path, model=Transformer(dim=32, layers=1, vocab_size=8, ffn=ffn), precision=precision)
    ours = run.model.layers["0"].ffn
    ours.load_state_dict(gpt_oss_names(dict(theirs.named_parameters())))
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    seen, expected = ours(inputs[0], {}), theirs(inputs[1])[0]
    assert expected.std() > 0.5
    assert (seen - expected).abs().max() < tolerance
    for output in (seen, expected):
        output.square().mean().backward()
    assert (inputs[0].grad - inputs[1].grad).abs().max() < tolerance
    gradients = gpt_oss_names({name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).abs().max() < tolerance, name
        assert parameter.grad.any(), name
    assert not ours.experts.down.bias.grad[4].any()
