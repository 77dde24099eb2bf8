"""A published model becomes a run folder: the checkpoint of step 0 points into the model's own files.

A checkpoint consists of raw bytes and an index of where each tensor's bytes lie, and so does a safetensors file. Where
the bytes can be used as they are, nothing is converted: the files are linked into the checkpoint, and its index points
into them. Tensors that have to be computed are computed one at a time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import torch
from attrs import evolve, frozen

from forge_core.checkpoint.run_diff import collect_provenance
from forge_core.checkpoint.run_folder import JOB, TOKENIZER, save_tokenizer, write_record
from forge_core.checkpoint.state import model_tensors
from forge_core.checkpoint.storage import FORMAT, Local, LocalStorage, sync, write_file, write_manifest
from forge_core.checkpoint.tensors import INDEX
from forge_core.config.load import MODEL_TABLES, dump_job, parse_job, to_toml
from forge_core.contracts.errors import JobError
from forge_core.engine.build import build_bare_model, build_context, build_tokenizer
from forge_core.job import JobSection
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.outputs import free_path
from forge_plugin_weights.downloads import check_small_files, check_weights
from forge_plugin_weights.files import BLOCK, SUFFIX, Place, Room, making, places_in
from forge_plugin_weights.gguf_files import GgufFile, is_gguf
from forge_plugin_weights.gguf_metadata import config_of, published_places
from forge_plugin_weights.gguf_tokenizers import write_tokenizer
from forge_plugin_weights.hub import is_name, origin_of_hub
from forge_plugin_weights.inspecting import value_at, without
from forge_plugin_weights.kinds import OF_LANGUAGE_MODELS, PIXELS, ArchitectureComponent, Flat, Part, Shapes
from forge_plugin_weights.matching import Match, check_tensors, match_names, unused_tensors
from forge_plugin_weights.numbers import FiniteCheck, check_dtypes
from forge_plugin_weights.pixels import (
    PROCESSOR_FILES,
    VIDEOS,
    ImageTable,
    image_table,
    processor_of,
    video_line,
    with_videos,
)
from forge_plugin_weights.reading import Digest, Piece, Reader
from forge_plugin_weights.scaled_weights import wide_places
from forge_plugin_weights.scorers import check_installed, is_scorer, scorer
from forge_plugin_weights.tables import (
    architecture_of,
    flattened,
    load_architecture,
    place_of,
    plain_type,
    read_config,
    resolved,
)
from forge_plugin_weights.vision_kinds import VisionLanguageArchitecture, VisionTowerArchitecture

if TYPE_CHECKING:
    from concurrent.futures import Future

    from forge_core.contracts.data import Tokenizer
    from forge_core.job import Job

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
START = "start.toml"
"""File of an imported run folder with the tables that a job needs to start from it."""
ORIGIN = "origin.json"
"""File of an imported run folder: where it came from, the SHA-256 of each file, and what vouches for it."""
LEFT_OUT = "left_out"
"""Key of that file: names of the weights that the import has no use for."""
IGNORED = "ignored"
"""Key of that file: keys of `config.json` that were left out by `--ignore`, with their values."""
SPELLED = "spelled_tokens"
"""Key of the tokenizer."""
SOURCE = "source"
"""Folder, in a run's folder of the tokenizer, with the published files as they came; beside it, what encodes."""
COMPUTED = "computed.bin"
"""File of tensors that had to be computed."""


