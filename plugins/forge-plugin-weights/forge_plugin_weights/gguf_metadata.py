"""Keys of GGUF's metadata and of `config.json`, and names of tensors, in both directions.

The architectures of Forge do the rest: a file's metadata becomes the configuration that they read, and its tensors get
their published names, by the table of the package `gguf`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_core.contracts.errors import JobError
from forge_plugin_transformer.huggingface_names import ENDS
from forge_plugin_weights.files import Place
from forge_plugin_weights.gguf_families import FAMILIES, Family, Keys, Known, family_of
from forge_plugin_weights.gguf_files import Gains, GgufFile, PairedRows, library, slice_of
from forge_plugin_weights.kinds import Config
from forge_plugin_weights.matching import listed

ROPE_FREQS = "rope_freqs.weight"
"""The tensor by which llama.cpp has the position encoding of Llama 3.1: a divisor of each frequency."""
PAIRED = ("attn_q", "attn_k")
SPECIAL: Mapping[str, str] = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
LLAMA3_LOW, LLAMA3_HIGH = 1.0, 4.0
"""Factors of all published models with the position encoding `llama3`."""
PUBLISHED_LENGTH = 8192
"""Their original length."""
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Their keys, in the order of the arguments of `divisors`."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """Returns the content of a `config.json` for a file.

    Keys of the metadata that are not known here keep their names, so that the architecture refuses them as it does any
    other key.

    Raises:
        JobError: no architecture is this, a key is missing, or has a value that is not read.
    """
    family = family_of(file)
    keys = Keys(file, family)
    try:
        config = _config(file, family, keys)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise JobError(f"{file.path}: the metadata cannot be read ({type(error).__name__}: {error})") from error
    return {**config, **keys.left}


def _config(file: GgufFile, family: Family, keys: Keys) -> dict[str, Any]:
    embedding = file.places.get("token_embd.weight")
    if embedding is None:
        raise JobError(f"{file.path} has no tensor token_embd.weight")
    layers = keys.need("block_count")
    if layers > len(file.places):  # before names are made for each
        raise JobError(f"{file.path}: {family.name}.block_count = {layers}, and there are {len(file.places)} tensors")
    width, heads = keys.need("embedding_length"), keys.need("attention.head_count")
    size = keys.take("attention.key_length", width // heads)
    config = {
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": keys.need("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", heads),
        "head_dim": size,
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.need("context_length"),
        "tie_word_embeddings": "output.weight" not in file.places,
        "rope_theta": keys.take("rope.freq_base", 10000.0),
    }
    config |= family.further(Known(file, keys, config))
    same = {"attention.value_length": size, "rope.dimension_count": size, "vocab_size": embedding.shape[0]}
    for name, value in same.items():
        if (given := keys.take(name, value)) != value:
            raise JobError(f"{file.path}: {family.name}.{name} = {given}; {value} is read, as other keys describe it")
    config.setdefault("rope_scaling", _rope_scaling(file, keys))
    for name, inert in {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}.items():
        keys.drop(name, inert)
    special = {key: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name, key in SPECIAL.items()}
    if family.paired and ROPE_FREQS in file.places:
        if config["rope_scaling"] is not None:
            raise JobError(f"{file.path} has {ROPE_FREQS} and {family.name}.rope.scaling.type; one of them is read")
        config["rope_scaling"] = _llama3(file, config)
    return {**config, **{key: value for key, value in special.items() if value is not None}}


def _rope_scaling(file: GgufFile, keys: Keys) -> dict[str, Any] | None:
    """The table `rope_scaling`; keys of it that are not known stay, and are refused."""
    kind, factor = keys.take("rope.scaling.type", "none"), keys.take("rope.scaling.factor")
    keys.take("rope.scaling.finetuned")  # a note
    if (old := keys.take("rope.scale_linear")) is not None and kind == "none":  # files of 2023
        kind, factor = "linear", old
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        keys.drop(f"rope.scaling.{name}", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        if factor not in (None, 1.0):
            raise JobError(f"{file.path}: rope.scaling.factor = {factor} without rope.scaling.type, such as linear")
        keys.take("rope.scaling.original_context_length")  # of no scaling
        return None
    if kind == "linear":
        keys.take("rope.scaling.original_context_length")
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise JobError(f"{file.path}: rope.scaling.type = {kind!r}; none, linear and yarn are read")
    yarn = {"rope_type": "yarn", "factor": factor}
    names = {"original_context_length": "original_max_position_embeddings", "yarn_beta_fast": "beta_fast"}
    for name, key in {**names, "yarn_beta_slow": "beta_slow"}.items():
        if (value := keys.take(f"rope.scaling.{name}")) is not None:
            yarn[key] = value
    return yarn


def divisors(theta: float, size: int, factor: float, low: float, high: float, original: int) -> Tensor:
    """Returns the divisors of the frequencies of Llama 3.1 (`LlamaModel` of llama.cpp's convert_hf_to_gguf.py).

    Args:
        theta: base of the position encoding.
        size: of a head.
        factor: divisor of the lowest frequencies.
        low: which wavelengths are long, as a share of the original length.
        high: which are short.
        original: the original length.
    """
    frequencies = 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    result = []
    for wavelength in (2 * math.pi / frequencies).tolist():
        smooth = (original / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        result.append(1.0 if wavelength < original / high else factor if wavelength > original / low else between)
    return torch.tensor(result, dtype=torch.float32)


def _llama3(file: GgufFile, config: Config) -> dict[str, Any] | None:
    """The keys whose divisors a file has: it does not have the keys themselves, and they are found by trying."""
    given = file.places[ROPE_FREQS].read().float()
    factor = given.max().item()
    if factor == 1.0 and given.min() == 1.0:
        return None
    for original in (PUBLISHED_LENGTH, *(2**power for power in range(4, 21))):
        table = (factor, LLAMA3_LOW, LLAMA3_HIGH, original)
        expected = divisors(config["rope_theta"], config["head_dim"], *table)
        if given.shape == expected.shape and torch.allclose(given, expected, rtol=1e-6, atol=0):
            return {"rope_type": "llama3", **dict(zip(LLAMA3, table, strict=True))}
    hint = f"llama3 with the factors {LLAMA3_LOW:g} and {LLAMA3_HIGH:g} and a length that is a power of two is read"
    raise JobError(f"{file.path}: {ROPE_FREQS} has divisors of frequencies that are not read; {hint}")


def same_divisors(read: Config, wanted: Config) -> bool:
    """Whether a configuration that was read from a file has the frequencies of one that was written, of `llama3`."""
    scaling, rope = read["rope_scaling"], wanted["rope_parameters"]
    if not scaling or {scaling["rope_type"], rope["rope_type"]} != {"llama3"}:
        return False
    one = divisors(read["rope_theta"], read["head_dim"], *(scaling[key] for key in LLAMA3))
    other = divisors(rope["rope_theta"], wanted["head_dim"], *(rope[key] for key in LLAMA3))
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-6, atol=0)


# --- tensors -----------------------------------------------------------------------------------------------------


def gguf_names(path: Path, family: Family, layers: int) -> Any:
    """Returns a function from the published name of a tensor to its name in GGUF; None for one that GGUF lacks."""
    gguf = library(path)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[family.name], layers)
    return lambda name: table.get_name(name, try_suffixes=(".weight", ".bias"))


def _published(family: Family, layers: int) -> Iterator[str]:
    """Yields the published name of each tensor that a file may have, but for experts."""
    for module in ENDS.values():
        yield f"{module}.weight"
    for layer in range(layers):
        for module in family.modules:
            yield from (f"model.layers.{layer}.{module}.{tensor}" for tensor in ("weight", "bias"))


def published_places(file: GgufFile, config: Config) -> dict[str, Place]:
    """Returns where each tensor of a file lies, by its published name.

    Raises:
        JobError: the file has tensors that are not known; names them.
    """
    family, places = family_of(file), dict(file.places)
    for name in (*family.other_tensors, *([ROPE_FREQS] if family.paired else [])):
        places.pop(name, None)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    name_of = gguf_names(file.path, family, config["num_hidden_layers"])
    published: dict[str, Place] = {}
    for name in _published(family, config["num_hidden_layers"]):
        own = name_of(name)
        if own not in places:
            continue
        place, module = places.pop(own), own.split(".")[-2]
        of_heads = heads[module] if family.paired and module in PAIRED else 0
        # Rows that do not make pairs are left for the comparison of shapes
        if of_heads and place.shape and place.shape[0] % (2 * of_heads) == 0:
            start, dtype, shape = place.start, place.dtype, place.shape
            place = PairedRows(file.path, start, dtype, shape, raw=place, name=own, heads=of_heads)
        if family.adds_one and name.endswith("norm.weight"):
            place = Gains(file.path, place.start, torch.float32, place.shape, raw=place, name=own)
        published[name] = place
    published |= _experts(family, places, config, name_of)
    if places:
        raise JobError(f"{file.path} also has {listed(sorted(places))}, which {family.name} is not read with")
    return published


def _experts(family: Family, places: dict[str, Place], config: Config, name_of: Any) -> Iterator[tuple[str, Place]]:
    """Yields the published name and the place of each matrix of experts, and takes their stacks out of `places`."""
    if not family.experts:
        return
    for layer, matrix in product(range(config["num_hidden_layers"]), family.matrices):
        module = f"model.layers.{layer}.{family.experts}"
        name = name_of(f"{module}.{matrix}.weight")
        # One that is no stack stays in `places`, and is refused
        if name not in places or len(places[name].shape) != 3:
            continue
        stack = places.pop(name)
        for number in range(stack.shape[0]):
            yield f"{module}.{number}.{matrix}.weight", slice_of(stack, number)


# --- out ---------------------------------------------------------------------------------------------------------


def family_for(path: Path, model_type: str) -> Family:
    """Returns the architecture that a model is written as; raises a `JobError` for one that is not written."""
    for family in FAMILIES:
        if model_type in family.exported:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.exported)
    raise JobError(f"--out {path}: GGUF is written for {known}, and this model is {model_type}; name a folder")


def experts_of(config: Config) -> int:
    """Returns the number of experts."""
    return int(config.get("num_experts") or config["num_local_experts"])


def add_keys(writer: Any, family: Family, config: Config) -> Tensor | None:
    """Add the keys of a configuration as llama.cpp's `convert_hf_to_gguf.py` does.

    Args:
        writer: a `gguf.GGUFWriter`.
        family: the architecture.
        config: the content of `config.json`.

    Returns:
        The divisors of frequencies, which are a tensor in GGUF; None if there are none.
    """
    gguf = library(Path())
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if family.experts:
        writer.add_expert_count(experts_of(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    rope = config["rope_parameters"]
    kind, theta, size = rope["rope_type"], rope["rope_theta"], config["head_dim"]
    found = None
    if kind == "llama3" and family.paired:
        found = divisors(theta, size, *(rope[key] for key in LLAMA3))
    elif kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    if family.name == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(size)
    return found
