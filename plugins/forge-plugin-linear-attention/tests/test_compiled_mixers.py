"""Compiled, forward and backward, a layer computes what it computes without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_plugin_linear_attention import KDA, GatedDeltaNet, Mamba2, ShortConv
from forge_plugin_transformer import Transformer
from forge_testing.runs import tiny_run

LAYERS: dict[str, Any] = {
    "gated_deltanet": GatedDeltaNet(heads=2, chunk=4),
    "kda": KDA(heads=2, chunk=4),
    "mamba2": Mamba2(heads=4, state=8, chunk=4),
    "short_conv": ShortConv(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_pass_of_a_compiled_layer_is_its_own(tmp_path, name):
    component = Transformer(vocab_size=32, dim=16, layers=1, attention=LAYERS[name])
    layer = tiny_run(tmp_path, model=component, seq_len=8, precision="fp64").model.layers["0"].attention
    x = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    batch = {"document_ids": torch.tensor([[0] * 3 + [1] * 5, [0] * 8])}
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        out = call(x, batch)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