@frozen(kw_only=True)
class PublishedModel:
    """A published model in a folder, or in a GGUF file."""

    folder: Path
    """Or the file."""
    tokenizer: Path
    """Folder with the tokenizer's files."""
    tokenizer_made: bool
    """Whether that folder was made of a file's metadata, for the import only."""
    config: Mapping[str, Any]
    model_type: str
    architecture: ArchitectureComponent
    place: str
    """Of the architecture's class, if no entry point names it: `/path/to/mine.py:Mine`."""
    places: Mapping[str, Place]
    files: Sequence[Path]
    """With weights, the largest first."""
    ignored: Mapping[str, Any]
    """Keys of the configuration that its reader has left out, as they mean nothing, with their values."""

    @property
    def is_tower(self) -> bool:
        """Whether it is a vision tower alone, which has no tokenizer."""
        return isinstance(self.architecture, VisionTowerArchitecture)

    @classmethod
    def open(
        cls,
        folder: Path,
        catalog: Catalog,
        architecture: str = "",
        ignore: Collection[str] = (),
        tokenizer: Path | None = None,
        tokenizer_made: bool = False,
    ) -> PublishedModel:
        """Read the configuration and the headers of all files.

        Args:
            folder: with the model, or a GGUF file.
            catalog: which architectures there are.
            architecture: in place of the one that `config.json` names.
            ignore: keys of `config.json`, unknown to Forge, that are left out.
            tokenizer: the folder of the tokenizer, where it is another.
            tokenizer_made: whether that was made for the import only.

        Raises:
            JobError: there is no such folder, or its files are damaged.
            JobError: a key to ignore is not there, or known.
            JobError: no installed architecture is its own.
        """
        file = GgufFile.open(folder) if is_gguf(folder) and folder.is_file() else None
        config = read_folder(folder) if file is None else config_of(file)
        if file is not None and architecture not in ("", config["model_type"]):
            raise JobError(f"--architecture {architecture}: {folder} is read as {config['model_type']}; leave it out")
        if architecture:
            chosen = load_architecture(architecture, catalog)
            place = place_of(architecture, chosen, catalog)
            # A part of a larger model has another type than that, and a class of a file has none.
            name = chosen.model_type or str(config.get("model_type", "")) if place else plain_type(architecture)
        else:
            (name, chosen), place = architecture_of(config, catalog), ""
        if is_scorer(config):
            check_installed(catalog)
            chosen = scorer(chosen)
        is_part = not isinstance(chosen, VisionTowerArchitecture) and isinstance(config.get(chosen.table), Mapping)
        # In this order: the architecture's patterns are for the names that the part has alone.
        renames = {**(OF_LANGUAGE_MODELS if is_part else {}), **chosen.renames}
        stored = places_in(folder) if file is None else published_places(file, config)
        files = {place.file for place in stored.values()}
        return cls(
            folder=folder,
            tokenizer=tokenizer or folder,
            tokenizer_made=tokenizer_made,
            config=chosen.part_of(without(chosen, config, ignore)),
            ignored={key: value_at(chosen.part_of(config), key) for key in ignore},
            model_type=name,
            architecture=chosen,
            place=place,
            places=renamed(wide_places(stored, config), renames, folder),
            files=sorted(files, key=lambda path: -path.stat().st_size),
        )

    @property
    def beside(self) -> Path:
        """The folder that its files lie in."""
        return self.folder.parent if is_gguf(self.folder) and self.folder.is_file() else self.folder

    @property
    def shapes(self) -> Shapes:
        """Shapes of its tensors."""
        return {name: place.shape for name, place in self.places.items()}


def renamed(places: Mapping[str, Place], renames: Mapping[str, str], folder: Path) -> Mapping[str, Place]:
    """Returns the tensors under the names that an architecture's rules have; see `ArchitectureComponent.renames`."""
    names = {}
    for name in places:
        names[name] = name
        for pattern, replacement in renames.items():
            names[name] = re.sub(pattern, replacement, names[name])
    if len(set(names.values())) < len(names):
        twice = next(name for name, new in names.items() if list(names.values()).count(new) > 1)
        raise JobError(f"{folder} has two tensors that mean {names[twice]}; one of them is {twice}")
    return {names[name]: place for name, place in places.items()}


def read_folder(folder: Path) -> Mapping[str, Any]:
    """Returns the content of a folder's `config.json`, with its `preprocessor_config.json` under `PIXELS`.

    Of a GGUF file, returns its metadata as such a configuration.
    """
    demand_folder(folder)
    if folder.is_file():
        return config_of(GgufFile.open(folder))
    config = read_json(folder / CONFIG)
    pixels = processor_of(folder)
    return {**config, PIXELS: pixels} if pixels else config


