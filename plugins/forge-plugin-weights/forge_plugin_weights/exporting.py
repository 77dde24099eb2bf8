"""A run's weights become a folder that `transformers` and vLLM load."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs import frozen

from forge_core.checkpoint.resume import locate
from forge_core.checkpoint.run_folder import JOB, TOKENIZER
from forge_core.checkpoint.run_folder import PROVENANCE as PROVENANCE_FILE
from forge_core.checkpoint.storage import fetch, threads
from forge_core.checkpoint.tensors import Index, shared_index
from forge_core.config.load import MODEL_TABLES, parse_job
from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import CheckpointError, JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.nn.adapters import adapter_names
from forge_kit.tools.checkpoints import evaluated_names, stored_tensors
from forge_kit.tools.outputs import free_path
from forge_kit.tools.trained_model import load_model
from forge_plugin_weights.adapters import MERGING, Merging, has_adapters, write_adapters
from forge_plugin_weights.adapters import merge as merge_into
from forge_plugin_weights.card import write_card
from forge_plugin_weights.files import BLOCK, INDEX, create, index_json, making, plan_files, writer_of
from forge_plugin_weights.gguf_export import write_gguf
from forge_plugin_weights.gguf_files import is_gguf
from forge_plugin_weights.importing import (
    CONFIG,
    GENERATION,
    ORIGIN,
    SOURCE,
    TOKENIZER_CONFIG,
    added_tokens,
    read_json,
    run_of,
)
from forge_plugin_weights.kinds import PIXELS, ArchitectureComponent, Part
from forge_plugin_weights.matching import Match, match_names
from forge_plugin_weights.parity import ReadBack, write_parity
from forge_plugin_weights.pixels import (
    PREPROCESSOR,
    PROCESSOR,
    PROCESSOR_FILES,
    VIDEO_PREPROCESSOR,
    processor_of,
    updated_processor,
    video_processor,
)
from forge_plugin_weights.reading import Piece, Reader
from forge_plugin_weights.scorers import SCORE, scorer
from forge_plugin_weights.tables import (
    Form,
    fitting_forms,
    load_architecture,
    place_of,
    plain_type,
    preferred,
    write_form,
)
from forge_plugin_weights.vision_kinds import VisionLanguageArchitecture, VisionTowerArchitecture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from forge_core.job import Job

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
TOKENS = 256
"""Random tokens for which two models are compared."""
SHREDS = 1 << 25
"""Bytes, of all threads, that are read at a time of tensors of which the published ones have another order."""
TEXT = "text_config"
IMAGE_TOKENS = ("<image>", "<|image|>", "<|image_pad|>")
"""Names of the token that stands for an image, where the tokenizer's files do not say it."""
KEPT = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that an imported model has again, though they mean nothing to Forge."""
NOTHING: Mapping[str, Any] = {}
PROVENANCE = "forge"
"""Folder, in an export, with the job and where the weights come from."""


@frozen(kw_only=True)
class Target:
    """The published form of a job's model."""

    model_type: str
    architecture: ArchitectureComponent
    config: Mapping[str, Any]
    """The keys that describe the model."""
    match: Match
    place: str
    """Of the architecture's class, if no entry point names it."""

    @property
    def is_tower(self) -> bool:
        """Whether it is a vision tower alone, which has no tokenizer."""
        return isinstance(self.architecture, VisionTowerArchitecture)


def find_target(
    job: Job,
    shapes: Mapping[str, tuple[int, ...]],
    catalog: Catalog,
    architecture: str = "",
    origin: Mapping[str, Any] = NOTHING,
) -> Target:
    """Returns the published form of a model.

    Args:
        job: whose `[model]` it is.
        shapes: of its tensors, by Forge's names.
        catalog: which architectures there are.
        architecture: the one to take; by default the plainest that it is of.
        origin: the record of its import, whose architecture is taken where the model is still of it.

    Raises:
        JobError: the model is of no installed architecture; names the keys that have no counterpart.
    """
    name, form, place = find_form(_with_vocabulary(job, shapes), catalog, architecture, origin, imported_as(job))
    chosen = scorer(form.architecture) if SCORE in shapes else form.architecture
    if isinstance(chosen, VisionTowerArchitecture):
        # It may have been named for a model that it is a part of.
        shapes = {own: shape for own, shape in shapes.items() if chosen.has_tensor(own)}
    match = match_names(chosen, form.flat, shapes)
    return Target(model_type=name, architecture=chosen, config=form.config, match=match, place=place)


