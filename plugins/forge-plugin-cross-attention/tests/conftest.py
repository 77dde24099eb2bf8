"""Builds models of `cross_attention_models`, which it puts on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.parallel.initialise import check_finite, materialise

sys.path.insert(0, str(Path(__file__).parent))
from cross_attention_models import uneven


@pytest.fixture
def make_model(make_job: Callable[..., Any], build: Callable[..., Any]) -> Callable[..., Any]:
    """make_model(component): in float64, with matrices large enough for attention to matter."""

    def make(component: Any, **changes: Any) -> Any:
        model = build(make_job(model=component, seq_len=16, **{"precision": "fp64", **changes})).model
        materialise(model, torch.device("cpu"), seed=0)
        check_finite(model)
        return uneven(model).eval()

    return make
