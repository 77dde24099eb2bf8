"""Weights from other programs become a checkpoint that a new run loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.checkpoint.state import model_tensors
from forge_core.cli import main
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import CheckpointError
from forge_plugin_checkpoints.importing import import_weights
from forge_plugin_checkpoints.parts import Parts


class First(TrainingHook):
    """Keeps the weights that training starts from."""

    def on_train_begin(self, context):
        self.weights = {name: tensor.detach().clone() for name, tensor in model_tensors(context.model).items()}


def random_weights(build: Callable[..., Any], make_job: Callable[..., Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = model_tensors(build(make_job()).model)
    return {name: torch.randn(tensor.shape, generator=generator) / 10 for name, tensor in tensors.items()}


def test_a_run_starts_from_imported_weights(tmp_path, build, make_job, train):
    weights = random_weights(build, make_job)
    stored = {name: tensor.bfloat16() for name, tensor in weights.items()}
    path = import_weights({**stored, "vision.extra": torch.ones(2, 3)}, tmp_path / "imported")
    assert path.parent.parent == tmp_path / "imported"
    first = First()
    train(make_job(checkpoint={"load": Parts(path=str(tmp_path / "imported"))}), first)
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, stored[name].float()), name


def test_the_checkpoint_is_listed_and_exported_like_any_other(tmp_path, build, make_job, capsys):
    from safetensors.torch import load_file

    weights = random_weights(build, make_job)
    import_weights(weights, tmp_path / "imported")
    assert main(["checkpoints", str(tmp_path / "imported")]) == 0
    assert "intact" in capsys.readouterr().out
    output = tmp_path / "exported.safetensors"
    assert main(["checkpoints", str(tmp_path / "imported"), "export", "--out", str(output)]) == 0
    exported = load_file(output)
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


def test_a_folder_that_exists_is_left_alone(tmp_path: Path):
    with pytest.raises(CheckpointError, match="exists already"):
        import_weights({"weight": torch.ones(1)}, tmp_path)
    assert not list(tmp_path.iterdir())