def demand_folder(path: Path) -> None:
    """Check that a path is a folder with a published model, or a GGUF file, as far as names show it.

    Raises:
        JobError: it is a name on the hub, another file, or a folder of GGUF files; names what to pass.
    """
    if path.is_dir():
        if not (path / CONFIG).exists() and (models := sorted(path.glob("*.gguf"))):
            raise JobError(f"{path} has no {CONFIG}; to read a GGUF file, name the file: {models[0]}")
        return
    if is_gguf(path):
        if path.is_file():
            return
        raise JobError(f"there is no file {path}")
    if path.is_file():
        hint = f"name its folder, {path.parent}" if path.suffix == SUFFIX else "name the folder of a model"
        raise JobError(f"{path} is a file; {hint}, with {CONFIG} and all {SUFFIX} files")
    hint = ""
    # A name on the hub has the form of a relative path.
    if is_name(path):
        hint = f"; a name on the Hugging Face hub is fetched by: forge-run weights import {path} --out RUN"
    raise JobError(f"there is no folder {path}{hint}")


def read_json(path: Path) -> Mapping[str, Any]:
    """Returns the object in a file; raises a `JobError` if there is none."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise JobError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise JobError(f"{path} holds no object")
    return content


def run_of(path: Path, checkpoint: Path) -> Path | None:
    """Returns the run folder of a checkpoint, which may have a tokenizer; None if the checkpoint lies elsewhere."""
    named = [path.parent.parent] if path.name.startswith("step-") else []  # the checkpoint itself may lie in a cache
    return next((folder for folder in (path, *named, checkpoint.parent.parent) if (folder / JOB).is_file()), None)


def import_folder(
    folder: Path,
    output: Path,
    *,
    copy: bool = False,
    tokenizer: bool | Path = True,
    architecture: str = "",
    ignore: Collection[str] = (),
    catalog: Catalog | None = None,
) -> Path:
    """Make a run folder of a published model.

    `[checkpoint.load]`, `forge-run generate` and all other commands use its checkpoint of step 0 like any run's.

    Args:
        folder: with `config.json`, safetensors files and a tokenizer; or a GGUF file.
        output: the run folder to make; it must not exist.
        copy: whether to copy the files, and not to link them, as is possible on one file system only.
        tokenizer: whether to take the tokenizer too; or the folder with its files, where it is another.
        architecture: in place of the one that `config.json` names: a name, or the place of a class.
        ignore: keys of `config.json`, unknown to Forge, that mean nothing; `origin.json` lists them.
        catalog: which components there are; by default those that are installed.

    Returns:
        The run folder.

    Raises:
        JobError: something is missing, damaged or not supported. Nothing is left then.
    """
    output = free_path(output, "--out")
    demand_folder(folder)
    _check_name(output)  # before files of many gigabytes are read
    catalog = catalog or Catalog.installed()
    if folder.is_dir():
        check_small_files(folder)  # before they are read: what a flipped bit makes of them may be anything
    with ExitStack() as stack:
        chosen = stack.enter_context(_tokenizer_folder(folder, tokenizer))
        made = folder.is_file() and tokenizer is True
        source = PublishedModel.open(folder, catalog, architecture, ignore, chosen, made)
        _import(source, output, copy, tokenizer is not False, catalog)
    return output


@contextmanager
def _tokenizer_folder(model: Path, chosen: bool | Path) -> Iterator[Path]:
    """The folder with a model's tokenizer, which is made for a while of a GGUF file."""
    if isinstance(chosen, Path):
        yield chosen
    elif model.is_dir() or not chosen:
        yield model
    else:
        file = GgufFile.open(model)
        config_of(file)  # a model that is not read is named before its tokenizer
        with tempfile.TemporaryDirectory() as scratch:
            write_tokenizer(file, Path(scratch))
            yield Path(scratch)


