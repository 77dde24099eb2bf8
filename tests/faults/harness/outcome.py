"""What a run leaves behind, as plain values, and how two of them differ."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from forge_core.checkpoint.storage import MANIFEST
from forge_core.checkpoint.tensors import load_tensors
from forge_kit.tools.checkpoints import stored_tensors
from forge_testing.outcomes import is_time
from harness.launch import committed

OF_THE_SAVE = {"time", "files", "provenance"}
"""Entries of a manifest that tell of the process that saved; tensors are compared by what they hold."""


def read_outcome(run: Path) -> dict[str, Any]:
    """Everything in a run folder that must not depend on how often the run was killed: bits of all tensors of the last
    checkpoint, counters and other state in its manifest, which checkpoints are kept, metrics, samples of every step."""
    steps = committed(run)
    last = run / "checkpoints" / f"step-{steps[-1]}"
    manifest = json.loads((last / MANIFEST).read_text())
    return {
        "samples": _samples(run),
        "metrics": [_untimed(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "events": _events(run / "tensorboard"),
        "tensors": _tensors(last),
        "manifest": {key: value for key, value in manifest.items() if key not in OF_THE_SAVE},
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
    }


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Where two outcomes differ, one line a place; numbers must be equal to the last bit."""
    here, there = dict(_leaves(expected)), dict(_leaves(found))
    return [
        f"{path}: {here.get(path, 'nothing')} without kills, {there.get(path, 'nothing')} with"
        for path in dict.fromkeys([*here, *there])
        if here.get(path) != there.get(path)
    ]


def damaged(run: Path) -> list[str]:
    """What is wrong with checkpoints that stand under their final names, compared with their manifests."""
    return [f"step {step}: {fault}" for step in committed(run) for fault in _faults(run / f"checkpoints/step-{step}")]


def irregular(metrics: list[dict[str, Any]], steps: int) -> list[str]:
    """What is wrong with the lines of a finished run, by themselves."""
    lines = [line["step"] for line in metrics if "loss" in line]
    evaluations = [line["step"] for line in metrics if "loss" not in line]
    found = [] if lines == list(range(1, steps + 1)) else [f"steps in metrics.jsonl: {lines}"]
    twice = len(set(evaluations)) < len(evaluations)
    return [*found, f"evaluated steps in metrics.jsonl: {evaluations}"] if twice else found


def _tensors(checkpoint: Path) -> dict[str, str]:
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in stored_tensors(checkpoint).items()}
    load_tensors(checkpoint, tensors)
    return {name: f"{tensor.dtype} {list(tensor.shape)} {_bits(tensor)}" for name, tensor in tensors.items()}


def _bits(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


def _untimed(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not is_time(name)}


def _samples(run: Path) -> dict[int, list[list[str]]]:
    """Step -> what was fed to it; more than one list where processes were fed different samples, as ranks are."""
    samples: dict[int, list[list[str]]] = {}
    for line in (run / "seen.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "step" in record and record["samples"] not in samples.setdefault(record["step"], []):
            samples[record["step"]].append(record["samples"])
    return {step: sorted(fed) for step, fed in samples.items()}


def _events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) as TensorBoard shows them."""
    if not folder.is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # else it tells of each start after a kill
    events = EventAccumulator(str(folder)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not is_time(tag.removeprefix("train/"))]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def _faults(checkpoint: Path) -> Iterator[str]:
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    except (OSError, ValueError) as error:
        yield f"{MANIFEST}: {error}"
        return
    for name, entry in files.items():
        path = checkpoint / name
        if not path.is_file():
            yield f"{name} is missing"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            yield f"{name} is damaged"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every number, string and empty container in nested plain values, written out, by its path."""
    if isinstance(value, Mapping):
        items = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(number), inner) for number, inner in enumerate(value)]
    else:
        items = []
    for key, inner in items:
        yield from _leaves(inner, f"{path}.{key}" if path else key)
    if not items:
        yield path, repr(value)
