"""Losses of the paper's own library, `unit-scaling`, for tokens and weights that any program can make.

    pip install unit-scaling && python u_mup_reference.py     # writes u_mup_reference.json

The tests read the file: the library is not among their dependencies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB, DIM, LAYERS, HEADS, HIDDEN = 32, 32, 3, 4, 128
BATCH, LENGTH, STEPS = 4, 16, 6
RATE, DECAY, EPSILON = 0.5, 0.02, 1e-30
"""Decay is multiplied by the rate in a step, as torch's AdamW does; the library takes the product."""
RECORD = Path(__file__).with_suffix(".json")


def tokens() -> Iterator[torch.Tensor]:
    """Yields (BATCH, LENGTH) tokens for each step."""
    for step in range(STEPS):
        yield torch.from_numpy(np.random.RandomState(step).randint(0, VOCAB, (BATCH, LENGTH)))


def weights() -> dict[str, torch.Tensor]:
    """Returns weights from N(0, 1), by the names of Forge's transformer."""
    shapes = {"embedding.weight": (VOCAB, DIM), "head.weight": (VOCAB, DIM)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.attention.{key}.weight": (DIM, DIM) for key in "qkvo"}
        shapes |= {f"layers.{layer}.ffn.{key}.weight": (HIDDEN, DIM) for key in ("gate", "up")}
        shapes[f"layers.{layer}.ffn.down.weight"] = DIM, HIDDEN
    draw = np.random.RandomState(100)
    return {name: torch.from_numpy(draw.standard_normal(shape)) for name, shape in shapes.items()}


def main() -> None:
    # By name, as the tests do not need it
    uu: Any = import_module("unit_scaling")
    torch.set_default_dtype(torch.float64)
    # The library computes norms in float32, which would leave eight digits
    torch.Tensor.float = torch.Tensor.double
    model = uu.TransformerDecoder(DIM, VOCAB, LAYERS, HEADS)
    own = weights()
    with torch.no_grad():
        model.embedding.weight.copy_(own["embedding.weight"])
        model.projection.weight.copy_(own["head.weight"])
        for number, layer in enumerate(model.layers):
            at = f"layers.{number}"
            layer.mhsa.linear_qkv.weight.copy_(torch.cat([own[f"{at}.attention.{key}.weight"] for key in "qkv"]))
            layer.mhsa.linear_o.weight.copy_(own[f"{at}.attention.o.weight"])
            for ours, theirs in (("up", "linear_1"), ("gate", "linear_gate"), ("down", "linear_2")):
                getattr(layer.mlp, theirs).weight.copy_(own[f"{at}.ffn.{ours}.weight"])
    for module in model.modules():
        if isinstance(module, uu.RMSNorm):
            module.eps = EPSILON
    optimizer = uu.optim.AdamW(model.parameters(), lr=RATE, weight_decay=RATE * DECAY, eps=EPSILON, betas=(0.9, 0.95))
    losses = []
    for batch in tokens():
        # Not `model.loss`, which computes in float32
        logits = model(batch)
        loss = uu.functional.cross_entropy(logits[:, :-1].flatten(end_dim=-2), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    RECORD.write_text(json.dumps({"unit_scaling": uu.__version__, "losses": losses}) + "\n")
    print(losses)


if __name__ == "__main__":
    main()
