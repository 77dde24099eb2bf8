"""Builds models the way the engine does, without a job file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from attrs import frozen
from torch import Tensor

from forge_core import load_job
from forge_core.contracts.components import Component, DefaultType
from forge_core.parallel.initialise import check_finite, materialise
from forge_plugin_transformer import Add, GroupedQueryAttention, PlainRope, RMSNorm, SwiGLU, Transformer
from forge_testing.tiny import BESIDE_MODEL

DEFAULTS = {
    "forge-plugin-transformer/gqa": GroupedQueryAttention,
    "forge-plugin-transformer/swiglu": SwiGLU,
    "forge-plugin-transformer/rmsnorm": RMSNorm,
    "forge-plugin-transformer/plain": PlainRope,
    "forge-plugin-transformer/add": Add,
}


@frozen(kw_only=True)
class FakeContext:
    """The parts of `BuildContext` that building a model touches; remembers what was built where."""

    dtype: torch.dtype = torch.float32
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    seq_len: int = 32
    packs: bool = False
    """Whether the job's packing must know where documents end."""
    tokenizer: Any = None
    path: str = ""
    layer: int | None = None
    built: dict[str, int | None] = attrs.field(factory=dict)
    layout: Any = attrs.field(factory=lambda: SimpleNamespace(tp=1))

    @property
    def job(self) -> Any:
        packing = SimpleNamespace(needs_boundaries=self.packs)
        return SimpleNamespace(train=SimpleNamespace(seq_len=self.seq_len), data=SimpleNamespace(packing=packing))

    def at(self, name: str, layer: int | None = None) -> FakeContext:
        path = f"{self.path}.{name}" if self.path else name
        return attrs.evolve(self, path=path, layer=self.layer if layer is None else layer)

    def build(self, component: Component, **inputs: Any) -> Any:
        self.built[self.path] = self.layer
        return component.build(self, **inputs)


def with_defaults(component: Any) -> Any:
    """Put components in place of defaults named by type, as reading a job does."""
    values = {f.name: getattr(component, f.name) for f in attrs.fields(type(component))}
    filled = {name: DEFAULTS[v.type]() if isinstance(v, DefaultType) else v for name, v in values.items()}
    nested = {name: _nested(value) for name, value in filled.items()}
    return attrs.evolve(component, **nested)


def _nested(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nested(item) for name, item in value.items()}
    return with_defaults(value) if isinstance(value, Component) else value


def build(component: Any, context: FakeContext, **inputs: Any) -> Any:
    """Build on the meta device and initialise; float64 parameters if the context computes in float64."""
    with torch.device("meta"):
        module = context.build(with_defaults(component), **inputs)
    if context.dtype == torch.float64:
        module.double()
    materialise(module, context.device, seed=0)
    check_finite(module)
    return module


@pytest.fixture
def load_model(tmp_path: Path) -> Callable[..., Any]:
    """load_model(toml, keys=""): the model of a job with these tables, and with `keys` of `[model]`."""

    def load(model: str, keys: str = "") -> Any:
        path = tmp_path / "job.toml"
        path.write_text(f'[model]\ntype = "transformer"\nvocab_size = 8\n{keys}\n{model}\n{BESIDE_MODEL}')
        return load_job(path).model

    return load


@pytest.fixture
def make_context() -> Callable[..., FakeContext]:
    return FakeContext


@pytest.fixture
def make_part() -> Callable[..., Any]:
    """make_part(component, dim=…, …, dtype=…): the built and initialised module."""

    def make(component: Any, dtype: torch.dtype = torch.float32, seq_len: int = 32, **inputs: Any) -> Any:
        return build(component, FakeContext(dtype=dtype, seq_len=seq_len), **inputs)

    return make


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """make_model(dim=…, …, dtype=…): two layers, with initial matrices large enough for attention to matter."""

    def make(context: FakeContext | None = None, dtype: torch.dtype = torch.float32, **keys: Any) -> Any:
        attention = GroupedQueryAttention(heads=4, kv_heads=2)
        settings = {"dim": 32, "layers": 2, "vocab_size": 61, "init_std": 0.2, "ffn": SwiGLU(hidden=48)}
        component = Transformer(**({"attention": attention} | settings | keys))
        return build(component, context or FakeContext(dtype=dtype))

    return make


@pytest.fixture
def ids() -> Tensor:
    """(2, 16) tokens below 61."""
    return torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))
