"""Prompts with images: `generate` hands them to the model once, and continues from its cache."""

from __future__ import annotations

import pytest
import torch

from forge_core.parallel.initialise import materialise
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_vision import GRIDS, PATCHES, VisionLanguage
from forge_testing.vision import tiny_language, tiny_vision

END = 31


@pytest.fixture
def model(make_job, build):
    job = make_job(model=VisionLanguage(language=tiny_language(), vision=tiny_vision()), precision="fp64")
    model = build(job).model
    materialise(model, torch.device("cpu"), seed=0)
    for parameter in model.parameters():  # large enough for the likeliest token to depend on the prompt
        parameter.data.mul_(8.0)
    return model.eval()


def test_a_batch_with_images_continues_alike_with_and_without_a_cache(model):
    image = [-1, -1, -1, -1]
    prompts = [[3, *image, 5, *image, 7], [2, 9, 4], [*image, 8]]
    generator = torch.Generator().manual_seed(0)
    entries = {
        PATCHES: torch.randint(256, (3, 8, 12), generator=generator, dtype=torch.uint8),
        GRIDS: torch.tensor([[[1, 2, 2], [1, 2, 2]], [[0, 0, 0], [0, 0, 0]], [[1, 2, 2], [0, 0, 0]]]),
    }
    greedy = Sampling(temperature=0)
    together = generate(model, prompts, 8, END, greedy, entries=entries)
    assert generate(model, prompts, 8, END, greedy, entries=entries, use_cache=False) == together
    for row, prompt in enumerate(prompts):
        own = {name: tensor[row : row + 1] for name, tensor in entries.items()}
        assert generate(model, [prompt], 8, END, greedy, entries=own) == together[row : row + 1]
    other = {**entries, PATCHES: 255 - entries[PATCHES]}
    changed = generate(model, prompts, 8, END, greedy, entries=other)
    assert changed[1] == together[1]
    assert changed != together
