"""Partial rotation, `longrope`, `dynamic` and `none`: frequencies, logits and greedy tokens are those of transformers.

"Lifted": the places where transformers computes in float32, which are norms, softmax and tables, compute in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXRotaryEmbedding

from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_transformer import (
    AttentionPattern,
    DynamicRope,
    GroupedQueryAttention,
    InitStd,
    LayerNorm,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRope,
    PlainRope,
    ProportionalRope,
    RMSNorm,
    SwiGLU,
    YarnRope,
)
from forge_plugin_transformer.huggingface_names import from_huggingface
from forge_plugin_transformer.modules.rotary import rotate
from forge_testing.refusals import ExpectedProblem, at, check_problems

MakeModel = Callable[..., Any]
HEADS, KV_HEADS, HEAD_DIM, ORIGINAL = 4, 2, 16, 24
SHORT, LONG, END = 20, 60, 0
SIZES = {
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 101,
    "initializer_range": 0.2,
}
KEYS = {"dim": HEADS * HEAD_DIM, "layers": 2, "vocab_size": 101, "ffn": SwiGLU(hidden=80)}
PRECISIONS = {"fp32": (torch.float32, 1e-4), "float64, lifted": (torch.float64, 1e-9)}
LONG_ROPE = {
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 2.0, 5.0, 9.0, 17.0, 30.0],
    "original_max_position_embeddings": ORIGINAL,
}
PARTIAL = {"partial_rotary_factor": 0.75}


def long_rope(**keys: Any) -> LongRope:
    shares = {key: tuple(LONG_ROPE[key]) for key in ("short_factor", "long_factor")}
    return LongRope(**shares, original_max_position_embeddings=ORIGINAL, factor=4.0, **PARTIAL, **keys)


@contextmanager
def lifted(dtype: torch.dtype) -> Iterator[None]:
    """What asks for float32 within gets float64, if that is the dtype."""
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch, "float", torch.float64)
            patch.setattr(Tensor, "float", Tensor.double)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def tokens(length: int, rows: int = 2) -> Tensor:
    return torch.randint(101, (rows, length), generator=torch.Generator().manual_seed(length))


def randomised(reference: Any, dtype: torch.dtype) -> Any:
    for parameter in reference.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5)
    return reference.to(dtype).eval()


# --- frequencies -----------------------------------------------------------------------------------------------------

SCALED = {
    "linear": (LinearRope, {"factor": 3.0}),
    "llama3": (
        Llama3Rope,
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "yarn": (YarnRope, {"factor": 4.0, "original_max_position_embeddings": 64}),
}


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("name", SCALED)
def test_partial_frequencies_are_those_of_transformers(name: str, share: float) -> None:
    kind, keys = SCALED[name]
    parameters = {"rope_type": name, "rope_theta": 5e3, "partial_rotary_factor": share, **keys}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=parameters)
    with lifted(torch.float64):
        expected, amplitude = ROPE_INIT_FUNCTIONS[name](config)
    rope = kind(theta=5e3, partial_rotary_factor=share, **keys)
    assert rope.rotated(64) == 2 * len(expected) == int(64 * share)
    torch.testing.assert_close(
        torch.tensor(rope.frequencies(rope.rotated(64)), dtype=torch.float64), expected, rtol=1e-12, atol=0
    )
    assert rope.amplitude() == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize("share", [0.25, 0.7, 1.0])
def test_proportional_frequencies_are_those_of_transformers(share: float) -> None:
    keys = {"partial_rotary_factor": share, "factor": 3.0}
    parameters = {"rope_type": "proportional", "rope_theta": 5e3, **keys}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=parameters)
    with lifted(torch.float64):
        expected, amplitude = ROPE_INIT_FUNCTIONS["proportional"](config)
    rope = ProportionalRope(theta=5e3, **keys)
    actual = torch.tensor(rope.frequencies(rope.rotated(64)), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    assert rope.amplitude() == amplitude


@pytest.mark.parametrize("length", [1, ORIGINAL, ORIGINAL + 1, 1000])
@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_frequencies_of_a_length_are_those_of_transformers(name: str, length: int) -> None:
    if name == "longrope":
        rope, parameters = long_rope(), {"rope_type": name, "factor": 4.0, **LONG_ROPE}
    else:
        rope = DynamicRope(factor=4.0, original_max_position_embeddings=ORIGINAL, **PARTIAL)
        parameters = {"rope_type": name, "factor": 4.0, "rope_theta": 1e4}
    sizes = {"hidden_size": 64, "num_attention_heads": HEADS, "max_position_embeddings": ORIGINAL}
    config = LlamaConfig(**sizes, rope_parameters=parameters | PARTIAL)
    with lifted(torch.float64):
        expected, amplitude = ROPE_INIT_FUNCTIONS[name](config, seq_len=length)
    # transformers reads its factors in float32, so that 1.1 is another number.
    actual = torch.tensor(rope.frequencies(12, length), dtype=torch.float64)
    torch.testing.assert_close(actual, expected.double(), rtol=1e-12, atol=0)
    assert rope.amplitude() == pytest.approx(amplitude, rel=1e-12)


def test_an_attention_factor_that_is_given_counts() -> None:
    assert long_rope(attention_factor=1.25).amplitude() == 1.25
    assert long_rope().amplitude() == math.sqrt(1 + math.log(4) / math.log(ORIGINAL))


# --- tables ----------------------------------------------------------------------------------------------------------


def test_dimensions_beyond_the_rotated_ones_pass(make_part: Callable[..., Any]) -> None:
    x = torch.randn(2, 9, 3, 16)
    partial, whole = make_part(PlainRope(partial_rotary_factor=0.5), head_dim=16), make_part(PlainRope(), head_dim=8)
    turned = rotate(x, *partial(9))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], rotate(x[..., :8], *whole(9)))
    assert rotate(x, *make_part(NoRope(), head_dim=16)(9)) is x


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (PlainRope(partial_rotary_factor=0.2), at("rope.partial_rotary_factor", 0.2, 16, 3, "pairs")),
        (ProportionalRope(partial_rotary_factor=0.1), at("rope.partial_rotary_factor", 0.1, 16, "no pair")),
        (PlainRope(partial_rotary_factor=0.1), at("rope.partial_rotary_factor", 0.1, 16, 1, "pairs")),
        (DynamicRope(factor=2.0, original_max_position_embeddings=8, partial_rotary_factor=0.125), at("rope", 2)),
        (
            LongRope(short_factor=(1.0,) * 8, long_factor=(1.0,) * 6, original_max_position_embeddings=8, factor=2.0),
            at("rope.long_factor", 6, 16, 8, "pairs"),
        ),
    ],
)
def test_shares_and_factors_that_do_not_fit_the_heads_are_problems(rope: Any, expected: ExpectedProblem) -> None:
    attention = GroupedQueryAttention(heads=4, rope=rope)
    check_problems(attention.width_problems(64), expected)
    assert not list(GroupedQueryAttention(heads=4, rope=PlainRope(partial_rotary_factor=0.25)).width_problems(64))


LENGTH_ROPES = {
    "longrope": long_rope(),
    "dynamic": DynamicRope(factor=4.0, original_max_position_embeddings=ORIGINAL, **PARTIAL),
}


@pytest.mark.parametrize("rope", LENGTH_ROPES.values(), ids=list(LENGTH_ROPES))
def test_the_length_is_that_of_the_sequence_or_of_the_job_where_positions_hide_it(make_part, rope: Any) -> None:
    """A job's sequences are long: shorter ones are encoded by their own length, parts and packed documents are not."""
    long, short = (make_part(rope, head_dim=HEAD_DIM, seq_len=length) for length in (LONG, SHORT))
    positions = torch.arange(SHORT)[None]
    for tables in zip(long(SHORT), short(SHORT), strict=True):
        assert torch.equal(*tables)
    for of_job, given in zip(long(LONG), long(SHORT, positions), strict=True):
        assert torch.equal(of_job[:SHORT], given[0])
    assert not torch.equal(long(LONG)[0][:SHORT], long(SHORT)[0])
    for longer in (LONG + 1, 3 * LONG):
        [one, other] = (module(longer)[0] for module in (long, short))
        assert torch.equal(one, other)


