"""The corpus that the keys of a dataset describe, or everything that is wrong with it. No id is read for it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.data_files import FileFinder
from forge_plugin_memmap.formats.kind import Surroundings, TokenFormat
from forge_plugin_memmap.formats.reading import read_shard
from forge_plugin_memmap.manifest import HELD_OUT, TRAIN, Prepared, read_prepared
from forge_plugin_memmap.origins import ORIGINS, OriginTable
from forge_plugin_memmap.paths import FoundFile, absolute, distinct, expand
from forge_plugin_memmap.shards import Shard


@frozen
class ShardedCorpus:
    """Shards of both splits, and their common properties."""

    train: tuple[Shard, ...]
    held_out: tuple[Shard, ...]
    end_of_text: int
    vocab_size: int | None
    """Size of the tokenizer's vocabulary; None if no file states it."""
    prepared: tuple[Prepared, ...]
    """Folders of `data prepare` that shards come from."""
    left_out: Mapping[str, int] = field(factory=dict, eq=False)
    """What was passed over in folders, with how often."""

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Shards of both splits, the training shards first."""
        return self.train + self.held_out


@frozen
class CorpusKeys:
    """The keys of a dataset that specify the data to read."""

    path: tuple[str, ...]
    held_out_path: tuple[str, ...]
    format: TokenFormat
    end_of_text: int | None


def find_corpus(keys: CorpusKeys) -> ShardedCorpus:
    """The corpus.

    Raises:
        JobError: every problem that shows without reading ids, with paths relative to the dataset's table.
    """
    return _Search(keys).run()


@define
class _Search:
    """One pass over the files that collects problems on the way."""

    keys: CorpusKeys
    problems: list[Problem] = field(factory=list)
    folders: dict[str, Prepared | None] = field(factory=dict)
    surroundings: Surroundings = field(factory=Surroundings)
    finder: FileFinder = field(factory=FileFinder)

    def run(self) -> ShardedCorpus:
        found = self._expand("path", self.keys.path)
        train, apart = self._split(found)
        named = self._expand("held_out_path", self.keys.held_out_path)
        # The key takes precedence over the manifests
        held_out = [file.path for file in named] if self.keys.held_out_path else apart
        self._check_overlap(train, held_out)
        read = self._read("path", train), self._read("held_out_path" if named else "path", held_out)
        self._check_orphans({_folder(file) for file in [*found, *named] if file.in_folder}, [*read[0], *read[1]])
        prepared = self._prepared([*read[0], *read[1]])
        end_of_text, vocab_size = self._agreed([*read[0], *read[1]])
        # Only now: every problem of every file is in one error
        if self.problems or end_of_text is None:
            raise JobError(self.problems)
        return ShardedCorpus(tuple(read[0]), tuple(read[1]), end_of_text, vocab_size, prepared, self.finder.left_out)

    def _note(self, key: str, message: str | JobError) -> None:
        problems = message.problems if isinstance(message, JobError) else [Problem("", message)]
        self.problems += [problem.below(key) for problem in problems]

    # --- files -----------------------------------------------------------------------------------------------------

    def _expand(self, key: str, patterns: Sequence[str]) -> list[FoundFile]:
        """The files of the patterns, sorted by name, but for those in folders that cannot be used."""
        files: list[FoundFile] = []
        for pattern in patterns:
            try:
                files += expand(pattern, self.keys.format.suffixes(), self.finder)
            except JobError as error:
                self._note(key, error)
        # The manifest of a folder is read once, however many of its files are named
        usable = {folder: self._open_folder(key, folder) for folder in sorted({_folder(file) for file in files})}
        return distinct(sorted(file for file in files if usable[_folder(file)]), self.surroundings.listing.real)

    def _open_folder(self, key: str, folder: str) -> bool:
        try:
            self.folders[folder] = read_prepared(folder)
        except JobError as error:
            self._note(key, error)
            return False
        return True

    def _split(self, files: Iterable[FoundFile]) -> tuple[list[str], list[str]]:
        """Files to train on, and those that the manifests of their folders hold out."""
        splits: dict[str, list[str]] = {TRAIN: [], HELD_OUT: []}
        for file in files:
            try:
                splits[self._role(file)].append(file.path)
            except JobError as error:
                self._note("path", error)
        return splits[TRAIN], splits[HELD_OUT]

    def _role(self, file: FoundFile) -> str:
        folder = _folder(file)
        prepared = self.folders[folder]
        role = prepared.split_of.get(os.path.basename(file.path)) if prepared else TRAIN
        if role is None:
            raise JobError(f"{file.path} is no part of what data prepare wrote to {folder!r}; move it elsewhere")
        # A file that is named by itself would be trained on
        if role == HELD_OUT and not file.in_folder:
            raise JobError(f"{file.path} was held out by data prepare; name its folder, {folder!r}, or its train-*.bin")
        return role

    def _check_overlap(self, train: Iterable[str], held_out: Iterable[str]) -> None:
        # By real paths, since a link may lead to a file that is trained on
        trained = set(map(self.surroundings.listing.real, train))
        for path in held_out:
            if self.surroundings.listing.real(path) in trained:
                self._note("held_out_path", f"{path} is also trained on; leave it out of one of the two")

    def _read(self, key: str, paths: Iterable[str]) -> list[Shard]:
        shards = []
        for path in paths:
            try:
                shard = read_shard(path, self.keys.format, self.surroundings)
                prepared = self.folders[os.path.dirname(path)]
                shards.append(_with_manifest(shard, prepared) if prepared else shard)
            except JobError as error:
                self._note(key, error)
        return shards

    def _check_orphans(self, folders: Iterable[str], shards: Sequence[Shard]) -> None:
        """An index whose data is missing: of a folder, the whole is meant."""
        pairs = {format.index for format in self.keys.format.members() if format.index}
        known = {path for shard in shards for path in shard.stamps}
        for folder in sorted(folders):
            where = absolute(folder)
            # Only where such indexes are in use: another file may have the same suffix
            used = [
                pair
                for pair in pairs
                if any(path.endswith(pair[0]) and os.path.dirname(path) == where for path in known)
            ]
            for name in sorted(self.surroundings.listing.names(folder)) if used else ():
                data = [name.removesuffix(index) + suffix for index, suffix in used if name.endswith(index)]
                if data and not any(self.surroundings.listing.has(os.path.join(folder, each)) for each in data):
                    self._note("path", f"{os.path.join(folder, name)} is there, but its data, {data[0]}, is missing")

    # --- what they say ---------------------------------------------------------------------------------------------

    def _prepared(self, shards: Sequence[Shard]) -> tuple[Prepared, ...]:
        """The folders of `data prepare`, whole and of one tokenizer."""
        prepared = tuple(folder for folder in self.folders.values() if folder is not None)
        # Known from the shards, so that the manifest's files need not be looked at again
        sizes = {path: stamp[0] for shard in shards for path, stamp in shard.stamps.items()}
        for folder in prepared:
            listing = self.surroundings.listing
            faults = (folder.size_fault(name, sizes, listing) for name in folder.manifest["files"])
            self.problems += [Problem("path", fault) for fault in faults if fault]
        # Equal ids of different tokenizers would be different words.
        if len({folder.fingerprint for folder in prepared}) > 1:
            names = ", ".join(folder.folder for folder in prepared)
            self._note("path", f"{names} were prepared with different tokenizers; a source has one")
        return prepared

    def _agreed(self, shards: Sequence[Shard]) -> tuple[int | None, int | None]:
        """End-of-text and vocabulary of all shards together."""
        end_of_text = self._one("end_of_text", shards, "end-of-text id")
        vocab_size = self._one("vocab_size", shards, "vocabulary size")
        given = self.keys.end_of_text
        if given is not None and end_of_text not in (None, given):
            self._note("end_of_text", f"{given}, but the files say {end_of_text}; leave the key out")
        if given is None and end_of_text is None and shards:
            message = f"{shards[0].path} does not say which id ends a document"
            self._note("end_of_text", f"required key is missing: {message}; write end_of_text = ID")
        return (end_of_text if given is None else given), vocab_size

    def _one(self, name: str, shards: Sequence[Shard], what: str) -> int | None:
        path_of = {getattr(shard, name): shard.path for shard in shards if getattr(shard, name) is not None}
        if len(path_of) > 1:
            (one, here), (other, there), *_ = path_of.items()
            self._note("path", f"{here} has {what} {one}, {there} {other}; they are of different tokenizers")
        return next(iter(path_of), None)


def _with_manifest(shard: Shard, prepared: Prepared) -> Shard:
    """A shard of `data prepare` with what its folder states."""
    tokenizer = prepared.manifest["tokenizer"]
    # Of another library's format, whose files do not state them; Forge's header does
    known = shard.end_of_text is not None or "end_of_text" not in tokenizer
    facts: dict[str, Any] = {} if known else {key: tokenizer[key] for key in ("vocab_size", "end_of_text")}
    origins = os.path.splitext(shard.path)[0] + ORIGINS
    if os.path.basename(origins) in prepared.manifest["files"]:
        facts["origins"] = OriginTable(origins)
    return evolve(shard, summed=prepared.is_summed(os.path.basename(shard.path)), **facts)


def _folder(file: FoundFile) -> str:
    return os.path.dirname(file.path)
