"""A published model becomes a run folder: the checkpoint of step 0 points into the model's own files.

A checkpoint is raw bytes and an index that says where each tensor's lie, and so is a safetensors file. Where the bytes
can be used as they are, nothing is converted: the files are linked into the checkpoint, and its index points into them.
What has to be computed is computed one tensor at a time.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import tomli_w
import torch
from attrs import frozen

from forge_core.checkpoint.run_diff import collect_provenance
from forge_core.checkpoint.run_folder import TOKENIZER, save_tokenizer, write_record
from forge_core.checkpoint.state import model_tensors
from forge_core.checkpoint.storage import FORMAT, LocalStorage, publish, threads, write_file, write_manifest
from forge_core.checkpoint.tensors import INDEX
from forge_core.config.load import dump_job, parse_job, to_toml
from forge_core.contracts.errors import JobError
from forge_core.engine.build import build_bare_model, build_context, build_tokenizer
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.files import Place, places_in
from forge_plugin_weights.kinds import ArchitectureComponent, Part, Shapes
from forge_plugin_weights.matching import Match, check_tensors, match_names
from forge_plugin_weights.quantised import wide_places
from forge_plugin_weights.tables import architecture_of, flattened, load_architecture, read_config, resolved

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.job import Job

CONFIG = "config.json"
GENERATION = "generation_config.json"
START = "start.toml"
"""File of an imported run folder with the tables that a job needs to start from it."""
ORIGIN = "origin.json"
"""File of an imported run folder: where it came from, and the SHA-256 of each file."""
COMPUTED = "computed.bin"
"""File of tensors that had to be computed."""


@frozen(kw_only=True)
class Source:
    """A published model in a folder."""

    folder: Path
    config: Mapping[str, Any]
    model_type: str
    architecture: ArchitectureComponent
    places: Mapping[str, Place]

    @classmethod
    def open(cls, folder: Path, catalog: Catalog, architecture: str = "") -> Source:
        """Read the configuration and the headers of all files.

        Raises:
            JobError: there is no such folder, or its files are damaged.
            JobError: no installed architecture is its own.
        """
        config = read_json(folder / CONFIG)
        if architecture:
            chosen = config.get("model_type", ""), load_architecture(architecture, catalog)
        else:
            chosen = architecture_of(config, catalog)
        places = wide_places(places_in(folder), config)
        return cls(
            folder=folder,
            config=config,
            model_type=chosen[0],
            architecture=chosen[1],
            places=with_prefix(places, chosen[1].prefix),
        )

    @property
    def shapes(self) -> Shapes:
        """Shapes of its tensors."""
        return {name: place.shape for name, place in self.places.items()}


def with_prefix(places: Mapping[str, Place], prefix: str) -> Mapping[str, Place]:
    """Returns the tensors under the names of the whole model, where those of a file lack a prefix."""
    if any(name.startswith(prefix) for name in places):
        return places
    return {name if name.startswith("lm_head.") else f"{prefix}{name}": place for name, place in places.items()}


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


def import_folder(
    folder: Path,
    output: Path,
    *,
    copy: bool = False,
    tokenizer: bool = True,
    architecture: str = "",
    catalog: Catalog | None = None,
) -> Path:
    """Make a run folder of a published model.

    Its checkpoint of step 0 is to `[checkpoint.load]`, `forge-run generate` and all other commands as that of a run.

    Args:
        folder: with `config.json`, safetensors files and a tokenizer.
        output: the run folder to make; it must not exist.
        copy: whether to copy the files, and not to link them, as is possible on one file system only.
        tokenizer: whether to take the tokenizer too.
        architecture: in place of the one that `config.json` names: a name, or the place of a class.
        catalog: which components there are; by default those that are installed.

    Returns:
        The run folder.

    Raises:
        JobError: something is missing, damaged or not supported. Nothing is left then.
    """
    if output.exists():
        raise JobError(f"{output} exists already; choose another --output, or remove it")
    catalog = catalog or Catalog.installed()
    source = Source.open(folder, catalog, architecture)
    job = imported_job(source, output, tokenizer, catalog)
    match = match_model(source, job, catalog)
    check_tensors(source.architecture, match, source.shapes, folder)
    check_copies(source, match)
    unfinished = output.with_name(f"{output.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _write_run(unfinished, source, job, match, catalog, copy)
        publish(unfinished, output)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return output


def imported_job(source: Source, output: Path, tokenizer: bool, catalog: Catalog) -> Job:
    """Returns the job of the run folder: the model and the tokenizer; the rest is of no meaning.

    Raises:
        JobError: the configuration has something that Forge does not support.
    """
    model = read_config(source.architecture, source.config)
    table: dict[str, Any] = {
        "job": {"name": output.name},
        "train": {"steps": 1, "global_batch_size": 1, "seq_len": _length(source.config, model)},
        "model": model,
        "data": {"sources": []},
        "optimizer": {"type": "forge-plugin-adamw/adamw"},
    }
    if tokenizer:
        table["data"]["tokenizer"] = _tokenizer_table(source.folder)
    return parse_job(tomli_w.dumps(table), str(source.folder / CONFIG), catalog)


def _length(config: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """The length of sequences that a job begins with: as in training, within reason."""
    return min(int(model.get("learned_positions") or config.get("max_position_embeddings") or 2048), 4096)


def _tokenizer_table(folder: Path) -> dict[str, Any]:
    if not (folder / "tokenizer_config.json").is_file():
        hint = "add the tokenizer's files, or leave it out with --no-tokenizer"
        raise JobError(f"{folder} has no tokenizer (tokenizer_config.json is missing); {hint}")
    return {"type": "forge-plugin-huggingface/auto", "path": str(folder), "begin_of_text": "auto"}


def match_model(source: Source, job: Job, catalog: Catalog) -> Match:
    """Returns which of the folder's tensors are which of the model's."""
    flat = resolved(source.architecture, flattened(to_toml(job.model, catalog)))
    return match_names(source.architecture, flat, model_shapes(job, catalog))


def model_shapes(job: Job, catalog: Catalog) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a job's parameters and persistent buffers by name, tied ones once."""
    model, _ = build_bare_model(job, build_context(job, catalog, None))
    return {name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()}