@pytest.mark.parametrize("rope", LENGTH_ROPES.values(), ids=list(LENGTH_ROPES))
def test_in_generation_each_row_has_the_length_that_it_has_reached(make_part, rope: Any) -> None:
    module = make_part(rope, head_dim=HEAD_DIM, seq_len=SHORT, dtype=torch.float64)
    lengths = torch.tensor([SHORT, ORIGINAL, ORIGINAL + 1, LONG])
    at = module.at_lengths(lengths[:, None] - 1, lengths)
    for row, length in enumerate(lengths.tolist()):
        for tables, whole in zip(at, module(length), strict=True):
            torch.testing.assert_close(tables[row, 0], whole[-1], rtol=0, atol=1e-12)
    assert torch.equal(copy.deepcopy(module)(LONG)[0], module(LONG)[0])


# --- whole models ----------------------------------------------------------------------------------------------------


def load(model: Any, theirs: dict[str, Tensor]) -> None:
    ours = dict(model.named_parameters())
    named = {from_huggingface(name): tensor for name, tensor in theirs.items()}
    assert set(named) == set(ours)
    for name, tensor in named.items():
        ours[name].data.copy_(tensor)


def difference(reference: Any, model: Any, length: int, dtype: torch.dtype) -> float:
    ids = tokens(length)
    with torch.no_grad(), lifted(dtype):
        expected = reference(ids).logits
    assert expected.dtype == dtype
    assert expected.std() > 0.1
    with torch.no_grad():
        return (model.head.logits(model({"input_ids": ids})) - expected).abs().max().item()


