"""`bidirectional` of fusion `joint`: positions of an image attend to each other both ways, as in Gemma 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from qwen_models import MODEL
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

from forge_core.contracts.components import ModelComponent
from forge_core.parallel.initialise import materialise
from forge_core.parallel.layout import plan_layout
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_parallel import ContextParallel
from forge_plugin_transformer import (
    AttentionPattern,
    GroupedQueryAttention,
    MultiTokenPrediction,
    RMSNorm,
    SwiGLU,
    Transformer,
)
from forge_plugin_transformer.huggingface_names import to_huggingface
from forge_plugin_transformer.modules.spans import SPANS
from forge_plugin_vision import (
    GRIDS,
    IMAGE,
    PATCHES,
    VIDEO,
    GemmaViT,
    Joint,
    ScaledPool,
    VisionLanguage,
    VisionPart,
)
from forge_plugin_vision.modules.grafting import PLACES
from forge_testing import TinyModel, job_problems, tiny_job
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.suites.vision import VisionModelSuite
from forge_testing.vision import tiny_language, tiny_vision

S = 16
LANGUAGE = Transformer(
    vocab_size=32,
    dim=16,
    layers=2,
    attention=GroupedQueryAttention(heads=4, kv_heads=2),
    ffn=SwiGLU(hidden=24),
    norm=RMSNorm(eps=1e-6),
    init_std=0.3,
)
ROWS = {
    "apart": [5, *[IMAGE] * 4, 7, *[IMAGE] * 4, 1, 2, 3, 4, 5, 6],
    "text": [*range(S)],
    "side by side": [5, 3, *[IMAGE] * 8, 1, 2, 3, 4, 5, 6],
}
BLOCKS = {
    "apart": [-1, 0, 0, 0, 0, -1, 1, 1, 1, 1, *[-1] * 6],
    "text": [-1] * S,
    "side by side": [-1, -1, 0, 0, 0, 0, 1, 1, 1, 1, *[-1] * 6],
}


class TestBidirectional(VisionModelSuite):
    component = VisionLanguage(language=tiny_language(), vision=tiny_vision(), fusion=Joint(bidirectional=True))
    layouts = ("tp2", "pp2", "checkpointing2", "cp2")  # copies of whole models: `TestJoint`


WINDOWS = AttentionPattern(
    layers=("near", "full"),
    kinds={
        "near": GroupedQueryAttention(heads=4, kv_heads=2, window=3, sinks=True),
        "full": GroupedQueryAttention(heads=4, kv_heads=2),
    },
)
"""Images are longer than the window."""


class TestBidirectionalWithWindows(VisionModelSuite):
    """With the encoder and the adapter of Gemma 4, whose images see themselves in windows alone."""

    component = VisionLanguage(
        language=evolve(LANGUAGE, attention=WINDOWS),
        vision=VisionPart(
            encoder=GemmaViT(dim=16, layers=2, heads=2, head_dim=8, hidden=24, patch=2, positions=32),
            adapter=ScaledPool(window=2, standardise=True),
            images_per_sequence=2,
            patches_per_sequence=64,
        ),
        fusion=Joint(bidirectional=True, bidirectional_in_windows=True),
    )
    layouts = ("tp2", "traced")


GEMMA = TestBidirectionalWithWindows.component


@pytest.mark.parametrize(
    ("encoder", "fusion", "expected"),
    [
        ({"head_dim": 6}, {}, at("vision.encoder.head_dim", 6, 4)),
        ({"positions": 31}, {}, at("vision.encoder.positions", 31, 64, 32)),
        ({"std": (0.5, 0.0, 0.5)}, {}, at("vision.encoder.std", "[0.5, 0.0, 0.5]", 0)),
        ({}, {"bidirectional": False}, at("fusion.bidirectional_in_windows", "bidirectional")),
    ],
)
def test_keys_of_gemma_that_cannot_be_are_refused_when_the_job_is_checked(tmp_path, encoder, fusion, expected):
    vision = evolve(GEMMA.vision, encoder=evolve(GEMMA.vision.encoder, **encoder))
    model = evolve(GEMMA, vision=vision, fusion=evolve(GEMMA.fusion, **fusion))
    wanted = evolve(expected, path=f"model.{expected.path}")
    check_problems(problems_of(tiny_job(str(tmp_path), model=model)), wanted)


@pytest.fixture
def make_model(make_job: Callable[..., Any], build: Callable[..., Any]) -> Callable[..., Any]:
    """make_model(language, precision, **keys of the fusion): the model of a job, with initial values."""

    def make(language: ModelComponent = LANGUAGE, precision: str = "fp64", **keys: Any) -> Any:
        component = VisionLanguage(
            language=language, vision=tiny_vision(), fusion=Joint(**{"bidirectional": True, **keys})
        )
        model = build(make_job(model=component, precision=precision, seq_len=S)).model
        materialise(model, torch.device("cpu"), seed=0)
        return model.eval()

    return make


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """The rows of `ROWS`, with two images of 2 x 2 patches each where there are any."""
    ids = torch.tensor(list(ROWS.values()))
    patches = torch.randint(256, (3, 8, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return {"input_ids": ids, PATCHES: patches, GRIDS: (ids < 0).any(1)[:, None, None] * torch.tensor([[1, 2, 2]] * 2)}


def with_inputs(model: Any, batch: dict[str, Tensor], change: Callable[[Tensor], None]) -> Tensor:
    """Hidden states, given other inputs of the first layer: the tower has made each of them of a whole image."""
    prepared = model.prepare(batch)
    (x,) = model.embed(prepared)
    change(x)
    carry = (x,)
    for layer in model.layers.values():
        carry = layer(carry, prepared)
    return model.finish(carry, prepared)


def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """`transformers` computes angles and norms in float32 whatever the dtype of its weights; here in float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)


