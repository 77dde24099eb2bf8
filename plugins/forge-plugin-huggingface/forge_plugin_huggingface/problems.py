"""Finds mistakes in the keys of a dataset, without the network and without reading rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from forge_core.contracts.errors import JobError, Problem
from forge_kit.tools.rank_zero import is_checked_elsewhere
from forge_plugin_huggingface.hub import local_problem
from forge_plugin_huggingface.source import Saved

if TYPE_CHECKING:
    from forge_core.job import Job
    from forge_plugin_huggingface.dataset import HuggingFace

FORMATS = ("arrow", "csv", "json", "parquet", "text")
"""Formats that `path` may name, with the files in `data_files`."""
NO_TOKENIZER = 'the documents need a tokenizer; add a table [data.tokenizer], for example with type = "auto"'
DEFAULT_FIELD = "text"


def problems_of(dataset: HuggingFace, job: Job) -> Iterator[Problem]:
    """Yields all problems; paths are relative to the dataset's table."""
    # Rank 0 looks at the files: many ranks would load a shared file system.
    if not is_checked_elsewhere():
        yield from _path_problems(dataset)
    yield from _content_problems(dataset, job)
    yield from _held_out_problems(dataset)
    yield from _stream_problems(dataset, job)


def _path_problems(dataset: HuggingFace) -> Iterator[Problem]:
    path, folder = dataset.path, Path(dataset.path)
    if path in FORMATS and not folder.is_dir():
        if not dataset.data_files:
            yield Problem("data_files", f"path = {path!r} is a format; name the files that have it")
        return
    if message := local_problem(path):
        yield Problem("path", message)
    if dataset.origin().is_saved:
        yield from _saved_problems(dataset, Saved(folder))
    elif dataset.revision and folder.is_dir():
        yield Problem("revision", f"{dataset.revision!r} is of the hub, but {path!r} is a folder; leave it out")


def _saved_problems(dataset: HuggingFace, saved: Saved) -> Iterator[Problem]:
    for key in ("config", "revision", "data_files"):
        if value := getattr(dataset, key):
            yield Problem(key, f"{value!r} means nothing for a folder of save_to_disk; leave it out")
    for key, split in (("split", dataset.split), ("held_out_split", dataset.held_out_split)):
        try:
            if split:
                saved.folder_of(split)
        except JobError as error:
            yield from (evolve(problem, path=key if problem.path == "split" else "path") for problem in error.problems)


def _content_problems(dataset: HuggingFace, job: Job) -> Iterator[Problem]:
    if job.data.tokenizer is None:
        yield Problem("", NO_TOKENIZER)
    # By an attribute, as tokenizers of other plugins may have templates, too
    elif dataset.messages and not getattr(job.data.tokenizer, "chats", False):
        yield Problem("messages", 'chats need a tokenizer with a template; set [data.tokenizer] type = "auto"')
    yield from _choice_problems(dataset)
    if dataset.tools and not (dataset.messages or dataset.prompt):
        yield Problem("tools", "only chats have tools; set `messages` to the field with the chat")
    if dataset.learn != "all" and not (dataset.messages or dataset.prompt):
        yield Problem("learn", "only chats have turns; set `messages` to the field with the chat")


def _choice_problems(dataset: HuggingFace) -> Iterator[Problem]:
    """Yields a problem unless one of `field`, `messages`, and `prompt` with `completion` is set."""
    given = {key: value for key in ("messages", "prompt", "completion") if (value := getattr(dataset, key))}
    if given and dataset.field != DEFAULT_FIELD:
        listed = " and ".join(f"{key} = {value!r}" for key, value in given.items())
        hint = "keep one of the two" if len(given) == 1 else "keep `field`, or the others"
        yield Problem(
            "field", f"{dataset.field!r}, but {listed} {'is' if len(given) == 1 else 'are'} set as well; {hint}"
        )
    if dataset.messages and (dataset.prompt or dataset.completion):
        message = f"messages = {dataset.messages!r} is set as well; keep `messages`, or `prompt` and `completion`"
        yield Problem("prompt" if dataset.prompt else "completion", message)
    elif dataset.prompt and not dataset.completion:
        message = f"prompt = {dataset.prompt!r} needs it; name the field with the text that the model is to write"
        yield Problem("completion", message)
    elif dataset.completion and not dataset.prompt:
        message = f"completion = {dataset.completion!r} needs it; name the field with the text before the completion"
        yield Problem("prompt", message)
    elif dataset.prompt and dataset.prompt == dataset.completion:
        yield Problem("completion", f"{dataset.completion!r} is the prompt, too; name another field")


def _held_out_problems(dataset: HuggingFace) -> Iterator[Problem]:
    split, every = dataset.held_out_split, dataset.held_out_every
    if split and every:
        yield Problem("held_out_split", f"held_out_every = {every} is set as well; keep one of the two")
    elif split == dataset.split:
        yield Problem("held_out_split", f"{split!r} is the training split; name another split")
    elif dataset.held_out_documents and not (split or every):
        yield Problem("held_out_documents", "nothing is held out; set held_out_split or held_out_every")
    elif every and dataset.streaming and not dataset.held_out_documents:
        message = "with held_out_every, a stream would be read to its end to find them; say how many are enough"
        yield Problem("held_out_documents", message)


def _stream_problems(dataset: HuggingFace, job: Job) -> Iterator[Problem]:
    if not dataset.streaming:
        for key in ("lanes", "shuffle"):
            if value := getattr(dataset, key):
                yield Problem(key, f"{value} is for streams; set streaming = true, or leave it out")
        return
    if dataset.processes > 1:
        yield Problem("processes", "a stream is tokenised by [data] workers; set those, and leave this out")
    for key in ("split", "held_out_split"):
        if "[" in (split := getattr(dataset, key)):
            yield Problem(key, f"{split!r} is a part of a split, which a stream cannot find; name a split")
    rows = job.train.global_batch_size
    if dataset.lanes and rows % dataset.lanes:
        yield Problem("lanes", f"{dataset.lanes} does not divide train.global_batch_size = {rows}")