def phi3(rope: dict[str, Any], dtype: torch.dtype, window: int = 0) -> Phi3ForCausalLM:
    torch.manual_seed(0)
    positions = {"max_position_embeddings": 4 * ORIGINAL, "original_max_position_embeddings": ORIGINAL}
    ids = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    with lifted(dtype):
        further = {"rope_parameters": rope, "sliding_window": window or None, "attn_implementation": "eager"}
        config = Phi3Config(**SIZES, **positions, **ids, **further)
        return randomised(Phi3ForCausalLM(config), dtype)


def phi3_weights(reference: Any) -> dict[str, Tensor]:
    """Its parameters by the names of Llama, fused matrices apart."""
    plain, kv = {}, KV_HEADS * HEAD_DIM
    for name, parameter in reference.named_parameters():
        tensor = parameter.data
        if "qkv_proj" in name:
            parts = zip("qkv", tensor.split([HEADS * HEAD_DIM, kv, kv]), strict=True)
            plain |= {name.replace("qkv", letter): part for letter, part in parts}
        elif "gate_up_proj" in name:
            parts = zip(("gate", "up"), tensor.chunk(2), strict=True)
            plain |= {name.replace("gate_up", part): rows for part, rows in parts}
        else:
            plain[name] = tensor
    return plain


def our_phi3(make_model: MakeModel, make_context: Any, reference: Any, rope: Any, dtype: Any, seq_len: int) -> Any:
    window = reference.config.sliding_window or 0
    attention = GroupedQueryAttention(heads=HEADS, kv_heads=KV_HEADS, rope=rope, window=window)
    context = make_context(dtype=dtype, seq_len=seq_len)
    model = make_model(context=context, attention=attention, norm=RMSNorm(eps=1e-5), **KEYS)
    load(model, phi3_weights(reference))
    return model.eval().requires_grad_(False)


