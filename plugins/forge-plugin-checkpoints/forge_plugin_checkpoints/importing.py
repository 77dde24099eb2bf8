"""Makes a checkpoint of weights from other programs, which `[checkpoint.load]` takes into a new run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from forge_core.checkpoint.manager import Checkpoints
from forge_core.checkpoint.storage import Local, LocalStorage
from forge_core.contracts.errors import CheckpointError
from forge_core.contracts.runtime import State
from forge_core.job import Retention


def import_weights(weights: Mapping[str, Tensor], folder: Path | str) -> Path:
    """Write weights as the checkpoint of step 0 in a new folder, to be the `path` of a table `[checkpoint.load]`.

    from safetensors.torch import load_file
    from forge_plugin_transformer.huggingface_names import from_huggingface

    theirs = load_file("Qwen3-0.6B/model.safetensors")
    import_weights({from_huggingface(name): tensor for name, tensor in theirs.items()}, "weights/qwen3")

    Args:
        weights: tensors on the host, by the names of the model that is to load them. They may have any dtype: a
            run converts them to the dtype of its parameters.
        folder: a folder that does not exist yet.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: `folder` exists already, or cannot be written.
    """
    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; choose another folder, or remove it")
    # No run has it: nothing but weights can be taken from it, and no tokenizer is known that belongs to them.
    values = {"tokens": 0, "job": "", "provenance": {}, "evaluation": None, "extras": {}}
    state = State({f"model.{name}": tensor for name, tensor in weights.items()}, values)
    return Checkpoints(LocalStorage(folder / Local().folder), Retention(), "full").save(0, state)