def _import(source: PublishedModel, output: Path, copy: bool, tokenizer: bool, catalog: Catalog) -> None:
    finite = FiniteCheck(source.places, source.architecture.unbounded)
    with Reader() as reader:
        # First, since it takes longest: everything else runs in the meantime.
        paths = [] if copy else source.files  # copies are hashed when they are made
        digests = {path: reader.submit(path, finite.pieces(path), finite.look) for path in paths}
        job = imported_job(source, output, tokenizer, catalog)
        match = match_model(source, job, catalog)
        check_tensors(source.architecture, match, source.shapes, source.folder)
        check_dtypes(source.places, match.used, source.folder)
        check_copies(source, match)
        # A second reader, which writes no copy any more when the folder of an import that failed is removed
        with making(output) as aside, Reader() as copier:
            aside.mkdir()
            run = ImportedRun(
                folder=aside, final=output, source=source, job=job, match=match, catalog=catalog, finite=finite
            )
            run.write(copier, digests)


def _check_name(output: Path) -> None:
    """Check that a run may have the name of the folder."""
    try:
        JobSection(name=output.name)
    except ValueError as error:
        message = "the folder's name becomes the run's: letters, digits, ., _ and -, and none of the last three first"
        raise JobError(f"--out {str(output)!r}: {message}") from error


def imported_job(source: PublishedModel, output: Path, tokenizer: bool, catalog: Catalog) -> Job:
    """Returns the job of the run folder: the model and the tokenizer; the rest is of no meaning.

    Raises:
        JobError: the configuration has something that Forge does not support.
    """
    model: dict[str, Any] = dict(read_config(source.architecture, source.config))
    images = image_table(source.config, flattened(model))
    if images and not source.is_tower and images.images > 1:  # else no prompt could have one
        model["vision"] = {**model["vision"], "images_per_sequence": images.images}
    table: dict[str, Any] = {
        "job": {"name": output.name},
        "train": {"steps": 1, "global_batch_size": 1, "seq_len": _length(source.config, model)},
        "model": model,
        # `generate` determines from the first source of images how images in a prompt get their size.
        "data": {"sources": _sources(source, images, model, catalog)},
        "optimizer": {"type": "forge-plugin-adamw/adamw"},
        "plugins": source.architecture.plugins,
    }
    if tokenizer and not source.is_tower:
        table["data"]["tokenizer"] = _tokenizer_table(source)
    # As text, so that its keys are checked like any job's
    place = source.folder / CONFIG if source.folder.is_dir() else source.folder
    return parse_job(tomli_w.dumps(table), str(place), catalog, MODEL_TABLES)


def _sources(
    source: PublishedModel, images: ImageTable | None, model: Mapping[str, Any], catalog: Catalog
) -> Sequence[Mapping[str, Any]]:
    """Returns the table `[[data.sources]]` that shows images, and videos if what shows them is installed."""
    if images is None or source.is_tower:
        return []
    videos = _videos(source.architecture, flattened(model))
    if videos and any(offer.qualified == VIDEOS for offer in catalog.offers("video")):
        return [with_videos(images.source(), videos)]
    return [images.source()]


def _videos(architecture: ArchitectureComponent, model: Flat) -> Mapping[str, Any]:
    """Returns the keys by which a dataset shows videos; none where the model sees none."""
    return architecture.videos(model) if isinstance(architecture, VisionLanguageArchitecture) else {}


