"""Ranks that share a vision-language model generate the tokens of one process, whatever holds the tower."""

from __future__ import annotations

import pytest
import torch

from forge_core.plugins.catalog import Catalog
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_transformer import GroupedQueryAttention, PlainRope, Transformer
from forge_plugin_vision import GRIDS, PATCHES, Joint, MultimodalRope, VisionLanguage
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks
from forge_testing.runs import tiny_run
from forge_testing.vision import tiny_vision

FUSIONS = {
    "joint, deepstack and mrope": (Joint(deepstack=(0,)), MultimodalRope(sections=(1, 1, 0))),
    "joint, bidirectional": (Joint(bidirectional=True), PlainRope()),
    "joint, prefix": (Joint(prefix=True), PlainRope()),
}


def rows(folder, fusion, rope, layout=""):
    attention = GroupedQueryAttention(heads=4, kv_heads=2, rope=rope)
    language = Transformer(vocab_size=32, dim=16, layers=2, attention=attention)
    case = LAYOUTS[layout] if layout else None
    stages = {"parallel": case.stages(Catalog.installed()), "micro_batch_size": 4} if case else {}
    model = VisionLanguage(language=language, vision=tiny_vision(), fusion=fusion)
    run = tiny_run(folder, model=model, precision="fp64", global_batch_size=8, seq_len=24, **stages)
    for parameter in run.model.parameters():  # so large that the likeliest token depends on the images
        parameter.data.mul_(12.0)
    image = [-1] * 4
    prompts = [[3, *image, 5, *image, 7], [2, 9, 4], [*image, 8]]
    patches = torch.randint(256, (3, 8, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    grids = torch.tensor([[[1, 2, 2], [1, 2, 2]], [[0, 0, 0], [0, 0, 0]], [[1, 2, 2], [0, 0, 0]]])
    greedy, model = Sampling(temperature=0), run.model.eval()
    return [
        generate(model, prompts, 8, 31, greedy, entries={PATCHES: p, GRIDS: grids}) for p in (patches, 255 - patches)
    ]


@pytest.mark.parametrize("name", FUSIONS)
def test_a_pipeline_and_parts_of_sequences(name, tmp_path):
    one, other = expected = rows(tmp_path, *FUSIONS[name])
    assert one[1] == other[1]
    assert one != other
    layouts = ["pp2", "cp2"] if "mrope" in name else ["pp2"]

    def rank(number):
        return [rows(tmp_path, *FUSIONS[name], layout) for layout in layouts]

    assert run_on_ranks(2, rank) == [[expected] * len(layouts)] * 2
