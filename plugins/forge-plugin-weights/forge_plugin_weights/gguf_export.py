"""A run's weights as one GGUF file, which llama.cpp loads.

The file is planned, then its header is read back as an import would read it and compared with the model; only then
the weights are written, in the way safetensors files are, and read back.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from forge_core.config.load import to_toml
from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import ForgeError, JobError
from forge_kit.tools.commands import parse_component
from forge_plugin_weights.files import Boxes, Place, making
from forge_plugin_weights.gguf_families import Family
from forge_plugin_weights.gguf_files import ALIGNMENT, GgufFile, library
from forge_plugin_weights.gguf_metadata import (
    PAIRED,
    ROPE_FREQS,
    add_keys,
    config_of,
    experts_of,
    family_for,
    gguf_names,
    same_divisors,
)
from forge_plugin_weights.gguf_tokenizers import add_tokenizer
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Part
from forge_plugin_weights.matching import Match, listed
from forge_plugin_weights.tables import flattened, read_config

if TYPE_CHECKING:
    from forge_core.plugins.catalog import Catalog
    from forge_plugin_weights.exporting import Target, Weights

KINDS: Mapping[torch.dtype, tuple[str, str]] = {
    torch.float32: ("F32", "ALL_F32"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
}
"""Names of types of tensors and of files."""
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
"""Published names of tensors of experts: the module of all, the expert's number, and the tensor."""


def write_gguf(output: Path, weights: Weights, target: Target, catalog: Catalog, *, tokenizer: bool = True) -> None:
    """Write a model as a GGUF file, with the keys and names that llama.cpp's `convert_hf_to_gguf.py` writes.

    Args:
        output: the file to make; it must not exist.
        weights: of a checkpoint.
        target: the model's published form.
        catalog: which architectures there are.
        tokenizer: whether to write the tokenizer, where the run has one.

    Raises:
        JobError: llama.cpp has no such model or tokenizer. Nothing is left then.
    """
    from forge_plugin_weights.exporting import read_checkpoint

    family = family_for(output, target.model_type)
    _check_dtypes(output, weights)
    with tempfile.TemporaryDirectory() as scratch:
        config = _configuration(Path(scratch), weights, target)
        match = _match(output, family, target.match, config)
        with making(output) as aside:
            places = _write_header(aside, Path(scratch), family, match, weights, config, tokenizer)
            _check_header(aside, output, target, config, catalog)
            boxes = Boxes(places, writable=True)
            read_checkpoint(weights.checkpoint, weights.manifest, weights.names_of(target), match, boxes.write)
            boxes.close()
            _prove(aside, weights, catalog)


def _check_dtypes(output: Path, weights: Weights) -> None:
    if others := sorted({str(dtype) for dtype in weights.dtypes.values() if dtype not in KINDS}):
        raise JobError(f"--out {output}: weights in {others[0]}; add --dtype float32, bfloat16 or float16")


def _configuration(scratch: Path, weights: Weights, target: Target) -> Config:
    """The content of the `config.json` that a folder would have; it lies in `scratch` with the tokenizer's files."""
    from forge_plugin_weights.exporting import write_extras
    from forge_plugin_weights.importing import CONFIG

    write_extras(scratch, target, weights.job, weights.dtypes, weights.run)
    return dict(json.loads((scratch / CONFIG).read_text()))