def added_tokens(folder: Path) -> dict[str, int]:
    """Ids of a tokenizer's added tokens.

    Raises:
        JobError: the file cannot be read, or has no list of them.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        return {token["content"]: token["id"] for token in read_json(path).get("added_tokens", ())}
    except (TypeError, LookupError) as error:
        message = f"{path}: added_tokens is no list of tokens with content and id"
        raise JobError(f"{message} ({type(error).__name__}: {error})") from error


def _length(config: Mapping[str, Any], model: Mapping[str, Any]) -> Any:
    """The length of sequences that a job begins with: as in training, within reason."""
    length = model.get("learned_positions") or config.get("max_position_embeddings") or 2048
    return int(min(length, 4096)) if isinstance(length, int | float) else length  # which the check of the job refuses


def _tokenizer_table(source: PublishedModel) -> dict[str, Any]:
    folder, architecture = source.tokenizer, source.architecture
    if not (folder / TOKENIZER_CONFIG).is_file():
        hint = "add the tokenizer's files, name their folder by --tokenizer, or leave it out with --no-tokenizer"
        raise JobError(f"{folder} has no tokenizer ({TOKENIZER_CONFIG} is missing); {hint}")
    # Without training, no document can end itself: what the key allows is refused again by start.toml.
    table = {"type": "forge-plugin-huggingface/auto", "path": str(folder), SPELLED: "warn"}
    seeing = architecture if isinstance(architecture, VisionLanguageArchitecture) else None
    # In PaliGemma the beginning of text follows the image: the dataset writes it there.
    table |= {} if seeing and seeing.begins_with_image else {"begin_of_text": "auto"}
    first = seeing.placeholders_from(source.config) if seeing else None
    placeholders = [token for token, id_ in added_tokens(folder).items() if first is not None and id_ >= first]
    return {**table, **({"placeholders": placeholders} if placeholders else {})}


def match_model(source: PublishedModel, job: Job, catalog: Catalog) -> Match:
    """Returns which of the folder's tensors are which of the model's."""
    flat = resolved(source.architecture, flattened(to_toml(job.model, catalog)))
    return match_names(source.architecture.of_files(source.shapes), flat, model_shapes(job, catalog))


def model_shapes(job: Job, catalog: Catalog) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a job's parameters and persistent buffers by name, tied ones once."""
    # On the meta device, where a model of any size takes no memory
    model, _ = build_bare_model(job, build_context(job, catalog, None))
    return {name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()}


def check_copies(source: PublishedModel, match: Match) -> None:
    """Raise a `JobError` if tensors that repeat others, such as tied heads, do not equal them."""
    for name, parts in match.parts.items():
        original = next(part for part in parts if not part.copy)
        for part in parts:
            if not part.copy or part.theirs not in source.places:
                continue
            # A copy is not imported, so that other values in it would be lost.
            if not source.places[part.theirs].equals(source.places[original.theirs]):
                message = f"{part.theirs} and {original.theirs} are one tensor by config.json, and differ in the files"
                raise JobError(f"{source.folder}: {message} ({name}); is tie_word_embeddings wrong?")


