"""The low-bit optimizers keep the contracts of their kind."""

from __future__ import annotations

from forge_plugin_lowbit import AdamW4bit, AdamW8bit, AdamWBF16, AdamWFloat8
from forge_testing.suites import OptimizerSuite

SETTINGS = {"lr": 1e-2, "eps": 1e-5, "compile": False}
BLOCKS = {"min_size": 1, "block_size": 8}


class TestAdamW8bit(OptimizerSuite):
    component = AdamW8bit(**SETTINGS, **BLOCKS)
    layouts = ("fsdp2",)


class TestAdamW4bit(OptimizerSuite):
    component = AdamW4bit(**SETTINGS, **BLOCKS)
    layouts = ()  # its layouts: test_lowbit.py


class TestAdamWFloat8(OptimizerSuite):
    component = AdamWFloat8(**SETTINGS, **BLOCKS)
    layouts = ()  # its layouts: test_lowbit.py


class TestAdamWBF16(OptimizerSuite):
    component = AdamWBF16(**SETTINGS)
    layouts = ("fsdp2",)