def check_copies(source: Source, match: Match) -> None:
    """Raise a `JobError` if tensors that repeat others, such as tied heads, do not equal them."""
    for name, parts in match.parts.items():
        original = next(part for part in parts if not part.copy)
        for part in parts:
            if not part.copy or part.theirs not in source.places:
                continue
            if not torch.equal(source.places[part.theirs].read(), source.places[original.theirs].read()):
                message = f"{part.theirs} and {original.theirs} are one tensor by config.json, and differ in the files"
                raise JobError(f"{source.folder}: {message} ({name}); is tie_word_embeddings wrong?")


# --- the run folder ----------------------------------------------------------------------------------------------


def _write_run(folder: Path, source: Source, job: Job, match: Match, catalog: Catalog, copy: bool) -> None:
    tokenizer = _tokenizer(job, catalog, folder)
    checkpoint = LocalStorage(folder / "checkpoints").begin(0)
    index = checkpoint_index(source, match, checkpoint)
    linked = sorted({place.file for name, place in source.places.items() if place.file.name in _files_of(index)})
    for path in linked:
        _take(path, checkpoint / path.name, copy)
    files = _hashes(checkpoint, [path.name for path in linked])
    if (checkpoint / COMPUTED).exists():
        files |= _hashes(checkpoint, [COMPUTED])
    files[INDEX] = write_file(checkpoint / INDEX, [json.dumps(index).encode()])
    text, provenance = dump_job(job, catalog), collect_provenance(job, catalog, tokenizer)
    progress: dict[str, Any] = {
        "step": 0,
        "tokens": 0,
        "skipped": 0,
        "skipped_in_a_row": 0,
        "schedule": None,
        "samples": {},
    }
    values = {"tokens": 0, "job": text, "provenance": provenance, "evaluation": {}, "extras": {}}
    state = {"progress": progress, "optimizer": {"scalars": {}, "groups": []}}
    write_manifest(checkpoint, {"format": FORMAT, "step": 0, "time": time.time(), "files": files, **values, **state})
    LocalStorage(folder / "checkpoints").commit(0)
    write_record(folder, text, provenance, f"imported from {source.folder}")
    computed = sorted({place.file for place in source.places.values()} - set(linked))
    files |= _hashes(source.folder, [path.name for path in computed])
    origin = {
        "folder": str(source.folder.resolve()),
        "model_type": source.model_type,
        "config": dict(source.config),
        "files": {path.name: files[path.name]["sha256"] for path in (*linked, *computed)},
    }
    (folder / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")
    (folder / START).write_text(start_toml(job, folder.with_name(job.job.name), catalog))


def _tokenizer(job: Job, catalog: Catalog, folder: Path) -> Tokenizer | None:
    """Keep the tokenizer in the run folder, with what says when its model ends a text."""
    if job.data.tokenizer is None:
        return None
    tokenizer = build_tokenizer(job, build_context(job, catalog, folder))
    assert tokenizer is not None
    save_tokenizer(folder, tokenizer)
    generation = Path(getattr(job.data.tokenizer, "path", "")) / GENERATION
    if generation.is_file():
        shutil.copyfile(generation, folder / TOKENIZER / GENERATION)
    return tokenizer


def start_toml(job: Job, folder: Path, catalog: Catalog) -> str:
    """Returns the tables by which a job starts from an imported model: the model, its tokenizer and its weights."""
    tables: dict[str, Any] = {"model": to_toml(job.model, catalog)}
    if job.data.tokenizer is not None:
        tokenizer = to_toml(job.data.tokenizer, catalog) | {"path": str((folder / TOKENIZER).resolve())}
        tables["data"] = {"tokenizer": tokenizer}
    tables["checkpoint"] = {"load": {"path": str(folder.resolve())}}
    return "# A job's other tables go into another file: forge-run start.toml job.toml\n" + tomli_w.dumps(tables)


def checkpoint_index(source: Source, match: Match, checkpoint: Path) -> dict[str, Any]:
    """Returns the index of the checkpoint; computes what cannot be used as it is, one tensor of theirs at a time."""
    index = {}
    with (checkpoint / COMPUTED).open("wb") as computed:
        for name, parts in match.parts.items():
            own = [part for part in parts if not part.copy]
            dtype = reduce(torch.promote_types, {source.places[part.theirs].dtype for part in own})
            chunks = [_chunk(part, source.places[part.theirs], dtype, computed) for part in own]
            size = [max(ends) for ends in zip(*map(_ends, chunks), strict=True)]
            index[f"model.{name}"] = {"dtype": str(dtype).removeprefix("torch."), "size": size, "chunks": chunks}
        computed.flush()
        os.fsync(computed.fileno())
        end = computed.tell()
    if not end:
        (checkpoint / COMPUTED).unlink()
    return index


def _ends(chunk: Mapping[str, Any]) -> Sequence[int]:
    """Where a chunk ends in its tensor."""
    return [start + size for start, size in zip(chunk["offsets"], chunk["sizes"], strict=True)]


def _chunk(part: Part, place: Place, dtype: torch.dtype, computed: BinaryIO) -> dict[str, Any]:
    """Returns the index's entry of a part, which is written to `computed` if the file does not have it as it is."""
    if part.offsets is not None and place.as_stored and place.dtype == dtype:
        start = place.start + part.row * math.prod(part.shape[1:]) * dtype.itemsize
        return {"offsets": list(part.offsets), "sizes": list(part.sizes), "file": place.file.name, "start": start}
    tensor = part.of_theirs(place.read()).to(dtype).contiguous()
    sizes = part.sizes if part.offsets is not None else tuple(tensor.shape)
    offsets = part.offsets if part.offsets is not None else (0,) * len(sizes)
    start = computed.tell()
    computed.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return {"offsets": list(offsets), "sizes": list(sizes), "file": COMPUTED, "start": start}


def _files_of(index: Mapping[str, Any]) -> set[str]:
    return {chunk["file"] for entry in index.values() for chunk in entry["chunks"]}


def _take(path: Path, target: Path, copy: bool) -> None:
    """Link a file, or copy it."""
    path = path.resolve()  # the hub's cache consists of symbolic links, which its own clean-up would break
    if copy:
        shutil.copyfile(path, target)
        return
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP):
            raise
        raise JobError(f"{path} is on another file system than {target.parent}; copy it with --copy") from error


def _hashes(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Entries of the manifest, several files at a time."""
    import hashlib

    def entry(name: str) -> dict[str, Any]:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": (folder / name).stat().st_size, "sha256": digest}

    names = list(names)
    with ThreadPoolExecutor(threads()) as pool:
        return dict(zip(names, pool.map(entry, names), strict=True))