PHI3_ROPES = {
    "partial": (PlainRope(**PARTIAL), {"rope_type": "default", "rope_theta": 1e4}),
    "partial longrope": (long_rope(), {"rope_type": "longrope", **LONG_ROPE}),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("name", PHI3_ROPES)
def test_logits_equal_phi3(make_model, make_context, name: str, length: int, precision: str) -> None:
    (rope, parameters), (dtype, tolerance) = PHI3_ROPES[name], PRECISIONS[precision]
    reference = phi3({**parameters, **PARTIAL}, dtype)
    model = our_phi3(make_model, make_context, reference, rope, dtype, seq_len=length)
    assert difference(reference, model, length, dtype) < tolerance


def test_factors_of_the_other_range_would_not_pass(make_model, make_context) -> None:
    reference = phi3({"rope_type": "longrope", **LONG_ROPE, **PARTIAL}, torch.float32)
    model = our_phi3(make_model, make_context, reference, long_rope(), torch.float32, seq_len=LONG)
    positions = {"positions": torch.arange(SHORT).expand(2, -1)}
    by_job = model.head.logits(model({"input_ids": tokens(SHORT), **positions}))
    with torch.no_grad():
        assert (reference(tokens(SHORT)).logits - by_job).abs().max() > 1e-2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_equal_stablelm_whose_heads_are_rotated_in_part(make_model, make_context, precision: str) -> None:
    dtype, tolerance = PRECISIONS[precision]
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    with lifted(dtype):
        config = StableLmConfig(**SIZES, rope_parameters=rope, layer_norm_eps=1e-5, attn_implementation="eager")
        reference = randomised(StableLmForCausalLM(config), dtype)
    rotated = PlainRope(partial_rotary_factor=0.25)
    attention = GroupedQueryAttention(heads=HEADS, kv_heads=KV_HEADS, rope=rotated)
    model = make_model(context=make_context(dtype=dtype), attention=attention, norm=LayerNorm(eps=1e-5), **KEYS)
    load(model, {name: parameter.data for name, parameter in reference.named_parameters()})
    assert difference(reference, model, 30, dtype) < tolerance


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_equals_gpt_neox(make_part, precision: str) -> None:
    dtype, tolerance = PRECISIONS[precision]
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    x = torch.randn(2, 12, 64, dtype=dtype)
    with lifted(dtype), torch.no_grad():
        config = GPTNeoXConfig(
            hidden_size=64, num_attention_heads=HEADS, rope_parameters=rope, attn_implementation="eager"
        )
        reference = GPTNeoXAttention(config, layer_idx=0).to(dtype)
        turns = GPTNeoXRotaryEmbedding(config)(x, torch.arange(12)[None])
        mask = torch.full((12, 12), -torch.inf, dtype=dtype).triu(1)[None, None]
        expected = reference(x, attention_mask=mask, layer_past=None, position_embeddings=turns)[0]
    component = GroupedQueryAttention(heads=HEADS, bias=True, rope=PlainRope(partial_rotary_factor=0.25))
    module = make_part(component, dtype=dtype, dim=64, init=InitStd(inner=0.1, residual=0.1))
    for kind in ("weight", "bias"):
        fused = getattr(reference.query_key_value, kind).data.unflatten(0, (HEADS, 3, -1))
        for number, name in enumerate("qkv"):
            getattr(getattr(module, name), kind).data.copy_(fused[:, number].flatten(0, 1))
        getattr(module.o, kind).data.copy_(getattr(reference.dense, kind).data)
    with torch.no_grad():
        assert (module(x, module.prepare({})) - expected).abs().max() < tolerance


def llama(rope: dict[str, Any], dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0, "max_position_embeddings": ORIGINAL}
    with lifted(dtype):
        config = LlamaConfig(**SIZES, **ids, rope_parameters=rope, rms_norm_eps=1e-5, attn_implementation="eager")
        return randomised(LlamaForCausalLM(config), dtype)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}


def our_llama(make_model: MakeModel, context: Any, reference: Any, rope: Any) -> Any:
    attention = GroupedQueryAttention(heads=HEADS, kv_heads=KV_HEADS, rope=rope)
    model = make_model(context=context, attention=attention, norm=RMSNorm(eps=1e-5), **KEYS)
    load(model, {name: parameter.data for name, parameter in reference.named_parameters()})
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_logits_equal_llama_with_dynamic_scaling(make_model, make_context, length: int, precision: str) -> None:
    dtype, tolerance = PRECISIONS[precision]
    rope = DynamicRope(factor=3.0, original_max_position_embeddings=ORIGINAL)
    reference = llama(DYNAMIC, dtype)
    model = our_llama(make_model, make_context(dtype=dtype, seq_len=LONG), reference, rope)
    assert difference(reference, model, length, dtype) < tolerance


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rotates", [[0, 0], [1, 0]], ids=["no layer rotates", "every other layer rotates"])
def test_logits_equal_smollm3(make_model, make_context, rotates: list[int], precision: str) -> None:
    dtype, tolerance = PRECISIONS[precision]
    torch.manual_seed(0)
    with lifted(dtype):
        config = SmolLM3Config(
            **SIZES,
            no_rope_layers=rotates,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            pad_token_id=0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        reference = randomised(SmolLM3ForCausalLM(config), dtype)
    none, plain = (GroupedQueryAttention(heads=HEADS, kv_heads=KV_HEADS, rope=rope) for rope in (NoRope(), PlainRope()))
    some = AttentionPattern(layers=("plain", "none"), kinds={"plain": plain, "none": none})
    attention = some if any(rotates) else none
    model = make_model(context=make_context(dtype=dtype), attention=attention, norm=RMSNorm(eps=1e-5), **KEYS)
    load(model, {name: parameter.data for name, parameter in reference.named_parameters()})
    assert difference(reference, model, 30, dtype) < tolerance


# --- generation ------------------------------------------------------------------------------------------------------


def greedy(reference: Any, prompt: list[int], count: int, **keys: Any) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **keys
        )
    return list(takewhile(lambda id_: id_ != END, out[0, len(prompt) :].tolist()))