# --- the run folder ----------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ImportedRun:
    """The run folder that is made of a published model."""

    folder: Path
    final: Path
    """The name that the folder gets when it is whole."""
    source: PublishedModel
    job: Job
    match: Match
    catalog: Catalog
    finite: FiniteCheck

    def write(self, reader: Reader, digests: dict[Path, Future[Digest]]) -> None:
        """Write the folder.

        Args:
            reader: hashes the files.
            digests: of the files that are being hashed already; the others are hashed while the folder is written.
        """
        tokenizer = _tokenizer(self.job, self.catalog, self.folder)
        storage = LocalStorage(self.folder / Local().folder)
        checkpoint = storage.begin(0)
        index, computed = checkpoint_index(self.source, self.match)  # from headers: no tensor is read yet
        used = _files_of(index)
        # A file of which every tensor is computed is no part of the checkpoint.
        linked = [path for path in self.source.files if path.name in used]
        for path in linked:
            if path in digests:
                _link(path, checkpoint / path.name)
            else:
                digests[path] = _copy(path, checkpoint / path.name, reader, self.finite)
        # These are only read: for their SHA-256 in `origin.json`, and to find NaN.
        for path in self.source.files:
            if path not in digests:
                digests[path] = reader.submit(path, self.finite.pieces(path), self.finite.look)
        files = {}
        if computed:
            files[COMPUTED] = write_file(checkpoint / COMPUTED, _bytes_of(computed))
        files[INDEX] = write_file(checkpoint / INDEX, [json.dumps(index).encode()])
        for path in linked:
            files[path.name] = digests[path].result().entry
            sync(checkpoint / path.name)  # before the manifest lists it
        for path in self.source.files:
            digests[path].result()
        self.finite.finish(self.match.used, self.source.folder)
        text, provenance = (
            dump_job(self._recorded_job(), self.catalog),
            collect_provenance(self.job, self.catalog, tokenizer),
        )
        write_manifest(checkpoint, _manifest(files, text, provenance))
        # After its files and the manifest, so that a committed checkpoint is complete
        storage.commit(0)
        write_record(self.folder, text, provenance, f"imported from {self.source.folder}")
        sha256 = {path: digests[path].result().sha256 for path in sorted(self.source.files)}
        origin = {
            "folder": str(self.source.folder.resolve()),
            "hub": origin_of_hub(self.source.beside),
            "model_type": self.source.model_type,
            "architecture": self.source.place,
            "config": dict(self.source.config),
            IGNORED: dict(self.source.ignored),
            "files": {path.name: digest for path, digest in sha256.items()},
            "tokenizer": tokenizer_digests(self.folder),
            "digests": check_weights(self.source.beside, sha256),
            LEFT_OUT: unused_tensors(self.source.architecture, self.match, self.source.shapes),
        }
        (self.folder / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")
        (self.folder / START).write_text(start_toml(self.source, self.job, self.final, self.catalog))

    def _recorded_job(self) -> Job:
        """The job, with the run's own tokenizer in place of a folder that was made for the import only."""
        tokenizer: Any = self.job.data.tokenizer
        if tokenizer is None or not self.source.tokenizer_made:
            return self.job
        path = str((self.final / TOKENIZER).resolve())
        return evolve(self.job, data=evolve(self.job.data, tokenizer=evolve(tokenizer, path=path)))


def _manifest(files: Mapping[str, Any], job: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a checkpoint before the first step."""
    counts = {"step": 0, "tokens": 0, "skipped": 0, "skipped_in_a_row": 0}
    return {
        "format": FORMAT,
        "step": 0,
        "time": time.time(),
        "files": files,
        "tokens": 0,
        "job": job,
        "provenance": provenance,
        "evaluation": {},
        "extras": {},
        "progress": {**counts, "schedule": None, "samples": {}},
        "optimizer": {"scalars": {}, "groups": []},
    }


def _tokenizer(job: Job, catalog: Catalog, folder: Path) -> Tokenizer | None:
    """Keep the tokenizer in the run folder, with the files on when a text ends and how images are processed."""
    if job.data.tokenizer is None:
        return None
    tokenizer = build_tokenizer(job, build_context(job, catalog, folder))
    assert tokenizer is not None
    save_tokenizer(folder, tokenizer)
    for name in (GENERATION, *PROCESSOR_FILES):
        beside = Path(getattr(job.data.tokenizer, "path", "")) / name
        if beside.is_file():
            shutil.copyfile(beside, folder / TOKENIZER / name)
    return tokenizer


def tokenizer_digests(run: Path) -> dict[str, str]:
    """Returns the SHA-256 of each of a tokenizer's published files, which an export has again."""
    source = run / TOKENIZER / SOURCE
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return {str(path.relative_to(source)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def start_toml(source: PublishedModel, job: Job, folder: Path, catalog: Catalog) -> str:
    """Returns the tables by which a job starts from an imported model: the model, its tokenizer and its weights."""
    model = to_toml(job.model, catalog)
    tables = dict(source.architecture.start_tables(model, {"path": str(folder.resolve())}))
    if job.data.tokenizer is not None:
        tokenizer = to_toml(job.data.tokenizer, catalog) | {"path": str((folder / TOKENIZER).resolve())}
        # Without what only the import was allowed: training has the key's default.
        tables["data"] = {"tokenizer": {key: value for key, value in tokenizer.items() if key != SPELLED}}
    comments = ["A job's other tables go into another file: forge-run start.toml job.toml"]
    if source.is_tower:
        comments += [
            "The tower is a part of a vision-language model, and that file has to say which: [model.language].",
            "If the language model has weights too, write both tables [[checkpoint.load]] there, this one and another",
            'with exclude = ["vision.*"]: a list in a later file takes the place of one in an earlier file.',
        ]
    flat = flattened(model)
    if images := image_table(source.config, flat):
        comments += images.lines()
    if videos := _videos(source.architecture, flat):
        comments.append(video_line(videos))
    return "".join(f"# {line}\n" for line in comments) + tomli_w.dumps(tables)


@frozen
class Computed:
    """A part of a tensor that has to be computed."""

    part: Part
    place: Place
    dtype: torch.dtype

    @property
    def shape(self) -> Sequence[int]:
        """Of the part in our tensor."""
        if self.part.offsets is not None:
            return self.part.sizes
        return self.part.of_theirs(torch.empty(self.part.shape, device="meta")).shape  # without numbers

    def blocks(self) -> Iterator[memoryview]:
        """Yields its bytes, of which some rows are in memory at a time, beside the published tensor."""
        tensor = self.part.of_theirs(self.place.read())
        rows = max(1, BLOCK // max(1, tensor[:1].numel() * self.dtype.itemsize)) if tensor.ndim else 1
        room = Room()
        for block in tensor.split(rows) if tensor.ndim else [tensor]:
            yield room.bytes_of(block, self.dtype)


def checkpoint_index(source: PublishedModel, match: Match) -> tuple[dict[str, Any], Sequence[Computed]]:
    """Returns the index of the checkpoint, and what its file of computed tensors holds, in order."""
    index, computed, end = {}, [], 0
    for name, parts in match.parts.items():
        own = [part for part in parts if not part.copy]
        # Parts may be stored in several dtypes, and a tensor of a checkpoint has one.
        dtype = reduce(torch.promote_types, {source.places[part.theirs].dtype for part in own})
        chunks = []
        for part in own:
            place = source.places[part.theirs]
            # Whole rows in this dtype are bytes that the checkpoint can use where they lie.
            if part.in_rows and place.as_stored and place.dtype == dtype:
                start = place.start + part.row * math.prod(part.shape[1:]) * dtype.itemsize
                chunks.append(_chunk(part, part.sizes, place.file.name, start))
            else:
                tensor = Computed(part, place, dtype)
                chunks.append(_chunk(part, tensor.shape, COMPUTED, end))
                computed.append(tensor)
                end += math.prod(tensor.shape) * dtype.itemsize
        size = [max(ends) for ends in zip(*map(_ends, chunks), strict=True)]
        index[f"model.{name}"] = {"dtype": str(dtype).removeprefix("torch."), "size": size, "chunks": chunks}
    return index, computed


def _chunk(part: Part, sizes: Sequence[int], file: str, start: int) -> dict[str, Any]:
    """The index's entry of a part."""
    offsets = part.offsets if part.offsets is not None else (0,) * len(sizes)
    return {"offsets": list(offsets), "sizes": list(sizes), "file": file, "start": start}


def _ends(chunk: Mapping[str, Any]) -> Sequence[int]:
    """Where a chunk ends in its tensor."""
    return [start + size for start, size in zip(chunk["offsets"], chunk["sizes"], strict=True)]


def _bytes_of(computed: Iterable[Computed]) -> Iterator[memoryview]:
    return (block for tensor in computed for block in tensor.blocks())


def _files_of(index: Mapping[str, Any]) -> set[str]:
    return {chunk["file"] for entry in index.values() for chunk in entry["chunks"]}


def _link(path: Path, target: Path) -> None:
    path = path.resolve()  # the hub's cache consists of symbolic links, which its own clean-up would break
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP):
            raise
        raise JobError(f"{path} is on another file system than {target.parent}; copy it with --copy") from error


def _copy(path: Path, target: Path, reader: Reader, finite: FiniteCheck) -> Future[Digest]:
    """Copy a file while it is hashed and looked at."""

    def append(piece: Piece, memory: memoryview) -> None:
        finite.look(piece, memory)
        # Pieces come in order and without gaps, since the file is hashed.
        with target.open("ab") as file:
            file.write(memory)

    return reader.submit(path, finite.pieces(path), append)
