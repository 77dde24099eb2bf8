"""The stages keep the contracts of their kind. Their settings and compositions are in tests/parity."""

from __future__ import annotations

from forge_plugin_parallel import FSDP, ActivationCheckpointing, ContextParallel, PipelineParallel, TensorParallel
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.suites import StageSuite


class TestFSDP(StageSuite):
    component = FSDP()
    ranks = 2
    micro_batch_size = 2


class TestTensorParallel(StageSuite):
    component = TensorParallel(degree=2)
    ranks = 2


class TestContextParallel(StageSuite):
    component = ContextParallel(degree=2)
    ranks = 2
    model = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=2))


class TestPipelineParallel(StageSuite):
    component = PipelineParallel(degree=2)
    ranks = 2
    micro_batch_size = 4


class TestActivationCheckpointing(StageSuite):
    component = ActivationCheckpointing()
