"""`samples` keeps the contracts of its kind."""

from __future__ import annotations

from forge_plugin_generate.samples import Samples
from forge_plugin_text import Bytes
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.suites import HookSuite


class TestSamples(HookSuite):
    component = Samples(every_eval=True, max_tokens=5)
    job = {
        "model": Transformer(dim=16, layers=1, attention=GroupedQueryAttention(heads=2)),
        "data": {"tokenizer": Bytes()},
    }
