"""Encoders of images of any size never ask for the sizes: a step can be planned, and a GPU does not wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from qwen_models import MODEL
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_core.data.reading import collate
from forge_core.engine.build import build_bare_model, build_context
from forge_core.parallel.initialise import materialise
from forge_core.plugins.catalog import Catalog
from forge_plugin_vision import Joint, MLPAdapter, ViT
from forge_testing import tiny_job
from forge_testing.vision import RandomImages

ANY_SIZE = ViT(dim=16, layers=1, heads=2, patch=2, size=(4, 4), position_interpolation="bilinear")
ENCODERS = {
    "qwen_vit": MODEL,
    "bidirectional": evolve(MODEL, fusion=evolve(MODEL.fusion, bidirectional=True)),
    "vit": evolve(MODEL, vision=evolve(MODEL.vision, encoder=ANY_SIZE, adapter=MLPAdapter()), fusion=Joint()),
}


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_step_runs_on_tensors_without_values(encoder: str, tmp_path: Any) -> None:
    catalog = Catalog.installed()
    job = tiny_job(str(tmp_path), catalog, model=ENCODERS[encoder], seq_len=40)
    context = build_context(job, catalog, None)
    rows = RandomImages(text_only=2).build(context)
    batch = collate([rows[number] for number in range(4)])
    model, _ = build_bare_model(job, context)
    materialise(model, torch.device("cpu"), 0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        hidden = model({name: mode.from_tensor(tensor) for name, tensor in batch.items() if name != "labels"})
        hidden.sum().backward()
    assert hidden.shape == (4, 40, 16)
