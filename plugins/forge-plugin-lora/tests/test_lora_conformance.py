"""`lora` keeps the contracts of its kind, with and without a base that it leaves out of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_core import Job
from forge_plugin_checkpoints import Parts
from forge_plugin_lora import LoRA
from forge_testing.suites import HookSuite


class TestLoRA(HookSuite):
    component = LoRA(rank=2, random_base=True)
    changes_training = True


class TestLoRAWithBase(HookSuite):
    component = LoRA(rank=2, method="rslora")
    changes_training = True
    needs_cpu = "its base is made before, and the adapters are those of the class above"

    @pytest.fixture(autouse=True)
    def base(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("base")
        self._base = str(self.train(super().tiny_job(folder, steps=2)).folder)

    def tiny_job(self, folder: Path, **changes: Any) -> Job:
        load = {"load": Parts(path=self._base)}
        return super().tiny_job(folder, **{**changes, "checkpoint": {**changes.get("checkpoint", {}), **load}})
