"""Which images a position sees: the arithmetic of open_flamingo and of Mllama's processor, and documents."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from cross_attention_models import Open, rows
from torch import Tensor
from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

from forge_plugin_cross_attention.modules.block import Attention
from forge_plugin_cross_attention.modules.sight import GRIDS, MASK, SEEN, VISIBLE, Sight, visible_images
from forge_plugin_transformer import InitStd
from forge_plugin_vision import PATCHES, AdapterComponent, Grid, ImageFormat, ImageInput, LinearAdapter, ViT

GENERATOR = torch.Generator().manual_seed(0)


def random_ids(count: int, length: int, images: int) -> Tensor:
    """(count, length), with `images` images or fewer at random positions."""
    ids = torch.randint(0, 32, (count, length), generator=GENERATOR)
    return ids.scatter(1, torch.randint(0, length, (count, images), generator=GENERATOR), -1)


def seen(ids: Tensor, sees: str, document_ids: Tensor | None = None) -> list[list[list[int]]]:
    """For each position of each row, the numbers of the images that it sees."""
    return [[list(range(*bounds)) for bounds in row] for row in visible_images(ids, document_ids, sees).tolist()]


@frozen
class ThreeFeatures(LinearAdapter):
    """Has three features of each image, whatever its size; as the contract allows, of an empty grid too."""

    def positions(self, grid: Grid) -> int:
        return grid.patches * 0 + 3


def sight_of(images: int, features: int, adapter: AdapterComponent) -> Sight:
    form = ImageFormat(patch=1)
    budget = ImageInput(
        format=form,
        patches_per_sequence=features,
        images_per_sequence=images,
        encoder=ViT(),
        adapter=adapter,
        fusion=Open(),
    )
    return Sight(budget, features, torch.float64)


def with_patches(batch: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    return {**batch, PATCHES: torch.zeros(len(batch[GRIDS]), count, 3, dtype=torch.uint8)}


def test_last_and_all_are_open_flamingos_media_time():
    ids = random_ids(20, 12, 4)
    text_time = (ids < 0).cumsum(-1)[..., None]
    media_time = torch.arange(4) + 1
    for sees, expected in (("last", text_time == media_time), ("all", text_time >= media_time)):
        assert seen(ids, sees) == [[row.nonzero().flatten().tolist() for row in each] for each in expected]


def test_together_is_what_mllamas_processor_masks():
    for ids in random_ids(30, 10, 5):
        expected: list[list[int]] = [[] for _ in ids]
        for image, (start, stop) in enumerate(get_cross_attention_token_mask(ids.tolist(), -1)):
            for position in range(start, len(ids) if stop == -1 else stop):
                expected[position].append(image)
        assert seen(ids[None], "together") == [expected]


@pytest.mark.parametrize("sees", ["last", "together", "all"])
def test_an_image_is_seen_within_its_document_only(sees):
    documents = ["ab", "iic", "d", "iei", "i", "f"]
    ids = rows("".join(documents))["input_ids"]
    document_ids = torch.tensor([[number for number, text in enumerate(documents) for _ in text]])
    expected, before = [], 0
    for text in documents:
        (alone,) = seen(rows(text)["input_ids"], sees)
        expected += [[before + image for image in images] for images in alone]
        before += text.count("i")
    assert seen(ids, sees, document_ids) == [expected]
    assert [] in expected
    assert seen(ids, sees) != [expected]


def test_features_belong_to_images_by_their_grids():
    sight = sight_of(images=2, features=9, adapter=LinearAdapter())
    grids = torch.tensor([[[1, 2, 2], [2, 1, 1]], [[0, 0, 0], [0, 0, 0]], [[1, 1, 1], [0, 0, 0]]])
    numbers = sight.numbers(grids, 9)
    assert numbers.tolist() == [[0] * 4 + [1] * 2 + [-1] * 3, [-1] * 9, [0] + [-1] * 8]
    visible = visible_images(torch.tensor([[5, -1, -1], [5, 5, 5], [-1, 5, -1]]), None, "last")
    batch = sight.add_masks(with_patches({GRIDS: grids, VISIBLE: visible}, 9))
    # Whoever sees nothing may see all, multiplied by zero; the third row has a marker more than images.
    assert batch[SEEN].squeeze(-1).tolist() == [[0, 1, 1], [0, 0, 0], [1, 1, 0]]
    assert batch[MASK].shape == (3, 1, 3, 9)
    assert batch[MASK].squeeze(1).sum(-1).tolist() == [[9, 4, 2], [9, 9, 9], [1, 1, 9]]


def test_a_place_without_an_image_has_no_features_whatever_the_adapter():
    sight = sight_of(images=2, features=7, adapter=ThreeFeatures())
    grids = torch.tensor([[[1, 2, 2], [1, 1, 1]], [[1, 2, 2], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]])
    assert sight.numbers(grids, 7).tolist() == [[0] * 3 + [1] * 3 + [-1], [0] * 3 + [-1] * 4, [-1] * 7]


def test_attention_is_open_flamingos():
    """helpers.py, `MaskedCrossAttention`, written out: 3 images of 2 features each, heads of width 5."""
    attention = Attention(7, heads=4, kv_heads=4, head_dim=5, qk_norm_eps=None, init=InitStd(0.5, 0.5)).double()
    for parameter in attention.parameters():
        parameter.data.normal_(generator=GENERATOR)
    ids = rows("ab" + "icid" + "iefg")["input_ids"]
    x, media = (torch.randn(1, n, 7, dtype=torch.float64, generator=GENERATOR) for n in (10, 6))
    q, k, v = (
        part(source).unflatten(-1, (4, 5)).transpose(1, 2)
        for part, source in ((attention.q, x), (attention.k, media), (attention.v, media))
    )
    scores = (q * 5**-0.5) @ k.mT
    text_time = (ids < 0).cumsum(-1)
    mask = text_time[:, None, :, None] == (torch.arange(3) + 1).repeat_interleave(2)
    weights = scores.masked_fill(~mask, -torch.finfo(scores.dtype).max).softmax(-1)
    weights = weights.masked_fill((text_time == 0)[:, None, :, None], 0.0)
    expected = attention.o((weights @ v).transpose(1, 2).flatten(2))
    grids = torch.tensor([[[1, 1, 2]] * 3])
    visible = visible_images(ids, None, "last")
    batch = sight_of(images=3, features=6, adapter=LinearAdapter()).add_masks(
        with_patches({GRIDS: grids, VISIBLE: visible}, 6)
    )
    assert (batch[SEEN] * attention(x, media, batch) - expected).abs().max() < 1e-12
    assert expected[0, :2].abs().max() == 0
    assert expected[0, 2:].abs().min() > 0
