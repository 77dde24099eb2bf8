"""Windows, `merger`, `mrope` and DeepStack together keep the contract of fusions, with one curve under every layout.

Rows have images and videos.
"""

from __future__ import annotations

import pytest
import torch
from qwen_models import MODEL

from forge_plugin_vision import PATCHES
from forge_testing.suites.vision import VisionModelSuite
from forge_testing.vision import RandomImages


class TestQwen(VisionModelSuite):
    component = MODEL
    images = RandomImages(text_only=2, held_out=5, video_every=2)
    layouts = ("tp2", "pp2", "cp2", "checkpointing2")  # copies of whole models: `TestJoint`


def test_the_suite_refuses_a_model_whose_last_token_sees_the_frames_of_another_document(tmp_path):
    def leak(model, batch, hidden):
        return hidden + batch[PATCHES].to(hidden.dtype).mean((1, 2))[:, None, None] * _last(hidden)

    with pytest.raises(AssertionError, match="the document behind it"):
        _suite_of(leak).test_a_video_is_seen_frame_by_frame(tmp_path)


def test_the_suite_refuses_a_model_whose_last_token_sees_the_images_of_other_rows(tmp_path):
    def leak(model, batch, hidden):
        return hidden + batch[PATCHES].to(hidden.dtype).mean() * _last(hidden)

    with pytest.raises(AssertionError, match="hidden states of another row"):
        _suite_of(leak).test_an_image_changes_its_own_row_alone(tmp_path)


def test_the_suite_refuses_a_model_whose_gradients_depend_on_what_is_frozen(tmp_path):
    def scale(model, batch, hidden):
        return hidden if model.norm.weight.requires_grad else 2 * hidden

    with pytest.raises(AssertionError, match="if other parts are frozen"):
        _suite_of(scale).test_gradients_reach_what_trains_and_nothing_else(tmp_path, "vision.adapter")


def _suite_of(change):
    """Returns the suite of a model whose hidden states are changed by change(model, batch, hidden)."""

    class Changed(VisionModelSuite):
        component = MODEL

        def _model(self, *args, **keys):
            model = super()._model(*args, **keys)
            model.register_forward_hook(lambda module, inputs, hidden: change(module, inputs[0], hidden))
            return model

    return Changed()


def _last(hidden):
    """Returns (S, 1): whether a position is the last one."""
    return (torch.arange(hidden.shape[1]) == hidden.shape[1] - 1)[:, None]
