"""Merges checkpoints of a run into one: averages of their weights, also such that replace a decay of the rate."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, frozen
from torch import Tensor

from forge_core.checkpoint.run_diff import Change, describe_changes, text_changes
from forge_core.checkpoint.run_folder import TOKENIZER
from forge_core.checkpoint.state import MODEL
from forge_core.checkpoint.storage import (
    FORMAT,
    MANIFEST,
    Local,
    LocalStorage,
    manifest_digest,
    sync,
    write_file,
    write_manifest,
)
from forge_core.checkpoint.tensors import INDEX, bytes_of
from forge_core.config.load import MODEL_TABLES, parse_job
from forge_core.contracts.errors import JobError, listed
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.checkpoints import evaluated_names, stored_tensors
from forge_kit.tools.outputs import unfinished
from forge_kit.tools.whole_tensors import Stored, batches, read_whole
from forge_plugin_checkpoints.model_settings import trains_only

MERGED = "merged"
"""Key of the manifest that records the sources."""
TENSORS = "merged.bin"
"""File of the checkpoint with all tensors."""
AT_A_TIME = 2**28
"""Bytes of each source's tensors in memory at a time, or one tensor. Their sums take up to four times as much."""

SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Curves of a decay from 1 to 0, as in the schedule `wsd`."""


@frozen
class MergedCheckpoint:
    """A checkpoint that is merged."""

    path: str
    step: int
    digest: str
    """SHA-256 of its manifest, which has the SHA-256 of each file."""
    weight: float


def decay_weights(steps: Sequence[int], shape: str) -> list[float]:
    """Weights of checkpoints whose sum is what a decay of the rate from the first one on would have come to.

    By Tian et al. 2025, "WSM" (arXiv 2507.17634). Of a run with a constant rate, the weights at step s_j are
    θ_j = θ_0 - g_1 - … - g_j, where g_i is the sum of the updates from s_(i-1) to s_i. So Σ c_j θ_j = θ_0 - Σ w_i g_i
    with w_i = c_i + … + c_k, and any falling factors w_i of the updates are had by c_j = w_j - w_(j+1), where
    w_0 = 1 and w_(k+1) = 0. w_i is the average factor of the updates from s_(i-1) to s_i in a decay over all of them:
    with a checkpoint of every step, each update has its own factor, as under the schedule `wsd`.

    Args:
        steps: of the checkpoints, rising.
        shape: one of `SHAPES`.

    Returns:
        c_0, …, c_k, none negative, with the sum 1.
    """
    first, length = steps[0], steps[-1] - steps[0]
    factors = [1.0]
    for start, end in itertools.pairwise(steps):
        values = [SHAPES[shape]((update - first) / length) for update in range(start, end)]
        factors.append(math.fsum(values) / len(values))
    factors.append(0.0)
    return [before - after for before, after in itertools.pairwise(factors)]


def merge(
    sources: Sequence[tuple[Path, Mapping[str, Any]]],
    weights: Sequence[float],
    output: Path,
    like: str = "",
    tokenizer: Path | None = None,
) -> tuple[Path, list[MergedCheckpoint]]:
    """Write the average of checkpoints as the checkpoint of step 0 in a new folder.

    Weights are taken as they are evaluated. Sums are float64 and rounded once, to the dtype that a tensor had. Tensors
    of integers are not averaged: all sources must agree on them.

    Args:
        sources: verified checkpoints with their manifests, by rising step.
        weights: factor of each; they are divided by their sum.
        output: a path at which there is nothing.
        like: curve that the weights emulate, for the record.
        tokenizer: folder to copy.

    Returns:
        The checkpoint, and what it records of its sources.

    Raises:
        JobError: `output` exists or cannot be written; or the models differ.
        CheckpointError: a checkpoint cannot be read.
    """
    stored = _common_tensors(sources)
    total = math.fsum(weights)
    records = [
        MergedCheckpoint(str(path.resolve()), manifest["step"], manifest_digest(path), weight / total)
        for (path, manifest), weight in zip(sources, weights, strict=True)
    ]
    newest = sources[-1][1]
    with unfinished(output, "--out") as aside:
        aside.mkdir()
        storage = LocalStorage(aside / Local().folder)
        checkpoint = storage.begin(0)
        names = list(evaluated_names(stored).values())
        parts = _merged([source for source, _ in sources], [record.weight for record in records], names, stored)
        files = {TENSORS: write_file(checkpoint / TENSORS, map(bytes_of, parts))}
        files[INDEX] = write_file(checkpoint / INDEX, [json.dumps(_index(names, stored)).encode()])
        write_manifest(checkpoint, _manifest(newest, files, {"like": like, "sources": list(map(asdict, records))}))
        storage.commit(0)
        if tokenizer is not None:
            shutil.copytree(tokenizer, aside / TOKENIZER)
            sync(aside / TOKENIZER)
    return LocalStorage(output.expanduser() / Local().folder).path(0), records


def _manifest(newest: Mapping[str, Any], files: Mapping[str, Any], merged: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of weights alone: no run continues from them, with a schedule and state that belong to others."""
    counts = {"step": 0, "tokens": 0, "skipped": 0, "skipped_in_a_row": 0}
    based = {"base": newest["base"]} if newest.get("base") else {}
    return {
        "format": FORMAT,
        "step": 0,
        "time": time.time(),
        "files": files,
        "tokens": newest["tokens"],
        "job": newest["job"],
        "provenance": newest["provenance"],
        "evaluation": {},
        "extras": {},
        "progress": {**counts, "schedule": None, "samples": {}},
        "optimizer": {"scalars": {}, "groups": []},
        MERGED: merged,
        **based,
    }