@torch.no_grad()
def test_frames_with_text_between_see_themselves_alone(
    make_model: Callable[..., Any], batch: dict[str, Tensor]
) -> None:
    """A clip is one grid; where its frames have text between, a span that went on behind it would see labels."""
    model, ids = make_model(), torch.tensor([ROWS["apart"]])
    ids = ids.where(ids >= 0, VIDEO)
    clip = {"input_ids": ids, PATCHES: batch[PATCHES][:1], GRIDS: torch.tensor([[[2, 2, 2], [0, 0, 0]]])}

    def changed_at(place: int) -> list[int]:
        """Positions that depend on the input at a position."""
        hidden = with_inputs(model, clip, lambda x: None)
        other = with_inputs(model, clip, lambda x: x[:, place].mul_(2))
        return ((other - hidden).abs().amax(-1)[0] > 0).nonzero().flatten().tolist()

    assert changed_at(4) == list(range(1, S))
    assert changed_at(9) == list(range(6, S))


def test_images_of_one_position_are_spans_of_one(make_model: Callable[..., Any]) -> None:
    spans_of = make_model().image_spans
    grids = torch.tensor([[[1, 1, 1], [1, 1, 1]], [[1, 2, 2], [0, 0, 0]]])
    places = torch.tensor([[0, 1, -1, -1, -1], [-1, 0, 1, 2, 3]])
    patches = torch.zeros(2, 8, 12)
    spans = spans_of({GRIDS: grids, PLACES: places, PATCHES: patches})[SPANS]
    assert spans.tolist() == [[0, 1, -1, -1, -1], [-1, 0, 0, 0, 0]]


