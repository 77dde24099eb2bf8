"""The core's own components, and those that it has for tests, pass the suites that plugins must pass."""

from __future__ import annotations

import json

from forge_core.losses import CrossEntropy
from forge_core.metrics.console import Console
from forge_core.metrics.jsonl import JsonLines
from forge_core.parallel.stages import Replicate
from forge_core.schedules import Constant
from forge_testing import Numbers, PatchModel, PatchNumbers, RandomDocuments, SplittableModel, TinyAdamW, TinyModel
from forge_testing.suites import (
    DatasetSuite,
    LoggerSuite,
    LossSuite,
    ModelSuite,
    OptimizerSuite,
    SchedulerSuite,
    StageSuite,
)


class TestTinyAdamW(OptimizerSuite):
    component = TinyAdamW()
    layouts = ("replicate2",)


class TestConstant(SchedulerSuite):
    component = Constant(warmup_steps=7)


class TestCrossEntropy(LossSuite):
    component = CrossEntropy()
    layouts = ("replicate2", "tp2")


class TestCrossEntropyWithZLoss(LossSuite):
    component = CrossEntropy(z_loss=1e-2)
    layouts = ()

    def objective(self, logits, labels):
        return self.reported(logits, labels) + 1e-2 * logits.logsumexp(-1).square()


class TestNumbers(DatasetSuite):
    component = Numbers()


class TestPatchNumbers(DatasetSuite):
    component = PatchNumbers()


class TestRandomDocuments(DatasetSuite):
    component = RandomDocuments()


class TestTinyModel(ModelSuite):
    component = TinyModel()
    layouts = ("replicate2", "pp2")


class TestPatchModel(ModelSuite):
    component = PatchModel()
    layouts = ("pp2", "checkpointing2")

    def parity_changes(self, folder):
        return {"model": self.component, "data": {"sources": (PatchNumbers(), Numbers())}}


class TestSplittableModel(ModelSuite):
    component = SplittableModel()


class TestReplicate(StageSuite):
    component = Replicate()
    ranks = 2


class TestJsonLines(LoggerSuite):
    component = JsonLines(file="tested.jsonl")

    def recorded_steps(self, folder):
        records = map(json.loads, (folder / "tested.jsonl").read_text().splitlines())
        return [record["step"] for record in records if "loss" in record]


class TestConsole(LoggerSuite):
    component = Console(style="plain", interval=1)


class TestLiveConsole(LoggerSuite):
    component = Console(style="live")
