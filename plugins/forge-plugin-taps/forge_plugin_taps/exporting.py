"""Stores in the forms of other libraries. Shapes: N samples, S positions of a sequence, D features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_plugin_taps.store_reader import points_in, read_point, read_tokens, steps_with

CACHE = ".cache"
"""Folder inside the new one, in which `datasets` makes what it saves then."""

Export = Callable[[Sequence[Path], Path], Iterator[str]]
"""(folders of steps, folder to write) -> lines for the user."""


def export_npz(steps: Sequence[Path], out: Path) -> Iterator[str]:
    """Write `step-N.npz` for each step: arrays by the names of points, and `tokens.NAME`."""
    out.mkdir(parents=True, exist_ok=True)
    yield from _casts(steps)
    for step in steps:
        arrays = {name: _array(read_point(step, name)) for name in points_in(step)}
        arrays |= {f"tokens.{name}": column.numpy() for name, column in read_tokens(step).items()}
        np.savez(out / f"{step.name}.npz", **arrays)  # type: ignore[arg-type]
    yield f"{len(steps)} files: {out}"


def export_arrow(steps: Sequence[Path], out: Path) -> Iterator[str]:
    """Write a dataset with a row for each token: its points, as flat lists, and the facts about it.

    A row of a step that lacks a point has None there.
    """
    datasets, points = _datasets(), steps_with(steps)
    yield from _casts(steps)

    def rows() -> Iterator[Mapping[str, Any]]:
        for step in steps:
            values = {name: _array(read_point(step, name)) for name in points_in(step)}
            lacking = dict.fromkeys(points.keys() - values.keys())
            tokens = {name: column.numpy() for name, column in read_tokens(step).items()}
            for number in range(len(tokens["row"])):
                row: dict[str, Any] = {name: array[number].reshape(-1) for name, array in values.items()}
                yield lacking | row | {name: int(column[number]) for name, column in tokens.items()}

    # Types from the first step that has a point: from rows, a column of None would have none
    first = {name: read_point(having[0], name) for name, having in points.items()}
    features = {name: _sequence(datasets, tensor[0].numel(), tensor) for name, tensor in first.items()}
    features |= {name: datasets.Value("int64") for name in read_tokens(steps[0])}
    dataset = datasets.Dataset.from_generator(rows, features=datasets.Features(features), cache_dir=str(out / CACHE))
    _save(dataset, out, out)
    yield f"{len(dataset):,} tokens: {out}"


def export_saelens(steps: Sequence[Path], out: Path) -> Iterator[str]:
    """Write `POINT/` for each point: a dataset of sequences (S, D) under the point's name, with `token_ids` (S).

    Points with heads are joined, (S, H E). SAELens reads a folder by `use_cached_activations`, with `hook_name` the
    point's name.

    Raises:
        ForgeError: the store has some positions of each sequence only.
    """
    datasets = _datasets()
    yield from _casts(steps)
    length = _length(steps)
    for point, having in steps_with(steps).items():
        width = read_point(having[0], point)[0].numel()
        kind = str(_array(read_point(having[0], point)[:1]).dtype)
        features = datasets.Features(
            {
                point: datasets.Array2D(shape=(length, width), dtype=kind),
                "token_ids": datasets.Sequence(datasets.Value("int32"), length=length),
            }
        )

        def rows(
            point: str = point, width: int = width, having: Sequence[Path] = tuple(having)
        ) -> Iterator[Mapping[str, Any]]:
            for step in having:
                values = _array(read_point(step, point)).reshape(-1, length, width)
                ids = read_tokens(step)["id"].numpy().astype(np.int32).reshape(-1, length)
                for activations, tokens in zip(values, ids, strict=True):
                    yield {point: activations, "token_ids": tokens}

        dataset = datasets.Dataset.from_generator(rows, features=features, cache_dir=str(out / CACHE))
        _save(dataset, out / point, out)
        yield f"{point}: {len(dataset):,} sequences of {length} x {width}: {out / point}"


def _save(dataset: Any, folder: Path, out: Path) -> None:
    """Writes a dataset, and removes the cache from which it is made, which is in the new folder `out`."""
    import shutil

    dataset.save_to_disk(str(folder))
    # After each dataset, so that the disk holds at most one of them twice
    shutil.rmtree(out / CACHE, ignore_errors=True)


def _length(steps: Sequence[Path]) -> int:
    """Returns S, of a store with every position of each sequence."""
    lengths = set()
    for step in steps:
        tokens = read_tokens(step)
        rows, positions = tokens["row"], tokens["position"]
        length = int(positions.max()) + 1
        # Samples are in the order of row and position, so whole sequences are equal to this.
        complete = torch.arange(length).repeat(int(rows.max()) + 1)
        if len(positions) != len(complete) or not torch.equal(positions, complete):
            raise ForgeError(f"{step} has some positions of each sequence; SAELens reads whole ones: --positions all")
        lengths.add(length)
    if len(lengths) > 1:
        raise ForgeError(f"steps have sequences of {sorted(lengths)} positions; SAELens reads one length")
    return lengths.pop()


def cast_points(steps: Sequence[Path]) -> list[str]:
    """Returns the points in bfloat16, which NumPy and Arrow lack: their exports have float32."""
    points = steps_with(steps).items()
    return [name for name, having in points if read_point(having[0], name).dtype == torch.bfloat16]


def _casts(steps: Sequence[Path]) -> Iterator[str]:
    if names := cast_points(steps):
        yield f"bfloat16 becomes float32: {', '.join(names)}"


def _array(tensor: Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _sequence(datasets: Any, length: int, tensor: Tensor) -> Any:
    return datasets.Sequence(datasets.Value(str(_array(tensor[:1]).dtype)), length=length)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ForgeError("Arrow needs Hugging Face's datasets: pip install datasets") from error
    datasets.disable_progress_bars()
    return datasets


EXPORTS: Mapping[str, Export] = {"npz": export_npz, "arrow": export_arrow, "saelens": export_saelens}
