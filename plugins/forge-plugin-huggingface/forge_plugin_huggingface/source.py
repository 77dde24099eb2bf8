"""Sources of rows: data files of a folder or of the hub, or a folder that `save_to_disk` wrote."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.cache import digest_of
from forge_kit.data.data_files import FileFinder, missing
from forge_plugin_huggingface.hub import expanded, explained

if TYPE_CHECKING:
    import datasets

STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files that identify a folder of `save_to_disk`: of one dataset, and of one with splits."""

DataFiles = str | tuple[str, ...] | Mapping[str, str]


@frozen
class Origin:
    """The keys of a job that locate its data."""

    path: str
    config: str = ""
    revision: str = ""
    data_files: DataFiles = ()

    @property
    def is_saved(self) -> bool:
        """Whether it is a folder of `save_to_disk`."""
        folder = Path(self.path)
        return (folder / STATE).is_file() or (folder / SPLITS).is_file()

    def open(self) -> DatasetSource:
        """Open the source; raises `JobError` if the data does not exist."""
        return Saved(Path(self.path)) if self.is_saved else DataFilesSource(self)


class DatasetSource(Protocol):
    """A dataset with its splits, not yet read. All methods raise `JobError` if the data cannot be read.

    It can be pickled, and what has been found out about files, tables and schemas travels with it.
    """

    left_out: Mapping[str, int]
    """What the folder holds and is no data, with how often (`forge_kit.data.data_files`)."""

    def fingerprint(self, split: str) -> str:
        """Returns a SHA-256 (hex) that differs whenever the rows of a split could differ. Reads no rows."""
        ...

    def check_apart(self, split: str, other: str) -> None:
        """Raise `JobError` if two splits, which may be parts of one, have rows in common."""

    def table(self, split: str) -> datasets.Dataset:
        """Returns all rows of a split, from disk."""
        ...

    def stream(self, split: str) -> datasets.Dataset | datasets.IterableDataset:
        """Returns the rows of a split in the order of its files; a table if it is one already."""
        ...


@frozen
class DescribedSource:
    """A source whose files have been looked at, as one rank of a run does for all.

    A pickled copy in another process opens only files whose rows it reads.
    """

    source: DatasetSource
    fingerprints: Mapping[str, str]
    """See `DatasetSource.fingerprint`, by split."""

    @classmethod
    def of(cls, origin: Origin, splits: Iterable[str], streamed: Iterable[str] = ()) -> DescribedSource:
        """Open a source and look at its files.

        Args:
            origin: where it is.
            splits: splits whose fingerprints are needed.
            streamed: splits whose rows are read during training: their schema and tables are opened here.
        """
        source = origin.open()
        for split in streamed:
            source.stream(split)
        return cls(source, {split: source.fingerprint(split) for split in splits})


