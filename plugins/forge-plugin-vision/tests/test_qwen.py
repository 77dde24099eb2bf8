"""Names of Qwen's tensors, which `forge-run weights` maps by the same tables, with logits: test_published_qwen.py."""

from __future__ import annotations

import pytest
import torch

from forge_core import ForgeDeprecation
from forge_plugin_vision import QwenViT
from forge_plugin_vision.qwen_names import from_huggingface, to_huggingface

PUBLISHED = {
    "model.visual.patch_embed.proj.weight": (8, 3, 2, 4, 4),
    "model.visual.blocks.1.mlp.linear_fc1.weight": (2,),
    "model.visual.merger.norm.bias": (2,),
    "model.visual.deepstack_merger_list.0.linear_fc2.weight": (2,),
    "model.language_model.layers.3.mlp.up_proj.weight": (2,),
}


def test_names_map_both_ways() -> None:
    theirs = {name: torch.rand(shape) for name, shape in PUBLISHED.items()}
    with pytest.warns(ForgeDeprecation, match="use forge-run weights import"):
        ours = from_huggingface(theirs)
    assert ours["vision.encoder.patch.weight"].shape == (8, 96)
    with pytest.warns(ForgeDeprecation, match="use forge-run weights export"):
        back = to_huggingface(ours, "qwen3_vl", QwenViT(patch=4).image_format())
    assert list(back) == list(theirs)
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.items())


@pytest.mark.filterwarnings("ignore::forge_core.ForgeDeprecation")
def test_names_of_published_files_are_read_and_others_refused() -> None:
    published = {"visual.merger.ln_q.weight": torch.zeros(2), "model.layers.3.mlp.up_proj.weight": torch.zeros(2)}
    assert list(from_huggingface(published)) == ["vision.adapter.norm.weight", "layers.3.ffn.up.weight"]
    for name in ("model.visual.blocks.0.attn.gate.weight", "model.visual.merger.mlp.1.weight", "lm_head.gain"):
        with pytest.raises(KeyError, match="no counterpart"):
            from_huggingface({name: torch.zeros(2)})