def _match(output: Path, family: Family, match: Match, config: Config) -> Match:
    """The parts of all tensors in GGUF, where the rows of queries and keys may have another order."""
    name_of = gguf_names(output, family, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    parts: dict[str, Sequence[Part]] = {}
    for own, published in match.parts.items():
        kept = []
        for part in published:
            if not part.written:  # a tied head, for which llama.cpp takes the embedding
                continue
            stacked = EXPERT.fullmatch(part.theirs)
            name = name_of(part.theirs if stacked is None else f"{stacked[1]}.{stacked[3]}")
            if name is None:
                raise JobError(f"--out {output}: {family.name} of GGUF has no tensor for {part.theirs}")
            if stacked is not None:
                kept.append(_in_stack(part, name, int(stacked[2]), experts_of(config)))
                continue
            module = name.split(".")[-2]
            of_heads = heads[module] if family.paired and module in PAIRED else 0
            kept += _halves(part, name, of_heads) if of_heads else [evolve(part, theirs=name)]
        parts[own] = kept
    return Match(parts, match.shapes)


def _in_stack(part: Part, name: str, number: int, count: int) -> Part:
    """A matrix of an expert as one of the stack that all of them are in GGUF."""
    return evolve(part, theirs=name, shape=(count, *part.shape), row=number, of_theirs=itemgetter(number))


def _halves(part: Part, name: str, heads: int) -> list[Part]:
    """A part for each half of each head: every second row of the head in GGUF."""
    size = part.shape[0] // heads
    half = size // 2
    rest = part.shape[1:]
    halves = []
    for head in range(heads):
        for second in range(2):
            ours, theirs = head * size + second * half, head * size + second
            halves.append(
                Part(
                    ours=part.ours,
                    theirs=name,
                    shape=part.shape,
                    offsets=(ours, *(0 for _ in rest)),
                    sizes=(half, *rest),
                    torn=True,
                    of_ours=itemgetter(slice(ours, ours + half)),
                    of_theirs=itemgetter(slice(theirs, (head + 1) * size, 2)),
                )
            )
    return halves


def _write_header(
    path: Path,
    scratch: Path,
    family: Family,
    match: Match,
    weights: Weights,
    config: Config,
    tokenizer: bool,
) -> Mapping[str, Place]:
    """Write the file at its final size, but for the weights; returns where each tensor lies."""
    from forge_core.checkpoint.run_folder import TOKENIZER
    from forge_plugin_weights.exporting import common_dtype, tensor_plan

    gguf = library(path)
    writer = gguf.GGUFWriter(path=None, arch=family.name)
    # One dimension is always in float32, as the converter writes it: llama.cpp computes norms and biases in it
    plan = tensor_plan(match, weights.dtypes)
    plan = {name: (shape, dtype if len(shape) > 1 else torch.float32) for name, (shape, dtype) in plan.items()}
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(weights.job.job.name)
    numbers = sum(torch.Size(shape).numel() for shape, _ in plan.values())
    writer.add_size_label(gguf.size_label(numbers, 0, 0, 0))
    divisors = add_keys(writer, family, config)
    writer.add_file_type(gguf.LlamaFileType[KINDS[common_dtype(weights.dtypes)][1]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if tokenizer and weights.run is not None and (weights.run / TOKENIZER).is_dir():
        add_tokenizer(writer, scratch, path, config["vocab_size"])
    else:
        writer.add_tokenizer_model("none")
        if family.name != "llama":  # its keys have it
            writer.add_vocab_size(config["vocab_size"])
    if divisors is not None:
        plan = {ROPE_FREQS: (tuple(divisors.shape), torch.float32), **plan}
    for name, (shape, dtype) in plan.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        kind = gguf.GGMLQuantizationType[KINDS[dtype][0]]
        writer.add_tensor_info(name, shape, None, size, raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    end = _padded(path.stat().st_size)
    places = {}
    for name, (shape, dtype) in plan.items():
        places[name] = Place(path, end, dtype, shape)
        end = _padded(end + places[name].size)
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate"):
            # A full disk is found here: later, it would be a signal, as rows that lie apart are written to a mapping
            os.posix_fallocate(file.fileno(), 0, end)
        file.truncate(end)
        if divisors is not None:
            file.seek(places[ROPE_FREQS].start)
            file.write(divisors.numpy().tobytes())
    return places


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _check_header(path: Path, output: Path, target: Target, config: Config, catalog: Catalog) -> None:
    """Raise a `JobError` for keys of the model that the metadata, read as an import reads it, does not have."""
    from forge_plugin_weights.tables import load_architecture

    again = config_of(GgufFile.open(path))
    if same_divisors(again, config):  # of which short heads have too few to tell the keys by
        again["rope_scaling"] = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}
    wanted = _model(target.architecture, config, catalog)
    found = _model(load_architecture(again["model_type"], catalog), again, catalog)
    if lost := sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key)):
        key = lost[0]
        message = f"model.{key} = {wanted.get(key)!r} has no counterpart in GGUF, which would have {found.get(key)!r}"
        raise JobError(f"--out {output}: {message}; name a folder")


def _model(architecture: ArchitectureComponent, config: Config, catalog: Catalog) -> Mapping[str, Any]:
    """The keys of `[model]` that a configuration describes, defaults included."""
    table = read_config(architecture, config)
    return flattened(to_toml(parse_component(table, "config.json", ModelComponent, catalog), catalog))


def _prove(path: Path, weights: Weights, catalog: Catalog) -> None:
    """Read the file as a published model, and compare each tensor with the checkpoint's, one at a time."""
    from forge_plugin_weights.verifying import PublishedSide, TrainedSide

    published = PublishedSide(path, catalog, "")
    trained = TrainedSide(weights.checkpoint, catalog, weights.run)
    wrong = []
    for name in trained.shapes:
        back, stored = published.read(name), trained.read(name)
        if not torch.equal(stored.to(back.dtype), back):
            wrong.append(name)
    if wrong:
        raise ForgeError(f"the file, read back, does not hold {listed(wrong)}; the disk may be failing")