@pytest.mark.parametrize("rows", [["apart", "text"], ["apart", "text", "side by side"]], ids=["Gemma's", "any"])
@torch.no_grad()
def test_logits_are_those_under_gemma3s_mask(
    rows: list[str], make_model: Callable[..., Any], batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama of `transformers` with our weights, our features and the mask that Gemma 3 makes."""
    model = make_model()
    in_float64(monkeypatch)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-6, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).double().eval()
    own = {name: p for name, p in model.named_parameters() if not name.startswith("vision.")}
    theirs.load_state_dict({to_huggingface(name): parameter for name, parameter in own.items()})
    batch = {name: tensor[[list(ROWS).index(row) for row in rows]] for name, tensor in batch.items()}
    blocks = torch.tensor([BLOCKS[row] for row in rows])
    if "side by side" not in rows:  # Gemma's own function takes a run of image tokens for one image
        assert torch.equal(blocks, get_block_sequence_ids_for_mask((batch["input_ids"] < 0).int()))
    (x,) = model.embed(model.prepare(batch))
    mask = create_causal_mask(config, x, None, None, block_sequence_ids=blocks)
    assert mask is not None
    expected = theirs(inputs_embeds=x, attention_mask=mask).logits
    logits = model.head.logits(model(batch))
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-11
    one_way = make_model(bidirectional=False)
    assert (one_way.head.logits(one_way(batch)) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("bidirectional", [True, False])
@torch.no_grad()
def test_a_later_position_of_the_same_image_is_seen_only_if_bidirectional(
    bidirectional: bool, make_model: Callable[..., Any], batch: dict[str, Tensor]
) -> None:
    model = make_model(bidirectional=bidirectional)
    hidden = model(batch)
    for name, row in zip(ROWS, range(3), strict=True):
        for position, block in enumerate(BLOCKS[name]):
            first = BLOCKS[name].index(block) if bidirectional and block >= 0 else position

            def change(x: Tensor, row: int = row, position: int = position) -> None:
                x[row, position] += 1

            changed = (with_inputs(model, batch, change) != hidden).any(-1)
            assert changed[row].tolist() == [at >= first for at in range(S)], (name, position)
            assert int(changed.any(1).sum()) == 1


@torch.no_grad()
def test_an_image_across_two_documents_is_seen_within_each(
    make_model: Callable[..., Any], batch: dict[str, Tensor]
) -> None:
    model = make_model()
    batch["document_ids"] = (torch.arange(S) >= 3).long().expand(3, -1)
    hidden = model(batch)

    def change(x: Tensor) -> None:
        x[0, 4] += 1

    changed = (with_inputs(model, batch, change) != hidden).any(-1)[0]
    assert changed.tolist() == [at >= 3 for at in range(S)]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_text_is_that_of_the_model_without_it_to_the_bit(
    precision: str, make_model: Callable[..., Any], batch: dict[str, Tensor]
) -> None:
    """Rows of text beside rows with images, and what stands before an image; and the gradient of a row of text."""
    both, one = make_model(precision=precision), make_model(precision=precision, bidirectional=False)
    hidden, plain = both(batch), one(batch)
    for row, until in enumerate((1, S, 2)):
        assert torch.equal(hidden[row, :until], plain[row, :until])
        assert torch.equal(hidden[row, until:], plain[row, until:]) == (until == S)
    for states in (hidden, plain):
        states[1].square().sum().backward()
    for (name, ours), theirs in zip(both.named_parameters(), one.parameters(), strict=True):
        if name != "head.weight":  # hidden states do not depend on it
            assert torch.equal(ours.grad, theirs.grad), name


def test_a_prompt_with_images_continues_alike_with_and_without_a_cache(make_model: Callable[..., Any]) -> None:
    from forge_plugin_generate.generate import Sampling, generate

    model = make_model()
    for parameter in model.parameters():  # large enough for the likeliest token to depend on the prompt
        parameter.data.mul_(3.0)
    image = [IMAGE] * 4
    prompts = [[3, *image, *image, 7], [2, 9, 4], [*image, 8]]
    entries = {
        PATCHES: torch.randint(256, (3, 8, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8),
        GRIDS: torch.tensor([[[1, 2, 2]] * 2, [[0, 0, 0]] * 2, [[1, 2, 2], [0, 0, 0]]]),
    }
    greedy = Sampling(temperature=0)
    together = generate(model, prompts, 8, 31, greedy, entries=entries)
    assert generate(model, prompts, 8, 31, greedy, entries=entries, use_cache=False) == together
    for row, prompt in enumerate(prompts):
        own = {name: tensor[row : row + 1] for name, tensor in entries.items()}
        assert generate(model, [prompt], 8, 31, greedy, entries=own) == together[row : row + 1]


def test_it_goes_with_coordinates_and_deepstack(tmp_path: Any) -> None:
    class Suite(VisionModelSuite):
        component = evolve(MODEL, fusion=evolve(MODEL.fusion, bidirectional=True))

    suite = Suite()
    suite.test_a_cache_changes_nothing_with_images(tmp_path)
    suite.test_text_is_the_language_models_own(tmp_path)
    suite.test_images_of_a_document_are_not_seen_by_another(tmp_path)


# --- what cannot be ----------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class OwnAttention(GroupedQueryAttention):
    """A component that builds a module of its own, with another mask."""

    def build(self, context: Any, dim: int, init: Any) -> Any:
        module = super().build(context, dim, init)
        module.__class__ = type("Windowed", (type(module),), {"attends_spans": False})
        return module


MLA = MultiHeadLatentAttention(heads=4, kv_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)


@pytest.mark.parametrize(
    ("language", "facts"),
    [
        (evolve(LANGUAGE, attention=MLA), ["LatentAttention", "layers.0", "causal"]),
        (evolve(LANGUAGE, attention=OwnAttention(heads=4)), ["Windowed", "layers.0", "causal"]),
        (TinyModel(), ["layers.0", "causal"]),
        (evolve(LANGUAGE, mtp=MultiTokenPrediction()), ["multi-token prediction", "labels"]),
    ],
    ids=["mla", "an attention of one's own", "no attention", "mtp"],
)
def test_language_models_that_cannot_are_refused_when_the_job_is_checked(
    language: ModelComponent, facts: list[str], make_job: Callable[..., Any]
) -> None:
    component = VisionLanguage(language=language, vision=tiny_vision(), fusion=Joint(bidirectional=True))
    check_problems(problems_of(make_job(model=component)), at("model.fusion.bidirectional", *facts))
    assert not job_problems(make_job(model=evolve(component, fusion=Joint())))


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_divided_sequences_are_refused(method: Any, make_job: Callable[..., Any], build: Callable[..., Any]) -> None:
    component = TestBidirectional.component
    parallel = {"cp": ContextParallel(degree=2, method=method)}
    job = make_job(model=component, parallel=parallel)
    check_problems(problems_of(job, ranks=2), at("model.fusion.bidirectional", "cp", 2))
    model = build(make_job(model=component)).model
    stages = parallel["cp"].model_problems(model, plan_layout(job, 2)[0])  # of any fusion that does so
    check_problems(stages, at("", "sequence_mixers()"))
    assert not job_problems(make_job(model=evolve(component, fusion=Joint()), parallel=parallel), ranks=2)
