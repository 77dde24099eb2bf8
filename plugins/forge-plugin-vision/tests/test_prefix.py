"""`prefix` of fusion `joint`: what stands before the first learned token is seen both ways, as in PaliGemma."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import pytest
import torch
from attrs import evolve
from test_bidirectional import LANGUAGE, MLA, WINDOWS
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from forge_core.parallel.initialise import materialise
from forge_kit.nn.generation import PROMPT
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_parallel import ContextParallel
from forge_plugin_transformer import MultiTokenPrediction
from forge_plugin_transformer.huggingface_names import to_huggingface
from forge_plugin_vision import GRIDS, IMAGE, PATCHES, Joint, VisionLanguage
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.suites.vision import VisionModelSuite
from forge_testing.vision import tiny_language, tiny_vision

S, END = 16, 31


LARGE: Any = {"layer_scale": 0.5, "qk_norm": True, "block_norm": "rmsnorm", "attention_bias": False}
"""Keys of InternVL's largest tower."""


class TestPrefix(VisionModelSuite):
    """Its rows are learned from the first image on: under layouts, prefixes have an image. The tower is InternVL's."""

    vision = evolve(tiny_vision(), encoder=evolve(tiny_vision().encoder, **LARGE))
    component = VisionLanguage(language=tiny_language(), vision=vision, fusion=Joint(prefix=True))
    layouts = ("pp2",)


