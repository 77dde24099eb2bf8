"""A language model with cross-attention: what images change, what they do not, and generation."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from cross_attention_models import LANGUAGE, SMALL, Open, model_of, rows
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.parallel.initialise import materialise
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_parallel import TensorParallel
from forge_plugin_transformer import LayerNorm, NoFFN
from forge_plugin_vision import (
    GRIDS,
    PATCHES,
    AttentionPool,
    AveragePool,
    MLPAdapter,
    Perceiver,
    PixelShuffle,
    VisionLanguage,
    VisionPart,
    ViT,
)
from forge_testing import TinyModel, job_problems
from forge_testing.refusals import at, check_problems, naming, problems_of
from forge_testing.vision import RandomImages

TEXT = "abcdefgh"


def with_other_image(batch: dict[str, Tensor], image: int) -> dict[str, Tensor]:
    patches = batch[PATCHES].clone()
    patches[:, 6 * image : 6 * image + 6] += 1
    return {**batch, PATCHES: patches}


@pytest.mark.parametrize("gate", ["tanh", "none"])
def test_training_starts_from_the_language_model_to_the_bit(make_job, build, gate):
    def hidden(component, batch):
        model = build(make_job(model=component, seq_len=16, precision="fp64")).model
        materialise(model, torch.device("cpu"), seed=0)
        return model(batch)

    component = model_of(CrossAttention(every=2, gate=gate, **SMALL))
    batch = rows("abcdefgh", "hgfedcba")
    plain = hidden(LANGUAGE, batch)
    assert torch.equal(hidden(component, batch), plain)
    assert torch.equal(hidden(component, {"input_ids": batch["input_ids"]}), plain)
    with_images = with_other_image(rows("abicdefg", "hgfeidcb"), 0)
    assert torch.equal(hidden(component, with_images), hidden(component, {"input_ids": with_images["input_ids"]}))


def test_rows_without_images_add_zero_exactly_whatever_the_gates_and_patches(make_model):
    model = make_model(model_of())
    plain = make_model(LANGUAGE)
    plain.load_state_dict(model.state_dict(), strict=False)
    batch = with_other_image(rows("iabcdefg", TEXT), 0)
    assert torch.equal(model(batch)[1:], plain({"input_ids": batch["input_ids"][1:]}))
    assert not torch.equal(model(batch)[:1], model(with_other_image(batch, 0))[:1])


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("sees", ["last", "together", "all"])
def test_another_image_changes_what_follows_it_in_its_document_only(make_model, sees, place):
    model = make_model(model_of(CrossAttention(layers=(1,), sees=sees, place=place, gate="none", **SMALL)))
    for parameter in model.layers["1"].cross_attention.parameters():
        parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    batch = rows("abicdief", "abcdefgh")
    batch["document_ids"] = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]]).expand(2, -1)
    for image, changed in ((0, [2, 3, 4]), (1, [5, 6, 7]), (2, [])):
        difference = (model(with_other_image(batch, image)) - model(batch)).abs().amax(-1)
        assert difference[0].nonzero().flatten().tolist() == changed
        assert difference[1].max() == 0


def test_last_does_not_see_the_image_before_but_through_text(make_model):
    """With one block before the first layer, no other text can have carried the first image on."""
    model = make_model(model_of(Open(layers=(0,), sees="last", **SMALL)))
    batch = model.prepare(rows("ibicd"))

    def after_block(batch):
        return model.layers["0"].look(model.embed(batch), batch)[0]

    difference = (after_block(with_other_image(batch, 0)) - after_block(batch)).abs().amax(-1)
    assert difference[0].nonzero().flatten().tolist() == [0, 1]


def test_permuted_rows_and_their_images_have_permuted_hidden_states(make_model):
    model = make_model(model_of())
    batch, order = rows("iabcidef", "abcdefgh", "aiibcdef"), torch.tensor([2, 0, 1])
    permuted = model({name: tensor[order] for name, tensor in batch.items()})
    assert (permuted - model(batch)[order]).abs().max() < 1e-12
    wrong = {**batch, PATCHES: batch[PATCHES][order]}
    assert (model(wrong) - model(batch)).abs().max() > 1e-3


def test_gates_at_zero_have_gradients_and_open(make_model):
    model = make_model(model_of(CrossAttention(every=2, **SMALL)))
    hidden = model(rows("iabcidef", "abcdefgh"))
    (
        hidden * torch.randn(hidden.shape, dtype=hidden.dtype, generator=torch.Generator().manual_seed(3))
    ).sum().backward()
    gates = {name: p.grad.abs().item() for name, p in model.named_parameters() if name.endswith("_gate.weight")}
    assert len(gates) == 4
    assert min(gates.values()) > 1e-4
    # Behind closed gates nothing moves in the first step, the tower included.
    assert model.vision.adapter.project.weight.grad.abs().max() == 0


def test_rows_without_images_have_gradients_of_exactly_zero(make_model):
    model = make_model(model_of())
    model(rows(TEXT)).sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith(("vision.", "markers.")) or ".cross_attention." in name:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() == 0, name


def test_masks_are_made_once_for_all_blocks(make_model, monkeypatch):
    model = make_model(model_of(Open(every=1, **SMALL)))
    calls = []
    add_masks = model.sight.add_masks
    monkeypatch.setattr(model.sight, "add_masks", lambda *args: calls.append(1) or add_masks(*args))
    model(rows("iabcidef"))
    assert len(calls) == 1


@pytest.mark.parametrize("sees", ["last", "together", "all"])
def test_decoding_with_a_cache_equals_the_full_pass(make_model, sees):
    model = make_model(model_of(Open(every=2, sees=sees, qk_norm=True, norm=LayerNorm(), **SMALL))).requires_grad_(
        False
    )
    texts = ["iiabcidefg", "abcdef", "hiabc"]  # as many images as may be, none, one
    whole = [model(rows(text, seed=number))[0] for number, text in enumerate(texts)]
    length = max(map(len, texts))
    padded = rows(*(text.rjust(length, "z") for text in texts))
    for number, text in enumerate(texts):
        padded[PATCHES][number] = rows(text, seed=number)[PATCHES][0]
    positions = torch.stack([torch.arange(length) - (length - len(text)) for text in texts]).clamp(min=-1)
    cache, outputs = model.new_cache(3, length), []
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 10)):
        batch = {"input_ids": padded["input_ids"][:, start:stop], "positions": positions[:, start:stop]}
        images = {name: padded[name] for name in (PATCHES, GRIDS)} if start == 0 else {}
        outputs.append(model.decode({**batch, **images}, cache))
    decoded = torch.cat(outputs, 1)
    for row, expected in zip(decoded, whole, strict=True):
        assert (row[-len(expected) :] - expected).abs().max() < 1e-12


def test_images_of_later_calls_follow_those_before(make_model):
    model = make_model(model_of(Open(every=2, sees="all", **SMALL))).requires_grad_(False)
    batch = rows("iabicidef", "abcdefghi"[:8] + "k")
    cache = model.new_cache(2, 9)
    halves = []
    for part, images in ((slice(0, 3), slice(0, 1)), (slice(3, 9), slice(1, 3))):
        patches = batch[PATCHES][:, 6 * images.start : 6 * images.stop]
        grids = batch[GRIDS][:, images]
        halves.append(model.decode({"input_ids": batch["input_ids"][:, part], PATCHES: patches, GRIDS: grids}, cache))
    assert (torch.cat(halves, 1) - model(batch)).abs().max() < 1e-12


def test_generated_tokens_are_the_same_with_and_without_the_cache(make_model):
    model = make_model(model_of()).requires_grad_(False)
    texts = ["iiabc", "abcdefg", "ha"]
    batch = rows(*texts[:1], seed=4)
    entries = {
        name: torch.cat([batch[name], torch.zeros_like(batch[name]).expand(2, -1, -1)]) for name in (PATCHES, GRIDS)
    }
    prompts = [rows(text)["input_ids"][0].tolist() for text in texts]
    settings = {"end_of_text": 31, "sampling": Sampling(temperature=0.0), "entries": entries}
    cached = generate(model, prompts, 6, **settings)
    assert cached == generate(model, prompts, 6, **settings, use_cache=False)
    alone = generate(model, prompts, 6, **{**settings, "entries": None})
    assert cached[0] != alone[0]
    assert cached[1:] == alone[1:]


def test_rows_of_another_size_than_in_training_are_refused(make_model):
    model, batch = make_model(model_of()), rows("iabcdefg")
    with pytest.raises(ForgeError, match=naming("6 patches", "3 images", 18)):
        model({**batch, PATCHES: batch[PATCHES][:, :6]})


def test_text_alone_is_decoded_like_the_language_model(make_model):
    model = make_model(model_of()).requires_grad_(False)
    ids = rows(TEXT)["input_ids"]
    cache = model.new_cache(1, 8)
    pieces = [model.decode({"input_ids": ids[:, part]}, cache) for part in (slice(0, 5), slice(5, 8))]
    assert (torch.cat(pieces, 1) - model({"input_ids": ids})).abs().max() < 1e-12


@pytest.mark.parametrize(
    "adapter",
    [
        PixelShuffle(),
        AveragePool(ragged=True),
        AttentionPool(heads=2, ragged=True),
        Perceiver(latents=5, layers=1, heads=2, head_dim=4),
    ],
    ids=lambda adapter: type(adapter).__name__,
)
def test_features_of_every_adapter_belong_to_their_images(make_model, adapter):
    vision = VisionPart(
        encoder=ViT(dim=16, layers=1, heads=2, patch=2, size=(8, 12), position_interpolation="bilinear"),
        adapter=adapter, images_per_sequence=3, patches_per_sequence=40,
    )  # fmt: skip
    model = make_model(model_of(Open(layers=(0,), **SMALL), vision=vision))
    grids = torch.tensor([[[1, 2, 4], [1, 4, 2], [1, 2, 2]], [[1, 4, 6], [1, 2, 2], [0, 0, 0]], [[0, 0, 0]] * 3])
    patches = torch.randint(256, (3, 40, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    batch = model.prepare({**rows("abicidei", "iabcideg", TEXT), PATCHES: patches, GRIDS: grids})
    assert model.sight.features == model.vision(batch).shape[1]

    def after_block(patches):
        other = {**batch, PATCHES: patches}
        return model.layers["0"].look(model.embed(other), other)[0]

    for start, stop, row, changed in ((0, 8, 0, [2, 3]), (8, 16, 0, [4, 5, 6]), (16, 20, 0, [7]), (20, 40, 0, []),
                                      (0, 24, 1, [0, 1, 2, 3]), (24, 28, 1, [4, 5, 6, 7]), (0, 40, 2, [])):  # fmt: skip
        other = patches.clone()
        other[row, start:stop] ^= 255
        difference = (after_block(other) - after_block(patches)).abs().amax(-1)
        assert difference[row].nonzero().flatten().tolist() == changed
        assert difference.sum() == difference[row].sum()


def test_its_flops_are_those_of_text_and_of_features(make_model):
    model, language = make_model(model_of(CrossAttention(layers=(1, 2), **SMALL))), make_model(LANGUAGE)
    length, features = 16, 18
    projections = 6 * (2 * 16 * 16 + 2 * 16 * 8 * features / length)
    block = projections + 12 * 16 * features + 6 * 3 * 16 * 24
    assert model.flops(length) == pytest.approx(language.flops(length) + 2 * block + model.vision.flops() / length)
    own = zip(model.layer_flops(length), language.layer_flops(length), strict=True)
    assert [more - less for more, less in own] == pytest.approx([0, block, block, 0])


def test_flops_of_a_step_are_those_of_the_features_that_there_are(make_job, build, train, lines):
    """Of rows of 16 positions with one image of four features at most, which two blocks see."""
    vision = VisionPart(encoder=ViT(dim=16, layers=1, heads=2, patch=2, size=(4, 4)), adapter=MLPAdapter(hidden=8))
    model = VisionLanguage(language=LANGUAGE, vision=vision, fusion=CrossAttention(layers=(1, 2), **SMALL))
    data = {"sources": (RandomImages(text_only=3, held_out=0),)}
    first, *_ = lines(train(make_job(model=model, data=data, steps=1, seq_len=16, precision="fp64")))
    images = first["vision/patches_per_sequence"] / 4
    assert 0 < images < 1
    tower = 6 * 4 * (12 * 16 + 4 * 16**2 + 2 * 16 * 64 + 16 * 8 + 8 * 16) + 12 * 16 * 4 * 4
    of_image = tower / 16 + 2 * (6 * 2 * 16 * 8 * 4 / 16 + 12 * 16 * 4)
    blocks = 2 * (6 * 2 * 16 * 16 + 6 * 3 * 16 * 24)
    language = build(make_job(model=LANGUAGE, seq_len=16)).model.flops(16)
    assert first["flops_per_token"] == pytest.approx(language + blocks + images * of_image, rel=1e-12)


def test_float8_takes_what_multiplies_text(make_model):
    """Neither the tower nor keys and values: rows need not have a multiple of 16 features."""
    globs = make_model(model_of()).float8_exempt()
    block = "layers.1.cross_attention"
    names = [f"{block}.attention.{part}" for part in "qkvo"] + [f"{block}.ffn.up", "vision.adapter.project"]
    exempt = [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]
    assert exempt == [f"{block}.attention.k", f"{block}.attention.v", "vision.adapter.project"]


def test_a_language_model_without_attention_sees_images_too(make_model):
    model = make_model(model_of(Open(every=2, heads=2), language=TinyModel(dim=16, layers=2)))
    batch = rows("abicdief")
    difference = (model(with_other_image(batch, 1)) - model(batch)).abs().amax(-1)
    assert difference[0].nonzero().flatten().tolist() == [5, 6, 7]
    assert not hasattr(model, "new_cache")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"heads": 3}, at("model.fusion.heads", 3, 16)),
        ({"every": 5}, at("model.fusion.every", 5, 4)),
        ({"layers": (1, 4)}, at("model.fusion.layers", 4)),
    ],
)
def test_sizes_that_do_not_fit_the_language_model_are_refused_when_the_job_is_checked(make_job, keys, expected):
    check_problems(problems_of(make_job(model=model_of(CrossAttention(**keys)), seq_len=16)), expected)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"heads": 4, "kv_heads": 3}, at("model.fusion.kv_heads", 3, 4)),
        ({"every": 2, "layers": (1,)}, at("model.fusion.layers", "every")),
        ({"layers": (1, 1)}, at("model.fusion.layers", "once")),
        ({"layers": (-1, 1)}, at("model.fusion.layers", "[-1, 1]", "from 0")),
        ({"gate": "none", "gate_start": 0.5}, at("model.fusion.gate_start", "gates")),
        ({"ffn": NoFFN()}, at("model.fusion.ffn", "none")),
    ],
)
def test_wrong_keys_are_refused(make_job, keys, expected):
    check_problems(problems_of(make_job(model=model_of(CrossAttention(**keys)), seq_len=16)), expected)


def test_tensor_parallel_ranks_share_key_heads(make_job):
    job = make_job(model=model_of(), seq_len=16, parallel={"tp": TensorParallel(degree=4)})
    message = "model.fusion.kv_heads: 2 does not divide by the tensor-parallel degree 4"
    assert any(message in problem for problem in job_problems(job, ranks=4))
