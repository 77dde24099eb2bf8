"""A step that is saved again, as after a roll-back: what was known of its first version is forgotten."""

from __future__ import annotations

import pytest
import torch

from forge_core.checkpoint.manager import Checkpoints
from forge_core.checkpoint.tensors import load_tensors, read_index
from forge_core.contracts.runtime import State
from forge_core.job import Retention
from forge_plugin_checkpoints.objects.bucket import Bucket
from forge_plugin_checkpoints.objects.storage import ObjectStorage

VALUES = {"tokens": 0, "job": "", "provenance": {}, "evaluation": None, "extras": {}}


def saved(checkpoints, numbers):
    checkpoints.save(3, State({"model.weight": torch.arange(numbers)}, VALUES))


def loaded(checkpoints, numbers):
    """The newest checkpoint, verified."""
    folder, manifest = checkpoints.newest()
    assert manifest["step"] == 3
    found = torch.empty(numbers, dtype=torch.long)
    load_tensors(folder, {"model.weight": found}, read_index(folder))
    return found.tolist()


@pytest.mark.parametrize("verify", ["full", "sizes"])
def test_a_step_that_is_saved_again_is_read_as_it_was_saved_last(tmp_path, verify):
    def storage(machine):
        return ObjectStorage(Bucket(f"file://{tmp_path}/bucket/run", {}), tmp_path / machine)

    reader, writer = (Checkpoints(storage(name), Retention(), verify) for name in ("reader", "writer"))
    saved(writer, 5)
    assert loaded(reader, 5) == loaded(writer, 5) == [*range(5)]
    saved(reader, 9)  # goes back, and comes to the step again
    assert loaded(reader, 9) == [*range(9)]
