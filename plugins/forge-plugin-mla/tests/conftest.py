"""Builds small models with latent attention, as a job would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core.parallel.initialise import check_finite, materialise
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_transformer import Transformer

VOCABULARY = 61


@pytest.fixture
def make_model(make_job: Callable[..., Any], build: Callable[..., Any]) -> Callable[..., Any]:
    """make_model(attention, precision=…, **keys of the model): initial matrices are large enough for attention to
    matter, and norms differ from one."""

    def make(attention: MultiHeadLatentAttention, precision: str = "fp32", **keys: Any) -> Any:
        settings = {"dim": 32, "layers": 2, "vocab_size": VOCABULARY, "init_std": 0.2, **keys}
        model = build(make_job(model=Transformer(attention=attention, **settings), precision=precision)).model
        materialise(model, torch.device("cpu"), seed=0)
        check_finite(model)
        return with_uneven_norms(model).eval().requires_grad_(False)

    return make


def with_uneven_norms(model: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    return model


@pytest.fixture
def ids() -> Tensor:
    """(2, 24) tokens."""
    return torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