def find_form(
    model: ModelComponent,
    catalog: Catalog,
    architecture: str = "",
    origin: Mapping[str, Any] = NOTHING,
    base: Mapping[str, Any] = NOTHING,
) -> tuple[str, Form, str]:
    """Returns a model as its architecture describes it, with the `model_type`, and where its class is.

    Args:
        model: the component.
        catalog: which architectures there are.
        architecture: the one to take.
        origin: the record of the run's import.
        base: the record of the import that the run began with, where the run itself is none.

    Raises:
        JobError: as `find_target`.
    """
    record = origin or base
    if architecture:
        return _form_as(architecture, model, catalog, record)
    refused = None
    if remembered := record.get("architecture", ""):  # of a class that no catalog would find again
        try:
            return _form_as(remembered, model, catalog, record)
        except JobError as error:  # the model has changed since, or is a part of a larger one now
            refused = error
    try:
        fitting = fitting_forms(model, catalog)
    except JobError as error:
        raise refused or error from None
    name = origin.get("model_type", "")
    name = name if name in fitting else preferred(fitting)
    return name, fitting[name], ""


def _form_as(named: str, model: ModelComponent, catalog: Catalog, record: Mapping[str, Any]) -> tuple[str, Form, str]:
    chosen = load_architecture(named, catalog)
    place = place_of(named, chosen, catalog)
    part = chosen.part_of_model(model, catalog) if isinstance(chosen, VisionTowerArchitecture) else model
    form = write_form(chosen, part, catalog)
    return _model_type(named, chosen, record) if place else plain_type(named), form, place


def _model_type(place: str, architecture: ArchitectureComponent, record: Mapping[str, Any]) -> str:
    """The `model_type` of a class that no entry point names; raises a `JobError` if it is not known."""
    imported = record.get("model_type", "") if record.get("architecture") else ""
    name = architecture.model_type or imported
    if not re.fullmatch(r"[\w.-]+", name):
        hint = f'give {place.rpartition(":")[2]} a class variable, model_type = "…"'
        raise JobError(f"--architecture {place}: which model_type its exports have is not known; {hint}")
    return name


def imported_as(job: Job) -> Mapping[str, Any]:
    """Returns the record of the imported model that a job begins with, perhaps after other runs; or an empty one."""
    paths = [getattr(load, "path", "") for load in job.checkpoint.loads.values()]
    seen: set[Path] = set()
    while len(paths) == 1 and paths[0] and (path := Path(paths[0]).expanduser()) not in seen:
        seen.add(path)
        if (run := run_of(path, path)) is None:
            break
        if record := origin_of(run):
            return record
        load = tomllib.loads((run / JOB).read_text()).get("checkpoint", {}).get("load", [])
        paths = [table.get("path", "") for table in (load if isinstance(load, list) else [load])]
    return NOTHING


