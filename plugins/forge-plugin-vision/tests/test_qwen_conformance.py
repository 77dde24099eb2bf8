"""Windows, `merger`, `mrope` and DeepStack together keep the contract of fusions, with one curve under every layout.

Rows have images and videos.
"""

from __future__ import annotations

import pytest
import torch
from qwen_models import MODEL

from forge_plugin_vision import PATCHES
from forge_plugin_vision.suite import VisionModelSuite
from forge_plugin_vision.testing import RandomImages


class TestQwen(VisionModelSuite):
    component = MODEL
    images = RandomImages(text_only=2, held_out=5, video_every=2)
    layouts = ("fsdp2", "tp2", "pp2", "cp2", "checkpointing2")  # copies of whole models are the subject of `TestJoint`


def test_the_suite_refuses_a_model_whose_last_token_sees_the_frames_of_another_document(tmp_path):
    class Leaking(VisionModelSuite):
        component = MODEL

        def _model(self, *args, **keys):
            model = super()._model(*args, **keys)

            def leak(module, inputs, hidden):
                last = torch.arange(hidden.shape[1]) == hidden.shape[1] - 1
                return hidden + inputs[0][PATCHES].to(hidden.dtype).mean((1, 2))[:, None, None] * last[:, None]

            model.register_forward_hook(leak)
            return model

    with pytest.raises(AssertionError, match="the document behind it"):
        Leaking().test_a_video_is_seen_frame_by_frame(tmp_path)


def test_the_suite_refuses_a_model_whose_gradients_depend_on_what_is_frozen(tmp_path):
    class Coupled(VisionModelSuite):
        component = MODEL

        def _model(self, *args, **keys):
            model = super()._model(*args, **keys)

            def scale(module, inputs, hidden):
                return hidden if model.norm.weight.requires_grad else 2 * hidden

            model.vision.adapter.register_forward_hook(scale)
            return model

    with pytest.raises(AssertionError, match="if other parts are frozen"):
        Coupled().test_gradients_reach_what_trains_and_nothing_else(tmp_path, "vision.adapter")
