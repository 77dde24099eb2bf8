"""Tap points see what all modalities add to the stream."""

from __future__ import annotations

import pytest
import torch

from forge_plugin_mot import MixtureOfTransformers
from forge_testing.tap_points import seen_at_points


@pytest.mark.parametrize("norm", ["before", "after"])
def test_the_stream_is_the_sum_of_what_parts_add(make_model, batch, norm):
    model = make_model(MixtureOfTransformers(norm=norm)).eval()
    seen = {name: tensors[0] for name, tensors in seen_at_points(model, batch).items()}
    for layer in range(2):
        pre, mid, post, attention, ffn = (
            seen[f"layers.{layer}.{name}"] for name in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
        )
        assert torch.equal(pre + attention, mid)
        assert torch.equal(mid + ffn, post)
    assert torch.equal(seen["final_norm"], model(batch))
