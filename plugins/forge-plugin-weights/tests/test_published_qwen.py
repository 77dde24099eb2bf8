"""Qwen2.5-VL and Qwen3-VL from their files and back, with images and videos in one prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from published_models import ours
from published_qwen import MODELS, prompts_of
from published_vision import wide_logits
from test_published_vision import check_tensors, imported, loaded, logits

from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_weights.exporting import export_run


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_that_sees_videos_comes_in_and_goes_out(tmp_path, name):
    theirs, run = imported(tmp_path, MODELS[name])
    ours32, ours64 = ours(run), ours(run, "fp64")
    prompts = prompts_of(name.partition(",")[0])
    inputs = prompts.inputs(ours32.vision)
    expected = theirs(**inputs).logits
    assert expected.std() > 0.1
    assert (logits(ours32, prompts.batch) - expected).abs().max() < 1e-4
    assert (logits(ours64, prompts.batch) - wide_logits(theirs, prompts.inputs(ours64.vision))).abs().max() < 1e-9

    again = loaded(export_run(run, tmp_path / "out"), theirs)
    check_tensors(theirs, again, ())
    assert torch.equal(again(**inputs).logits, expected)
    one = slice(0, 1)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    prompt = prompts.inputs(ours32.vision, one)
    settings["attention_mask"] = torch.ones_like(prompt["input_ids"])
    tokens = again.generate(**prompt, **settings)[0, prompt["input_ids"].shape[1] :].tolist()
    entries = {key: entry[one] for key, entry in prompts.batch.items() if key != "input_ids"}
    ids = prompts.batch["input_ids"][0].tolist()
    for use_cache in (True, False):
        said = generate(ours32, [ids], 8, -1, Sampling(temperature=0), entries=entries, use_cache=use_cache)
        assert said == [tokens]
