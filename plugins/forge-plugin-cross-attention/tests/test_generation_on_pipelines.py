"""Generation with images by the ranks of a pipeline, of which the first one alone has the tower."""

from __future__ import annotations

import torch

from forge_core.plugins.catalog import Catalog
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_vision import GRIDS, PATCHES, VisionLanguage
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks
from forge_testing.runs import tiny_run
from forge_testing.vision import tiny_language, tiny_vision

MODEL = VisionLanguage(language=tiny_language(), vision=tiny_vision(), fusion=CrossAttention(every=1, gate_start=1.0))
PROMPTS = [[3, -1, 5, -1, 7], [2, 9, 4], [-1, 8]]
GRID, NONE = [1, 2, 2], [0, 0, 0]


def rows(folder, **changes):
    run = tiny_run(folder, model=MODEL, precision="fp64", global_batch_size=8, seq_len=24, **changes)
    for name, parameter in run.model.named_parameters():  # so large that the likeliest token depends on the images
        if not name.endswith("gate"):
            parameter.data.mul_(12.0)
    model, greedy = run.model.eval(), Sampling(temperature=0)
    patches = torch.randint(256, (3, 8, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    grids = torch.tensor([[GRID, GRID], [NONE, NONE], [GRID, NONE]])
    texts = [
        generate(model, PROMPTS, 8, 31, greedy, entries={PATCHES: seen, GRIDS: grids})
        for seen in (patches, 255 - patches)
    ]
    # A prompt of one position: a call with an image, and the next one without, have batches of one shape.
    return texts, generate(model, [[-1]], 8, 31, greedy, entries={PATCHES: patches[2:], GRIDS: grids[2:]})


def test_later_ranks_know_where_images_stand_and_get_features_with_the_activations(tmp_path):
    (one, other), _ = expected = rows(tmp_path)
    assert one[1] == other[1]
    assert one != other

    def rank(number):
        return rows(tmp_path, parallel=LAYOUTS["pp2"].stages(Catalog.installed()), micro_batch_size=4)

    assert run_on_ranks(2, rank) == [expected] * 2