class Saved:
    """A folder of `save_to_disk`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tables: dict[str, datasets.Dataset] = {}  # a pickled table maps its files, and reads no JSON beside them
        self.left_out: Mapping[str, int] = {}

    def fingerprint(self, split: str) -> str:
        """Covers names, sizes and times of the files; contents are not read."""
        files = sorted(path for path in self.folder_of(split).rglob("*") if path.is_file())
        return digest_of([[path.name, *_stamp(path)] for path in files])

    def check_apart(self, split: str, other: str) -> None:
        """Does nothing: such a folder has no parts of splits, so its splits have no rows in common."""

    def table(self, split: str) -> datasets.Dataset:
        """Maps the Arrow files of the split, once for all calls."""
        import datasets

        if split not in self._tables:
            with explained(str(self._folder)):
                self._tables[split] = datasets.load_from_disk(str(self.folder_of(split)))
        return self._tables[split]

    def stream(self, split: str) -> datasets.Dataset:
        """Returns the table, which needs no stream: any row of it is read by itself."""
        return self.table(split)

    def folder_of(self, split: str) -> Path:
        """Returns the folder of a split.

        Raises:
            JobError: no split has this name.
        """
        state, splits = self._folder / STATE, self._folder / SPLITS
        with explained(str(self._folder)):
            # A single dataset may not record its split: then it answers to any name.
            only = json.loads(state.read_text("utf-8")).get("_split") if state.is_file() else None
            known = [only or split] if state.is_file() else list(json.loads(splits.read_text("utf-8"))["splits"])
        if split not in known:
            listed = ", ".join(map(repr, known)) or "none"
            raise JobError([Problem("split", f"{str(self._folder)!r} has no split {split!r}, but {listed}")])
        return self._folder if state.is_file() else self._folder / split


class DataFilesSource:
    """Data files, in a folder or on the hub, that `datasets` can read without custom code."""

    def __init__(self, origin: Origin) -> None:
        """Raises `JobError` if the files do not exist."""
        import datasets

        self._origin = origin
        options = {"name": origin.config, "revision": origin.revision, "data_files": _plain(origin.data_files)}
        given = {key: value for key, value in options.items() if value}
        path = expanded(origin.path)
        with explained(origin.path):
            self._builder = datasets.load_dataset_builder(path, **given)
            data, self.left_out = _data_of(path, self._builder)
            if self.left_out and not data:
                raise JobError([Problem("path", f"{missing(origin.path)}; correct the path")])
            if self.left_out:
                # Made again, since a builder cannot leave out files that it has found
                self._builder = datasets.load_dataset_builder(path, **given | {"data_files": data})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_prepared"}  # of this machine's cache

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy of another process, which may be on a machine with another cache of `datasets`."""
        import datasets

        self.__dict__.update(state)
        builder = self._builder
        here = os.path.expanduser(str(datasets.config.HF_DATASETS_CACHE))
        # Private, but a builder takes its cache folder only when it is made, which would list the files again
        if builder._cache_dir_root != here:
            builder._cache_dir_root = here
            builder._cache_dir = builder._output_dir = builder._build_cache_dir()

    def fingerprint(self, split: str) -> str:
        """Covers local files by size and time, and files on the hub by their commit."""
        builder = self._builder
        files = [paths for paths in (builder.config.data_files or {}).values() if not _is_on_hub(paths)]
        stamps = [_stamp(Path(path)) for paths in files for path in paths if Path(path).is_file()]
        listed = [[list(paths), paths.origin_metadata] for paths in files]
        return digest_of(type(builder).__name__, builder.hash, builder.config_id, split, listed, stamps)

    def table(self, split: str) -> datasets.Dataset:
        """Converts all files to Arrow in the cache of `datasets`, where that has not been done, and maps it."""
        with explained(self._origin.path, "split"):
            return self._prepared.as_dataset(split=split)

    def stream(self, split: str) -> datasets.IterableDataset:
        """Opens the files without converting them; rows are read when they are iterated over."""
        with explained(self._origin.path, "split"):
            return self._builder.as_streaming_dataset(split=split)

    def check_apart(self, split: str, other: str) -> None:
        """Compares the ranges of rows that both names stand for, such as `train[:90%]`; prepares the files."""
        import datasets

        ranges = []
        for name in (split, other):
            with explained(self._origin.path, "split"):
                sizes = {str(key): info.num_examples for key, info in self._prepared.info.splits.items()}
                ranges.append(datasets.ReadInstruction.from_spec(name).to_absolute(sizes))
        for one, two in product(*ranges):
            first, last = max(one.from_, two.from_), min(one.to, two.to)
            if one.splitname == two.splitname and first < last:
                message = f"{other!r} and split = {split!r} share the rows {first} to {last - 1} of {one.splitname!r}"
                raise JobError([Problem("held_out_split", f"{message}; hold out other rows than those trained on")])

    @cached_property
    def _prepared(self) -> datasets.DatasetBuilder:
        """Download and convert all files, which `datasets` caches itself."""
        with explained(self._origin.path):
            self._builder.download_and_prepare()
        return self._builder


def _data_of(path: str, builder: datasets.DatasetBuilder) -> tuple[dict[str, list[str]], Mapping[str, int]]:
    """Returns the files of each split, without files of Forge's runs in a folder, and what was left out."""
    finder = FileFinder()
    splits = (builder.config.data_files or {}) if os.path.isdir(path) else {}
    data = {str(split): finder.outside_outputs(paths, path) for split, paths in splits.items()}
    # Patterns for the library, which reads brackets as wildcards
    return {split: [*map(glob.escape, paths)] for split, paths in data.items() if paths}, finder.left_out


def _plain(data_files: DataFiles) -> str | list[str] | dict[str, str]:
    if isinstance(data_files, str):
        return data_files
    return dict(data_files) if isinstance(data_files, Mapping) else list(data_files)


def files_of(data_files: DataFiles) -> list[str]:
    """Returns the files and globs of `data_files`, of all splits."""
    plain = _plain(data_files)
    if isinstance(plain, dict):
        return [name for files in plain.values() for name in files_of(files)]
    return [plain] if isinstance(plain, str) else plain


def _is_on_hub(files: Sequence[str]) -> bool:
    """Whether these are files of a repository on the hub, whose commit `DatasetBuilder.hash` contains."""
    return all(path.startswith("hf://") for path in files)


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]
