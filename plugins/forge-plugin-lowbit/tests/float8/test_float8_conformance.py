"""`float8` keeps the contracts of its kind, within the rounding of eight bits."""

from __future__ import annotations

import forge_plugin_lowbit.float8.stage  # noqa: F401  torchao is imported once, and not by each process
from forge_plugin_lowbit.float8 import Float8
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_testing.suites import StageSuite


class TestFloat8(StageSuite):
    component = Float8()
    model = Transformer(
        vocab_size=32, dim=32, layers=2, attention=GroupedQueryAttention(heads=4), ffn=SwiGLU(hidden=64)
    )
    precision = "fp32"
    loss_tolerance = 0.05
    weights_tolerance = 0.5
