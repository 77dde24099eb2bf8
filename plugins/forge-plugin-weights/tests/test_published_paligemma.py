"""PaliGemma: packed rows, and what it is refused for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from published_models import lifted, ours
from published_vision import MODELS, PLACEHOLDER, SIDE, batch_of, pixels_of, wide
from test_published_vision import CONFIGS, imported, logits

from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_plugin_vision import GRIDS, IMAGE
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import read_json
from forge_plugin_weights.tables import architecture_of, read_config


@pytest.mark.parametrize("name", ["paligemma", "paligemma, gemma2"])
@torch.no_grad()
def test_documents_of_a_packed_row_have_the_logits_that_they_have_alone(tmp_path: Any, name: str) -> None:
    """Two documents with an image each, of unlike lengths and prefixes; alone they are as `transformers` has them."""
    theirs, run = imported(tmp_path, MODELS[name])
    model = ours(run, "fp64")
    batch = {key: tensor[:1] for key, tensor in batch_of(SIDE**2, images=2, length=48).items()}
    batch[GRIDS] = torch.tensor([[[1, SIDE, SIDE]] * 2])
    ids = torch.cat([torch.full((16,), IMAGE), torch.arange(1, 9), torch.full((16,), IMAGE), torch.arange(9, 17)])[None]
    learned = torch.tensor([[18, *range(21, 23), *range(44, 47)]])
    labels = torch.full_like(ids, -100).scatter(1, learned, ids.roll(-1, 1).gather(1, learned))
    documents = (torch.arange(48) >= 24).long()[None]
    packed = {**batch, "input_ids": ids, "labels": labels, "document_ids": documents}
    packed["positions"] = (torch.arange(48) % 24)[None]
    together, pixels = logits(model, packed), pixels_of(model.vision, batch)
    for number, answer in enumerate((19, 21)):  # the first token of each answer
        own = slice(24 * number, 24 * number + 24)
        inputs = {
            "input_ids": ids[:, own].where(ids[:, own] >= 0, PLACEHOLDER),
            "pixel_values": pixels[number : number + 1],
            "token_type_ids": (torch.arange(24) >= answer).long()[None],
        }
        with lifted():
            expected = wide(theirs)(**inputs).logits
        assert (together[:, own] - expected).abs().max() < 1e-9


def test_its_files_say_what_its_processor_needs(tmp_path: Any) -> None:
    _, run = imported(tmp_path, MODELS["paligemma"])
    pixels = read_json(export_run(run, tmp_path / "out") / "preprocessor_config.json")
    assert (pixels["processor_class"], pixels["image_seq_length"]) == ("PaliGemmaProcessor", SIDE**2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type = 'llama'; PaliGemma has gemma or gemma2"),
        ({"projection_dim": 7}, "projection_dim = 7, which must be text_config.hidden_size = 2048"),
        ({"novelty": 7}, "novelty: 7 is not known to Forge"),
    ],
)
def test_what_it_cannot_be_is_named(changes: dict[str, Any], message: str) -> None:
    config = {**CONFIGS["google/paligemma-3b-pt-224"], **changes}
    _, architecture = architecture_of(config, Catalog.installed())
    with pytest.raises(JobError, match=re.escape(message)):
        read_config(architecture, config)
