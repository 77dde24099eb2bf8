"""Exports the weights of a checkpoint as safetensors, for programs without Forge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_kit.tools.checkpoints import evaluated_names, stored_tensors
from forge_kit.tools.outputs import free_path, unfinished
from forge_kit.tools.whole_tensors import Stored, batches, read_whole, tensor_bytes

SUFFIX = ".safetensors"
SHARD_BYTES = 5 * 10**9
"""Default upper bound of the bytes of a file, if the output is a folder."""


def export_weights(
    checkpoint: Path, manifest: Mapping[str, Any], output: Path, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write parameters and persistent buffers under their names in the model.

    Tied parameters are written once; the optimizer's weights for evaluation take precedence. Only one file's tensors
    are in memory at a time. The metadata of each file are the resolved job (TOML), the step and the tokens.

    Args:
        checkpoint: folder of the checkpoint.
        manifest: its manifest.
        output: a file if it ends in `.safetensors`; else a folder for several files and an index, named as on the
            Hugging Face hub.
        shard_bytes: upper bound of the bytes of a file in a folder; a larger tensor is written to a separate
            file.

    Returns:
        The files.

    Raises:
        JobError: `output` exists already, or cannot be written.
        CheckpointError: the checkpoint cannot be read.
    """
    output = free_path(output, "--out")
    entries = stored_tensors(checkpoint)
    stored = {name: entries[name] for name in evaluated_names(entries).values()}
    one_file = output.suffix == SUFFIX
    shards = [] if one_file else batches(stored, stored, shard_bytes)
    with unfinished(output, "--out") as aside:
        if one_file:
            _write(aside, checkpoint, list(stored), stored, _metadata(manifest))
            return [output]
        aside.mkdir()
        names = _names(len(shards))
        for name, shard in zip(names, shards, strict=True):
            _write(aside / name, checkpoint, shard, stored, _metadata(manifest))
        if len(shards) > 1:
            names.append(_write_index(aside, dict(zip(names, shards, strict=True)), stored))
    return [output / name for name in names]


def _in_model(name: str) -> str:
    """Returns the name of a parameter or buffer in the model, given its name in the checkpoint."""
    return name.partition(".")[2]


def _names(count: int) -> list[str]:
    if count == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def _metadata(manifest: Mapping[str, Any]) -> dict[str, str]:
    return {"format": "pt"} | {key: str(manifest[key]) for key in ("job", "step", "tokens")}


def _write(path: Path, checkpoint: Path, names: list[str], stored: Stored, metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    tensors = read_whole(checkpoint, names, stored)
    save_file({_in_model(name): tensor for name, tensor in tensors.items()}, path, metadata)
    path.chmod(0o644)  # temporary files are created readable for their owner only


def _write_index(folder: Path, shards: Mapping[str, list[str]], stored: Stored) -> str:
    name = f"model{SUFFIX}.index.json"
    where = {_in_model(tensor): file for file, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": tensor_bytes(stored, stored)}, "weight_map": where}
    (folder / name).write_text(json.dumps(index, indent=1) + "\n")
    return name
