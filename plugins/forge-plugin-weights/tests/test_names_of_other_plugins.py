"""Plugins of models convert states that are in memory, by names of their own tables: they are those of files."""

from __future__ import annotations

import pytest
import torch
from published_models import MODELS, ours
from safetensors.torch import load_file

import forge_plugin_mla.huggingface_names as latent
import forge_plugin_moe.huggingface_names as experts
import forge_plugin_transformer.huggingface_names as dense
from forge_plugin_weights.importing import import_folder

PARTS = {"deepseek_v3": latent.PARTS}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_states_and_files_have_the_same_names(tmp_path, name):
    MODELS[name].write(tmp_path / "published")
    files = (tmp_path / "published").glob("*.safetensors")
    published = {key: tensor for path in files for key, tensor in load_file(path).items()}
    state = ours(import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)).state_dict()
    if MODELS[name].keys.get("tie_word_embeddings"):
        del state["head.weight"]
    converted = experts.from_huggingface(published, PARTS.get(name, dense.PARTS))
    assert converted.keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in converted.items())