def ours(model: Any, prompts: list[list[int]], count: int, **keys: Any) -> list[list[int]]:
    return generate(model, prompts, count, END, Sampling(temperature=0), **keys)


class CountsPositions:
    """Counts the positions that a model is asked for in each step."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        decode = model.decode
        monkeypatch.setattr(
            model,
            "decode",
            lambda batch, cache: (self.steps.append(batch["input_ids"].shape[1]), decode(batch, cache))[1],
        )


def test_phi3_goes_on_into_long_sequences_with_a_cache_that_is_computed_anew(
    make_model, make_context, monkeypatch
) -> None:
    reference = phi3({"rope_type": "longrope", **LONG_ROPE, **PARTIAL}, torch.float64)
    model = our_phi3(make_model, make_context, reference, long_rope(), torch.float64, seq_len=SHORT)
    prompt = tokens(ORIGINAL - 6, rows=1)[0].tolist()
    expected = greedy(reference, prompt, 16)
    counts = CountsPositions(model, monkeypatch)
    assert ours(model, [prompt], 16) == [expected]
    assert counts.steps == [ORIGINAL - 6, *[1] * 6, ORIGINAL + 1, *[1] * 8]
    assert ours(model, [prompt], 16, use_cache=False) == [expected]
    # Each row by its own length: as alone, whatever the others are.
    other = tokens(5, rows=1)[0].tolist()
    assert ours(model, [prompt, other], 16) == [expected, greedy(reference, other, 16)]


def test_so_it_does_where_the_cache_keeps_the_positions_of_a_window_only(make_model, make_context) -> None:
    reference = phi3({"rope_type": "longrope", **LONG_ROPE, **PARTIAL}, torch.float64, window=10)
    model = our_phi3(make_model, make_context, reference, long_rope(), torch.float64, seq_len=SHORT)
    assert difference(reference, model, SHORT, torch.float64) < 1e-9
    prompts = [tokens(length, rows=1)[0].tolist() for length in (ORIGINAL - 6, 4)]
    assert ours(model, prompts, 14) == [greedy(reference, prompt, 14) for prompt in prompts]


def test_long_prompts_and_short_ones_are_encoded_by_their_length(make_model, make_context) -> None:
    reference = phi3({"rope_type": "longrope", **LONG_ROPE, **PARTIAL}, torch.float64)
    model = our_phi3(make_model, make_context, reference, long_rope(), torch.float64, seq_len=SHORT)
    prompts = [tokens(length, rows=1)[0].tolist() for length in (ORIGINAL + 9, ORIGINAL, 4)]
    assert ours(model, prompts, 6) == [greedy(reference, prompt, 6) for prompt in prompts]


def test_dynamic_scaling_grows_with_each_token_as_in_transformers(make_model, make_context) -> None:
    rope, prompt = DynamicRope(factor=3.0, original_max_position_embeddings=ORIGINAL), tokens(ORIGINAL - 6, rows=1)
    prompt = prompt[0].tolist()
    model = None
    for use_cache in (True, False):
        reference = llama(DYNAMIC, torch.float64)  # a new one: it remembers the longest sequence that it has seen
        model = model or our_llama(make_model, make_context(dtype=torch.float64, seq_len=LONG), reference, rope)
        assert ours(model, [prompt], 24, use_cache=use_cache) == [greedy(reference, prompt, 24, use_cache=use_cache)]


@pytest.mark.parametrize(
    "rope", [PlainRope(**PARTIAL), NoRope(), YarnRope(factor=4.0, original_max_position_embeddings=8, **PARTIAL)]
)
def test_a_cache_changes_no_token(make_model, rope: Any) -> None:
    attention = GroupedQueryAttention(heads=HEADS, kv_heads=KV_HEADS, rope=rope)
    model = make_model(dtype=torch.float64, attention=attention, **KEYS).eval()
    prompts = [tokens(9, rows=1)[0].tolist(), tokens(4, rows=1)[0].tolist()]
    assert ours(model, prompts, 16) == ours(model, prompts, 16, use_cache=False)