def _with_vocabulary(job: Job, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """The model's component, with the size of the vocabulary that it took from its tokenizer."""
    rows = shapes.get("embedding.weight")
    return _of_vocabulary(job.model, rows[0]) if rows else job.model


def _of_vocabulary(model: Any, size: int) -> Any:
    # 0 stands for the tokenizer's size. The embedding has as many rows, and the tokenizer need not be there.
    if getattr(model, "vocab_size", None) == 0:
        return attrs.evolve(model, vocab_size=size)
    if hasattr(model, "language"):
        return attrs.evolve(model, language=_of_vocabulary(model.language, size))
    return model


def export_run(
    path: Path,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    architecture: str = "",
    computed: bool = False,
    merge: bool = False,
    tokenizer: bool = True,
    catalog: Catalog | None = None,
) -> Path:
    """Write the weights of a run or checkpoint as a published model.

    The folder has the weights in safetensors files, `config.json`, `generation_config.json`, the tokenizer, a model
    card, and in `forge/` the job, where the weights come from, and how the files, read back, differ from them. Blocks
    of tensors are in memory at a time.

    Args:
        path: a run folder, whose newest checkpoint is taken, or a checkpoint.
        output: the folder to make, or a GGUF file by its suffix `.gguf`; it must not exist.
        dtype: of the weights; by default as they are stored.
        shard_bytes: of each file at most.
        architecture: `model_type` to export as; by default the plainest that the model is of.
        computed: whether to compare what both models compute, too, with a layer of each in memory.
        merge: whether to add adapters to the weights, for which the model must fit into memory. What that rounds is
            recorded in `forge/merging.json`.
        tokenizer: whether a GGUF file has the tokenizer.
        catalog: which architectures there are; by default those that are installed.

    Returns:
        The folder, or the file.

    Raises:
        JobError: the model has no published form, or something cannot be read. Nothing is left then.
    """
    output = free_path(output, "--out")
    catalog = catalog or Catalog.installed()
    weights = _open_weights(path, dtype, catalog)
    if has_adapters(weights) is not merge:
        hint = "take --merge, which adds them to the weights, or --adapters, which writes them alone"
        what = "no adapters: leave --merge out" if merge else f"adapters beside its weights: {hint}"
        raise JobError(f"{weights.checkpoint} has {what}")
    with ExitStack() as stack:
        rounding = None
        if merge:
            weights, rounding = merge_into(weights, catalog, stack, output)
        if is_gguf(output):
            target = find_target(weights.job, weights.shapes, catalog, architecture, weights.origin)
            if rounding is not None and rounding.lost:
                logger.warning("rounding took %.2f%% of the update of %s", 100 * rounding.lost, rounding.name)
            write_gguf(output, weights, target, catalog, tokenizer=tokenizer)
            return output
        return _export(weights, output, shard_bytes, architecture, computed, rounding, catalog)


def export_adapters(path: Path, output: Path, *, architecture: str = "", catalog: Catalog | None = None) -> Path:
    """Write the adapters of a run or checkpoint, without the weights, in the format of Hugging Face's `peft`.

    Args:
        path: a run folder, whose newest checkpoint is taken, or a checkpoint.
        output: the folder to make; it must not exist.
        architecture: `model_type` of the model; by default the plainest that it is of.
        catalog: which architectures there are; by default those that are installed.

    Returns:
        The folder.

    Raises:
        JobError: there are no adapters, or the format has no place for some. Nothing is left then.
    """
    output = free_path(output, "--out")
    catalog = catalog or Catalog.installed()
    weights = _open_weights(path, None, catalog)
    if not has_adapters(weights):
        raise JobError(f"{weights.checkpoint} has no adapters: leave --adapters out")
    model = load_model(weights.checkpoint, run=weights.run, device="cpu", catalog=catalog).model
    left_out = set(adapter_names(model))
    shapes = {name: shape for name, shape in weights.shapes.items() if name not in left_out}
    target = find_target(weights.job, shapes, catalog, architecture, weights.origin)
    with making(output) as folder:
        folder.mkdir()
        write_adapters(folder, weights, model, target.match)
    return output


def _export(
    weights: Weights,
    output: Path,
    shard_bytes: int,
    architecture: str,
    computed: bool,
    rounding: Merging | None,
    catalog: Catalog,
) -> Path:
    target = find_target(weights.job, weights.shapes, catalog, architecture, weights.origin)
    # Refused before the weights are written, which may take long
    if computed and (target.is_tower or target.match.parts.keys() != weights.shapes.keys()):
        raise JobError(f"--verify computes language models; {target.architecture.name} is a part of one, or none")
    with making(output) as folder:
        folder.mkdir()
        _write_tensors(folder, weights, target, shard_bytes)
        write_extras(folder, target, weights.job, weights.dtypes, weights.run)
        _write_card(folder, weights, target, catalog)
        record = write_provenance(folder, weights.checkpoint, weights.manifest, weights.run)
        _prove(folder, record, weights, target, catalog, architecture or target.place, computed)
        if rounding is not None:
            (record / MERGING).write_text(json.dumps(attrs.asdict(rounding), indent=1) + "\n")
    return output


@frozen(kw_only=True)
class Weights:
    """The weights of a checkpoint as they are evaluated; tensors go by their names in the model."""

    checkpoint: Path
    manifest: Mapping[str, Any]
    job: Job
    run: Path | None
    """The run folder, where there is one."""
    names: Mapping[str, str]
    """Of each tensor in the checkpoint."""
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    """As they are exported."""

    @property
    def origin(self) -> Mapping[str, Any]:
        """The record of the published model that the run was imported from; empty for any other run."""
        return origin_of(self.run)

    def names_of(self, target: Target) -> dict[str, str]:
        """The names of the tensors that an export has: all, unless its architecture is a part of the model."""
        return {own: self.names[own] for own in target.match.parts}


def _open_weights(path: Path, dtype: torch.dtype | None, catalog: Catalog) -> Weights:
    """The weights of a checkpoint or of a run's newest one; raises a `JobError` where there is none."""
    try:
        checkpoint, manifest = locate(path, "sizes")  # contents are hashed when they are read
        stored = stored_tensors(checkpoint)
    except CheckpointError as error:
        raise JobError(str(error)) from error
    names = {name.partition(".")[2]: name for name in evaluated_names(stored).values()}
    return Weights(
        checkpoint=checkpoint,
        manifest=manifest,
        job=parse_job(manifest["job"], str(checkpoint / "manifest.json"), catalog, MODEL_TABLES),
        run=run_of(path, checkpoint),
        names=names,
        shapes={own: tuple(stored[name][0]) for own, name in names.items()},
        dtypes={own: dtype or stored[name][1] for own, name in names.items()},
    )


def _write_tensors(folder: Path, weights: Weights, target: Target, shard_bytes: int) -> None:
    """Write the safetensors files and their index, with the checkpoint's files read once and hashed on the way."""
    files = plan_files(folder, tensor_plan(target.match, weights.dtypes), shard_bytes)
    create(folder, files)  # at their final size, as threads write anywhere in them
    writer = writer_of(files)
    for filler in target.match.fillers:
        writer.fill(filler)
    read_checkpoint(weights.checkpoint, weights.manifest, weights.names_of(target), target.match, writer.write)
    writer.close()
    (folder / INDEX).write_text(index_json(files))


def _write_card(folder: Path, weights: Weights, target: Target, catalog: Catalog) -> None:
    manifest = weights.manifest
    write_card(
        folder,
        weights.job,
        catalog,
        architecture=target.architecture.name,
        shapes=target.match.shapes,
        dtype=dtype_name(common_dtype(weights.dtypes)),
        step=manifest["step"],
        tokens=manifest["tokens"],
        evaluation=manifest["evaluation"],
        origin=weights.origin,
    )


def _prove(
    folder: Path,
    record: Path,
    weights: Weights,
    target: Target,
    catalog: Catalog,
    architecture: str,
    computed: bool,
) -> None:
    """Read an export as a published model, by its own `config.json`, and hold it against the checkpoint."""
    from forge_plugin_weights.verifying import PublishedSide, TrainedSide, compare_logits, model_changes, random_batch

    published = PublishedSide(folder, catalog, architecture)
    trained = TrainedSide(weights.checkpoint, catalog, weights.run)
    # A part, such as a tower, has no counterparts of the model's other tensors.
    whole = set(published.shapes) == set(trained.shapes)
    back, names = ReadBack(published.places), weights.names_of(target)
    # The match of the files as they are read, so that a mistake of the one that wrote them shows
    match = published.match if whole else target.match
    read_checkpoint(weights.checkpoint, weights.manifest, names, match, back.compare, hashed=False)
    difference = None
    if computed:
        tokens = min(TOKENS, trained.job.train.seq_len)  # learned positions end there
        difference = compare_logits(trained, published, random_batch(trained, tokens), catalog)
    changes = model_changes(trained, published, catalog) if whole else [f"a part: {target.architecture.name}"]
    write_parity(record, back.close(), names, changes=changes, computed=difference)


def read_checkpoint(
    checkpoint: Path,
    manifest: Mapping[str, Any],
    names: Mapping[str, str],
    match: Match,
    use: Callable[[Part, Tensor, Sequence[int]], None],
    *,
    hashed: bool = True,
) -> None:
    """Read every file of a checkpoint once, from start to end, and hand over the parts of the tensors in it.

    Args:
        checkpoint: its folder.
        manifest: its own.
        names: of the tensors in the checkpoint, by those in the model; others are hashed only.
        match: the parts of each.
        use: is called, by several threads, with a part, a box of our tensor, and where that begins; the part may have
            nothing in common with the box.
        hashed: whether to hash the files, and hold them against the manifest.

    Raises:
        JobError: the files are not those that the manifest describes; names each that differs.
    """
    pieces = _pieces(shared_index(checkpoint), names, match)
    if others := [name for name in pieces if name not in manifest["files"]]:
        hint = "export it with --merge, or --adapters, first"
        raise JobError(f"{checkpoint} leaves weights to its base, {Path(others[0]).parent}: {hint}")

    def take(piece: Piece, memory: memoryview) -> None:
        if piece.key is None:  # bytes that are only hashed
            return
        box: Box = piece.key
        values = torch.frombuffer(memory, dtype=box.dtype).view(box.sizes)
        for part in match.parts[box.name]:
            if part.written:
                use(part, values, box.offsets)

    entries = manifest["files"]
    # So that the longest read does not begin last
    largest_first = sorted(entries, key=lambda name: -entries[name]["size"])
    try:
        fetch(checkpoint, largest_first)  # where the run's storage keeps them elsewhere
    except CheckpointError as error:
        raise JobError(str(error)) from error
    with Reader() as reader:
        digests = {
            name: reader.submit(checkpoint / name, pieces.get(name, ()), take, hashed=hashed) for name in largest_first
        }
        try:
            damaged = [name for name in entries if digests[name].result().sha256 != entries[name]["sha256"]]
        except CheckpointError as error:
            raise JobError(str(error)) from error
    if damaged and hashed:  # else no digest was computed, and all differ
        faults = (f"{checkpoint / name} is damaged: its SHA-256 is not the manifest's" for name in damaged)
        raise JobError("; ".join(faults))


@frozen
class Box:
    """Rows of one of Forge's tensors."""

    name: str
    offsets: Sequence[int]
    sizes: Sequence[int]
    dtype: torch.dtype


def _pieces(index: Index, names: Mapping[str, str], match: Match) -> dict[str, list[Piece]]:
    """What to read of each file: the chunks of the tensors, in blocks of rows."""
    pieces: dict[str, list[Piece]] = {}
    for own, name in names.items():
        stored = index.tensors[name]
        # Blocks of a tensor whose rows do not stay together are written in shreds: the fewer the better.
        limit = BLOCK if all(part.in_rows for part in match.parts[own]) else SHREDS // threads()
        for chunk, file in enumerate(stored.files):
            offsets, sizes = stored.offsets[chunk].tolist(), stored.sizes[chunk].tolist()
            blocks = _rows(own, offsets, sizes, stored.dtype, int(stored.starts[chunk]), limit)
            pieces.setdefault(index.files[file], []).extend(blocks)
    return {file: sorted(of_file, key=lambda piece: piece.start) for file, of_file in pieces.items()}


def _rows(
    name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, start: int, limit: int
) -> Iterator[Piece]:
    """Yields a chunk's pieces of at most `limit` bytes, or a row."""
    if not sizes:  # a scalar, which has no rows
        yield Piece(start, dtype.itemsize, Box(name, offsets, sizes, dtype))
        return
    row = math.prod(sizes[1:]) * dtype.itemsize
    count = max(1, limit // max(1, row))
    # A tensor without numbers has no bytes to read.
    for first in range(0, sizes[0] if row else 0, count):
        rows = min(count, sizes[0] - first)
        box = Box(name, (offsets[0] + first, *offsets[1:]), (rows, *sizes[1:]), dtype)
        yield Piece(start + first * row, rows * row, box)


def origin_of(run: Path | None) -> Mapping[str, Any]:
    """Returns what an imported run folder was made of; empty for any other."""
    return read_json(run / ORIGIN) if run is not None and (run / ORIGIN).is_file() else {}


def tensor_plan(match: Match, dtypes: Mapping[str, torch.dtype]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and dtype of each tensor of the export, by its name there: layer by layer, in one order always."""
    # In the dtype of ours: where parts of several tensors make one of theirs, of the last
    tensors = {part.theirs: (part.shape, dtypes[part.ours]) for part in match.all_parts() if part.written}
    tensors |= {filler.theirs: (filler.shape, common_dtype(dtypes)) for filler in match.fillers}
    return {name: tensors[name] for name in sorted(tensors, key=_by_number)}


def _by_number(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 10 behind layer 9."""
    # Pairs, since a number and a text do not compare
    return [(int(part), "") if part.isdecimal() else (0, part) for part in name.split(".")]


def write_extras(folder: Path, target: Target, job: Job, dtypes: Mapping[str, torch.dtype], run: Path | None) -> None:
    """Write `config.json`, `generation_config.json`, the tokenizer and the files of the image processor."""
    described = dict(target.config)
    pixels = described.pop(PIXELS, None)  # a file beside `config.json`
    (folder / CONFIG).write_text(json.dumps(_config(target, described, job, dtypes, run), indent=2) + "\n")
    # First: the files below complete what was imported with the model.
    if run is not None and (run / TOKENIZER).is_dir():
        _copy_tokenizer(run / TOKENIZER, folder)
    if pixels is not None:
        known = processor_of(folder) or origin_of(run).get("config", {}).get(PIXELS, {})
        (folder / PREPROCESSOR).write_text(json.dumps(updated_processor(pixels, known), indent=2) + "\n")
        if isinstance(target.architecture, VisionLanguageArchitecture):
            _write_processors(folder, target.architecture, described, pixels)
    ids = _special_ids(run)
    if ids and not target.is_tower and not (folder / GENERATION).is_file():
        (folder / GENERATION).write_text(json.dumps(ids, indent=2) + "\n")


def _write_processors(
    folder: Path, architecture: VisionLanguageArchitecture, described: Mapping[str, Any], pixels: Mapping[str, Any]
) -> None:
    """Write the files of the joint processor and of the one for videos that the model has, and no file had."""
    joint = architecture.processor_settings(described)
    if joint and not (folder / PROCESSOR).is_file():
        (folder / PROCESSOR).write_text(json.dumps(joint, indent=2) + "\n")
    if architecture.video_processor and not _has_video_processor(folder):
        settings = video_processor(pixels, architecture.video_processor)
        (folder / VIDEO_PREPROCESSOR).write_text(json.dumps(settings, indent=2) + "\n")


def _copy_tokenizer(kept: Path, folder: Path) -> None:
    """Copy a run's tokenizer: the published files as they came, where the run has them, and what lies beside."""
    if not (kept / SOURCE).is_dir():
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        _spell_for_older_versions(folder / TOKENIZER_CONFIG)
        return
    for path in (kept / name for name in (GENERATION, *PROCESSOR_FILES)):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    shutil.copytree(kept / SOURCE, folder, dirs_exist_ok=True)


def _spell_for_older_versions(path: Path) -> None:
    """Write what `transformers` 5 has saved so that version 4, which lacks its class and a key, loads it, too."""
    settings = dict(read_json(path)) if path.is_file() else {}
    if settings.get("tokenizer_class") != "TokenizersBackend":
        return
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("backend", "is_local", "local_files_only"):
        settings.pop(name, None)
    if isinstance(settings.get("extra_special_tokens"), list):  # a table there
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _has_video_processor(folder: Path) -> bool:
    """Whether a file that was carried over specifies how videos are processed."""
    joint = read_json(folder / PROCESSOR) if (folder / PROCESSOR).is_file() else {}
    return (folder / VIDEO_PREPROCESSOR).is_file() or "video_processor" in joint


def _config(
    target: Target, described: Mapping[str, Any], job: Job, dtypes: Mapping[str, torch.dtype], run: Path | None
) -> dict[str, Any]:
    """The content of `config.json`."""
    origin, architecture = origin_of(run).get("config", {}), target.architecture
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": target.model_type,
        "torch_dtype": dtype_name(common_dtype(dtypes)),
        **{key: origin[key] for key in architecture.kept if key in origin},
        **architecture.purpose,
    }
    if target.is_tower:
        return {**config, **described}
    if isinstance(architecture, VisionLanguageArchitecture):
        config |= _image_tokens(architecture, config, run)
    # Several tokens that end a text stand in generation_config.json alone.
    ids = {name: value for name, value in _special_ids(run).items() if not isinstance(value, list)}
    table = {} if architecture.table else described[TEXT]
    # An architecture without a table is a larger model, which has these keys in its language model's.
    known = origin if architecture.table else {**origin, **origin.get(TEXT, {})}
    text = {
        "max_position_embeddings": job.train.seq_len,
        "use_cache": True,
        **ids,
        **{key: value for key, value in known.items() if key in KEPT},
    }
    if architecture.purpose and text.get("pad_token_id") in _ends_of_text(text, run):
        # By it, `transformers` would take the end of a text, at which the score stands, for padding
        del text["pad_token_id"]
    if not architecture.table:
        return {**config, **described, TEXT: {**text, **table}}
    # Behind `text`, as the longest sequence is part of what some models compute
    return {**config, **text, **described, **architecture.repeated(described)}


def _ends_of_text(text: Mapping[str, Any], run: Path | None) -> Collection[int]:
    """Ids of the tokens that end a text, by `config.json` or by the tokenizer's files."""
    named = (text.get("eos_token_id"), _special_ids(run).get("eos_token_id"))
    return {id_ for each in named if each is not None for id_ in (each if isinstance(each, list) else [each])}


def common_dtype(dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """Returns the dtype of most tensors."""
    values = list(dtypes.values())
    return max(dict.fromkeys(values), key=values.count)  # of equals the first, on every rank


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name that `config.json` has for a dtype."""
    return str(dtype).removeprefix("torch.")


def _special_ids(run: Path | None) -> dict[str, Any]:
    """Ids of the tokens that begin, end and fill texts, as the tokenizer's files say."""
    if run is None:
        return {}
    folder = run / TOKENIZER
    if (folder / GENERATION).is_file():
        known = read_json(folder / GENERATION)
        return {name: known[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in known}
    if not (folder / TOKENIZER_CONFIG).is_file():
        return {}
    settings, ids = read_json(folder / TOKENIZER_CONFIG), added_tokens(folder)
    found = {}
    for name in ("bos", "eos", "pad"):
        token = settings.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token  # in older files with settings
        if content in ids:
            found[f"{name}_token_id"] = ids[content]
    return found


def _image_tokens(
    architecture: VisionLanguageArchitecture, config: Mapping[str, Any], run: Path | None
) -> dict[str, int]:
    """The ids of tokens that stand for images, or mark where they stand, of keys that a configuration lacks."""
    key, ids = architecture.image_token, {}
    if key and key not in config:
        ids = _image_token(key, run)
    if missing := {mark: token for mark, token in architecture.marks.items() if mark not in config}:
        added = added_tokens(run / TOKENIZER) if run is not None else {}
        ids |= {mark: added[token] for mark, token in missing.items() if token in added}
    return ids


def _image_token(key: str, run: Path | None) -> dict[str, int]:
    """The id of the token that stands for an image, as the tokenizer's files say."""
    if run is not None:
        folder = run / TOKENIZER
        settings: dict[str, Any] = {}
        for name in (TOKENIZER_CONFIG, PROCESSOR):
            settings |= read_json(folder / name) if (folder / name).is_file() else {}
        named = settings.get("image_token")
        named = named.get("content") if isinstance(named, dict) else named
        ids = added_tokens(folder)
        for token in (named, *IMAGE_TOKENS):
            if token in ids:
                return {key: ids[token]}
    logger.warning("config.json has no %s: the tokenizer has none of the tokens %s", key, ", ".join(IMAGE_TOKENS))
    return {}


def write_provenance(folder: Path, checkpoint: Path, manifest: Mapping[str, Any], run: Path | None) -> Path:
    """Write the job and where the weights come from; returns the folder of these records."""
    own = folder / PROVENANCE
    own.mkdir()
    (own / JOB).write_text(manifest["job"])
    record = {
        "checkpoint": checkpoint.name,
        "step": manifest["step"],
        "tokens": manifest["tokens"],
        "evaluation": manifest["evaluation"],
        "provenance": manifest["provenance"],
        "files": {name: entry["sha256"] for name, entry in manifest["files"].items()},
    }
    (own / PROVENANCE_FILE).write_text(json.dumps(record, indent=1) + "\n")
    if origin := origin_of(run):
        (own / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")
    return own