@pytest.fixture
def make_model(make_job: Callable[..., Any], build: Callable[..., Any]) -> Callable[..., Any]:
    def make(language: Any = LANGUAGE, precision: str = "fp64", **keys: Any) -> Any:
        component = VisionLanguage(language=language, vision=tiny_vision(), fusion=Joint(**{"prefix": True, **keys}))
        model = build(make_job(model=component, precision=precision, seq_len=S)).model
        materialise(model, torch.device("cpu"), seed=0)
        return model.eval()

    return make


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """A caption; a question and its answer in two turns; two packed documents, the second without an image; a text."""
    ids = torch.tensor(
        [
            [5, *[IMAGE] * 4, *range(1, 12)],
            [*[IMAGE] * 4, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18],
            [5, *[IMAGE] * 4, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
            [*range(S)],
        ]
    )
    learned = torch.zeros(4, S, dtype=torch.bool)
    for row, places in enumerate(([*range(4, 15)], [6, 7, 8, 12, 13], [6, 7, 12, 13, 14], [*range(15)])):
        learned[row, places] = True
    patches = torch.randint(256, (4, 8, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    grids = torch.zeros(4, 2, 3, dtype=torch.int64)
    grids[:3, 0] = torch.tensor([1, 2, 2])
    documents = torch.zeros(4, S, dtype=torch.int64)
    documents[2, 9:] = 1
    return {
        "input_ids": ids,
        "labels": ids.roll(-1, 1).where(learned, -100),
        "document_ids": documents,
        "positions": torch.arange(S) - torch.tensor([0, 0, 9, 0])[:, None] * documents,
        PATCHES: patches,
        GRIDS: grids,
    }


PREFIXES = [[[*range(5)]], [[*range(7)]], [[*range(7)], [9, 10, 11, 12]], [[0]]]
"""Of each row of `batch`, by hand: up to the first position with a label, by document."""


def blocks_of() -> Tensor:
    blocks = torch.full((4, S), -1)
    for row, prefixes in enumerate(PREFIXES):
        for number, prefix in enumerate(prefixes):
            blocks[row, prefix] = number
    return blocks


@pytest.mark.parametrize("windows", [False, True])
@torch.no_grad()
def test_logits_are_those_under_paligemmas_mask(
    windows: bool, make_model: Callable[..., Any], batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama of `transformers` with our weights, our features, and the mask that PaliGemma makes, packed rows too."""
    language = evolve(LANGUAGE, attention=WINDOWS.kinds["near"]) if windows else LANGUAGE
    if windows:
        language = evolve(language, attention=evolve(language.attention, sinks=False))
    model = make_model(language)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-6, attn_implementation="sdpa", sliding_window=3,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).double().eval()
    own = {name: p for name, p in model.named_parameters() if not name.startswith("vision.")}
    theirs.load_state_dict({to_huggingface(name): parameter for name, parameter in own.items()})
    (x,) = model.embed(model.prepare(batch))
    create = create_sliding_window_causal_mask if windows else create_causal_mask
    mask = create(config, x, None, None, position_ids=batch["positions"], block_sequence_ids=blocks_of())
    expected = theirs(inputs_embeds=x, attention_mask=mask, position_ids=batch["positions"]).logits
    logits = model.head.logits(model(batch))
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-11
    causal = make_model(language, prefix=False)
    assert (causal.head.logits(causal(batch)) - expected)[:3].abs().amax((1, 2)).min() > 1e-3


@torch.no_grad()
def test_no_position_sees_a_learned_token_before_it_is_said(
    make_model: Callable[..., Any], batch: dict[str, Tensor]
) -> None:
    """Whatever is learned: another token at any place changes no hidden state whose label it is, or comes before."""
    model, generator = make_model(), torch.Generator().manual_seed(1)
    for _ in range(4):
        learned = torch.rand(4, S, generator=generator) < 0.3
        batch["labels"] = batch["input_ids"].roll(-1, 1).where(learned, -100)
        hidden = model(batch)
        for position in range(1, S):
            other = {**batch, "input_ids": batch["input_ids"].clone()}
            tokens = other["input_ids"][:, position]
            other["input_ids"][:, position] = (tokens + 1).where(tokens >= 0, tokens)
            changed = (model(other) != hidden).any(-1)
            assert not (changed & learned)[:, :position].any()


@torch.no_grad()
def test_a_batch_that_does_not_say_where_the_prompt_ends_is_causal(
    make_model: Callable[..., Any], batch: dict[str, Tensor]
) -> None:
    model, causal = make_model(), make_model(prefix=False)
    labels = batch.pop("labels")
    assert torch.equal(model(batch), causal(batch))
    prompt = blocks_of() >= 0
    assert torch.equal(model({**batch, PROMPT: prompt}), model({**batch, "labels": labels}))


@torch.no_grad()
def test_a_prompt_is_a_prefix_and_what_follows_is_causal_with_and_without_a_cache(
    make_model: Callable[..., Any],
) -> None:
    model = make_model()
    for parameter in model.parameters():  # large enough for the likeliest token to depend on the prompt
        parameter.data.mul_(3.0)
    image = [IMAGE] * 4
    prompts = [[3, *image, *image, 7], [2, 9, 4], [*image, 8]]
    entries = {
        PATCHES: torch.randint(256, (3, 8, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8),
        GRIDS: torch.tensor([[[1, 2, 2]] * 2, [[0, 0, 0]] * 2, [[1, 2, 2], [0, 0, 0]]]),
    }
    greedy, written = Sampling(temperature=0), []
    for row, prompt in enumerate(prompts):  # by forward, with labels behind the prompt alone
        own, ids = {name: tensor[row : row + 1] for name, tensor in entries.items()}, list(prompt)
        for _ in range(8):
            whole = torch.tensor([ids])
            labels = torch.full_like(whole, -100).index_fill(1, torch.arange(len(prompt) - 1, len(ids)), 1)
            hidden = model({"input_ids": whole, "labels": labels, **own})
            ids.append(int(model.head.logits(hidden)[0, -1].argmax()))
        written.append([*takewhile(lambda token: token != END, ids[len(prompt) :])])
    for use_cache in (True, False):
        assert generate(model, prompts, 8, END, greedy, entries=entries, use_cache=use_cache) == written
    causal = make_model(prefix=False)
    causal.load_state_dict(model.state_dict())
    assert generate(causal, prompts, 8, END, greedy, entries=entries) != written
    texts = [[3, 5, 7, 9], [2, 9, 4], [8]]  # rows that join those that run
    together = generate(model, texts, 6, END, greedy, batch_size=2)
    assert together == [generate(model, [text], 6, END, greedy)[0] for text in texts]


def test_what_cannot_have_it_is_refused_when_the_job_is_checked(make_job: Callable[..., Any]) -> None:
    component = TestPrefix.component
    for language, facts in (
        (evolve(LANGUAGE, attention=MLA), ["LatentAttention", "layers.0", "causal"]),
        (evolve(LANGUAGE, mtp=MultiTokenPrediction()), ["multi-token prediction", "labels"]),
    ):
        problems = problems_of(make_job(model=evolve(component, language=language)))
        check_problems(problems, at("model.fusion.prefix", *facts))
    problems = problems_of(make_job(model=component, parallel={"cp": ContextParallel(degree=2)}), ranks=2)
    check_problems(problems, at("model.fusion.prefix", "cp", 2))
    both = evolve(component, fusion=Joint(prefix=True, bidirectional=True))
    check_problems(problems_of(make_job(model=both)), at("model.fusion.prefix", "bidirectional"))
