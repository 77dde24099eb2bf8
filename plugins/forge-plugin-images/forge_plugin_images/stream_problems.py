"""Finds mistakes in the keys of a streamed image dataset, without the network and without reading rows."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from forge_core.contracts.errors import Problem
from forge_core.data.packing import WindowPacking
from forge_kit.tools.rank_zero import is_checked_elsewhere

if TYPE_CHECKING:
    from forge_core.job import Job
    from forge_plugin_images.source import ImageDataset

FORMATS = ("arrow", "imagefolder", "json", "parquet", "webdataset")
"""Formats that `path` may name, with the files in `data_files`."""
OF_STREAMS = ("config", "revision", "data_files", "held_out_split", "held_out_documents", "lanes", "shuffle")
"""Keys that are for streams alone."""


def stream_problems(dataset: ImageDataset, job: Job) -> Iterator[Problem]:
    """Yields the problems of keys for streams; paths are relative to the dataset's table."""
    if not dataset.streaming:
        for key in OF_STREAMS:
            if (value := getattr(dataset, key)) != getattr(attrs.fields(type(dataset)), key).default:
                yield Problem(key, f"{value!r} is for streams; set streaming = true, or leave it out")
        return
    if find_spec("forge_plugin_huggingface") is None:
        hint = "pip install forge-plugin-huggingface"
        yield Problem("streaming", f"streams are read by forge-plugin-huggingface, which is not installed; {hint}")
        return
    if not is_checked_elsewhere():
        yield from _path_problems(dataset)
    yield from _held_out_problems(dataset)
    rows, packing = job.train.global_batch_size, job.data.packing
    if dataset.lanes and rows % dataset.lanes:
        yield Problem("lanes", f"{dataset.lanes} does not divide train.global_batch_size = {rows}")
    # A window over documents in order is all that a stream can pack.
    if packing.isolates and not isinstance(packing, WindowPacking):
        message = "[data.packing] needs all documents at once, which a stream has not"
        hint = 'take "isolate", with which a row has the documents that follow each other while they fit'
        yield Problem("streaming", f"{message}; {hint}, or set streaming = false")


def _path_problems(dataset: ImageDataset) -> Iterator[Problem]:
    from forge_plugin_huggingface.hub import local_problem

    path = dataset.path
    if not isinstance(path, str):
        yield Problem("path", f"{list(path)!r}: a stream has one; name the files in data_files")
    elif path in FORMATS and not Path(path).is_dir():
        if not dataset.data_files:
            yield Problem("data_files", f"path = {path!r} is a format; name the files that have it")
    elif message := local_problem(path):
        yield Problem("path", message)


def _held_out_problems(dataset: ImageDataset) -> Iterator[Problem]:
    split, every = dataset.held_out_split, dataset.held_out_every
    if dataset.held_out_list:
        yield Problem("held_out_list", "documents of a stream are held out by held_out_every or held_out_split")
    if split and every:
        yield Problem("held_out_split", f"held_out_every = {every} is set as well; keep one of the two")
    elif split == dataset.split:
        yield Problem("held_out_split", f"{split!r} is the training split; name another split")
    elif dataset.held_out_documents and not (split or every):
        yield Problem("held_out_documents", "nothing is held out; set held_out_split or held_out_every")
    elif every and not dataset.held_out_documents:
        message = "with held_out_every, a stream would be read to its end to find them; say how many are enough"
        yield Problem("held_out_documents", message)