# --- tensors -----------------------------------------------------------------------------------------------------


def _merged(
    folders: Sequence[Path], weights: Sequence[float], names: Sequence[str], stored: Stored
) -> Iterator[Tensor]:
    """Yields the average of each tensor, in order."""
    for part in batches(names, stored, AT_A_TIME):
        sums: dict[str, Tensor] = {}
        for folder, weight in zip(folders, weights, strict=True):
            for name, tensor in read_whole(folder, part, stored).items():
                if not tensor.is_floating_point():
                    _demand_equal(sums.setdefault(name, tensor), tensor, name, folder)
                elif name in sums:
                    sums[name].add_(tensor.double(), alpha=weight)
                else:
                    sums[name] = tensor.double().mul_(weight)
        for name in part:
            # Popped: what is written need not stay in memory until the part is done
            yield sums.pop(name).to(stored[name][1])


def _demand_equal(first: Tensor, other: Tensor, name: str, folder: Path) -> None:
    if not torch.equal(first, other):
        raise JobError(f"{name} has integers, of which there is no average, and {folder} has others than the first one")


def _index(names: Sequence[str], stored: Stored) -> dict[str, Any]:
    index = {}
    start = 0
    for name in names:
        shape, dtype = stored[name]
        # One chunk with the whole tensor: a load reads any part of a chunk, so that every layout can take it
        chunk = {"offsets": [0] * len(shape), "sizes": list(shape), "file": TENSORS, "start": start}
        entry = {"dtype": str(dtype).removeprefix("torch."), "size": list(shape), "chunks": [chunk]}
        index[MODEL + name.partition(".")[2]] = entry
        start += math.prod(shape) * dtype.itemsize
    return index


# --- what fits together ------------------------------------------------------------------------------------------


def _common_tensors(sources: Sequence[tuple[Path, Mapping[str, Any]]]) -> Stored:
    """Returns the tensors of the first checkpoint that are merged; refuses others that have other models."""
    first, first_manifest = sources[0]
    expected = _own_tensors(first, first_manifest)
    for folder, manifest in sources[1:]:
        found = _own_tensors(folder, manifest)
        if found != expected:
            names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
            raise JobError(f"the models of {first} and {folder} differ, in names, shapes or dtypes: {listed(names)}")
        if different := _setting_changes(first_manifest["job"], manifest["job"], folder):
            raise JobError(f"the models of {first} and {folder} differ:\n{describe_changes(different)}")
        for key in ("base", "tokenizer"):
            values = [_fact(one, key) for one in (first_manifest, manifest)]
            if values[0] != values[1]:
                raise JobError(f"{first} and {folder} differ in their {key}: their weights have no common meaning")
    return expected


def _setting_changes(before: str, after: str, folder: Path) -> list[Change]:
    """Returns the changes of `[model]` by which the same weights compute something else."""
    catalog = Catalog.installed()
    changes = [
        change
        for change in text_changes(before, after, catalog)
        # With the dot, so that `model` itself counts and no table whose name only begins alike
        if f"{change.path}.".startswith("model.") and change.means != "safe"
    ]
    # Only then: to look at checkpoints, the plugins of a job need not be installed
    job = parse_job(after, str(folder / MANIFEST), catalog, MODEL_TABLES) if changes else None
    return [change for change in changes if job is None or not trains_only(job, change.path)]


def _fact(manifest: Mapping[str, Any], key: str) -> Any:
    return (manifest.get("base") or {}).get("digest") if key == "base" else manifest["provenance"].get(key)


def _own_tensors(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Shape and dtype of weights as they are evaluated, without those that the checkpoint leaves to its base."""
    stored = stored_tensors(folder)
    based = (manifest.get("base") or {}).get("tensors", ())
    return {name: stored[name] for name in evaluated_names(stored).values() if name not in based}
