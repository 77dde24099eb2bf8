"""GGUF files in and out: written by the package `gguf` and read here, written here and read by `transformers`."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from attrs import frozen
from published_models import EXPERTS, LLAMA3, MODELS, Published, ids_of, logits, ours
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from forge_core.cli import main
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.files import places_in
from forge_plugin_weights.gguf_files import GgufFile
from forge_plugin_weights.gguf_tokenizers import SPLITTINGS, write_tokenizer
from forge_plugin_weights.importing import import_folder

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES = {
    "llama": Published("Llama", {"rope_parameters": LLAMA3}),
    "llama, tied": MODELS["llama, tied"],
    "mistral": MODELS["mistral"],
    "qwen2": MODELS["qwen2"],
    "qwen2, yarn": Published("Qwen2", {"rope_parameters": YARN}),
    "llama, linear": Published(
        "Llama", {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True, "head_dim": 16}
    ),
    "qwen3": Published("Qwen3", {"head_dim": 128}),  # the only size that transformers reads from GGUF
    "qwen3_moe": Published("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 128}),
    "mixtral": Published("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
READ = {
    "gemma": Published("Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": Published("Gemma2", {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "gemma3": Published(
        "Gemma3",
        {
            **GEMMA,
            "num_hidden_layers": 6,  # the last of which has no window
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "Gemma3Text",
    ),
    "phi3": MODELS["phi3"],
    "phi3, longrope": MODELS["phi3, longrope"],
}
"""Models that are read and not written."""
ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Mixtral": "llama", "Qwen3Moe": "qwen3moe"}
TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


def published_tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    """The tensors of a model as the converter has them before it names them: experts in stacks, norms as factors."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = {name: tensor.float().numpy() for name, tensor in load_file(f"{folder}/model.safetensors").items()}
    apart = {name: found for name in tensors if (found := EXPERT.fullmatch(name))}
    for one, other in dict.fromkeys((found[1], found[3]) for found in apart.values()):
        count = len([name for name, found in apart.items() if (found[1], found[3]) == (one, other)])
        tensors[f"{one}.{other}"] = np.stack([tensors[f"{one}.{number}.{other}"] for number in range(count)])
    tensors = {name: values for name, values in tensors.items() if name not in apart}
    if arch.startswith("gemma"):  # `Gemma2Model.modify_tensors`
        tensors = {name: values + name.endswith("norm.weight") for name, values in tensors.items()}
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    for name in [name for name in tensors if arch == "llama" and (".q_proj." in name or ".k_proj." in name)]:
        tensors[name] = permuted(tensors[name], heads if ".q_proj." in name else kv_heads)
    return tensors


def further_keys(config: Any, arch: str) -> dict[str, Any]:
    """What `set_gguf_parameters` of a model's class writes besides, below the name of the architecture."""
    keys: dict[str, Any] = {}
    if getattr(config, "num_local_experts", 0):
        keys |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    if arch == "qwen3moe":
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if arch == "gemma2":
        keys |= {name: getattr(config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    if arch in ("gemma2", "gemma3"):
        keys["attention.sliding_window"] = config.sliding_window
    if arch == "gemma3":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    if arch == "phi3":
        rope, original = config.rope_parameters, config.original_max_position_embeddings
        width = config.hidden_size // config.num_attention_heads
        keys["rope.dimension_count"] = int(width * rope.get("partial_rotary_factor", 1.0))
        keys["rope.scaling.original_context_length"] = original
        keys["attention.sliding_window"] = config.sliding_window or 0
        if rope["rope_type"] == "longrope":
            scale = config.max_position_embeddings / original
            keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return {f"{arch}.{name}": value for name, value in keys.items()}


def written(path: Path, model: Any, arch: str, kind: str = "F32", keys: dict[str, Any] | None = None) -> Path:
    """Write a model by the package `gguf`, as llama.cpp's convert_hf_to_gguf.py does."""
    config = model.config
    keys = {**further_keys(config, arch), **(keys or {})}
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[list] = writer.add_array
        add[type(value)](key, value)
    if keys.get("tokenizer.ggml.model") is not None:
        writer.add_token_list([piece for piece, _, _ in PIECES])
        writer.add_token_scores([score for _, score, _ in PIECES])
        writer.add_token_types([kind for _, _, kind in PIECES])
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    for name, values in published_tensors(model, arch).items():
        of = TYPES["F32" if values.ndim < 2 else kind]
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(own, gguf.quants.quantize(values, of), raw_dtype=of)
    for length in ("long", "short") if rope.get("rope_type") == "longrope" else ():
        writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def difference(run: Path, model: Any, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return (logits(ours(run), ids) - model(ids).logits).abs().max().item()


SCALINGS = {
    "qwen2, yarn": {"type": "yarn", "factor": 4.0, "original_context_length": 32},
    "llama, linear": {"type": "linear", "factor": 2.0},
}
"""Keys below `rope.scaling` of the files that `written` makes."""


@frozen
class Written:
    """A model, and a folder with what its published form, its run and the run's GGUF file are."""

    name: str
    published: Published
    model: Any
    folder: Path
    logits: torch.Tensor
    """Of the run, which the tests of architectures hold against `transformers`."""

    @classmethod
    def make(cls, folder: Path, name: str, published: Published) -> Written:
        """Write the published form and the run."""
        model = published.model()
        with torch.no_grad():  # so that 1 added to gains of norms and taken away again leaves them
            for own, tensor in model.named_parameters():
                tensor.copy_((tensor * 1024).round() / 1024 if own.endswith("norm.weight") else tensor)
        model.save_pretrained(folder / "published", max_shard_size="40KB")
        run = import_folder(folder / "published", folder / "run", tokenizer=False)
        return cls(name, published, model, folder, logits(ours(run), ids_of()))


def check_file_of_other_code(made: Written, path: Path) -> None:
    """A file as llama.cpp's converter makes it becomes, to the bit, the run that the published folder becomes."""
    arch = ARCHITECTURES.get(made.published.name, made.published.name.lower())
    keys = {f"{arch}.rope.scaling.{key}": value for key, value in SCALINGS.get(made.name, {}).items()}
    run = import_folder(written(path / "m.gguf", made.model, arch, keys=keys), path / "run", tokenizer=False)
    found = logits(ours(run), ids_of())
    assert torch.equal(found, made.logits)
    with torch.no_grad():
        theirs = made.model(ids_of()).logits
    assert (found - theirs).abs().max() < 2e-6 * theirs.abs().max()


@pytest.mark.parametrize("name", READ)
def test_a_file_of_other_code_that_is_read_only_computes_what_the_published_model_does(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    check_file_of_other_code(Written.make(tmp_path, name, READ[name]), tmp_path / "other")


@pytest.fixture(scope="module", params=FAMILIES)
def written_here(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A model that is written as a GGUF file, too."""
    made = Written.make(tmp_path_factory.mktemp("written"), request.param, FAMILIES[request.param])
    export_run(made.folder / "run", made.folder / "out.gguf")
    return made


@pytest.mark.parametrize("written_here", [name for name in FAMILIES if name != "llama"], indirect=True)
def test_a_file_of_other_code_computes_what_the_published_model_does(written_here: Written, tmp_path: Path) -> None:
    check_file_of_other_code(written_here, tmp_path)


@pytest.mark.parametrize("written_here", [name for name in FAMILIES if name != "mixtral"], indirect=True)
def test_transformers_reads_what_is_written(written_here: Written) -> None:
    # What it does not read from the metadata is in the configuration given here: biases, scaled positions, experts
    beyond = {"rope_parameters", "attention_bias", "num_experts"} & written_here.published.keys.keys()
    given = {"config": written_here.model.config} if beyond else {}
    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(written_here.folder, gguf_file="out.gguf", dtype=torch.float32, **given).eval()
    with torch.no_grad():
        found = theirs(ids_of()).logits
    assert (written_here.logits - found).abs().max() < 1e-5


def test_a_file_comes_back_to_the_bit(written_here: Written, tmp_path: Path) -> None:
    model, folder = written_here.model, written_here.folder
    back = import_folder(folder / "out.gguf", tmp_path / "back", tokenizer=False)
    assert torch.equal(logits(ours(back), ids_of()), written_here.logits)
    first = places_in(folder / "published")
    again = places_in(export_run(back, tmp_path / "again", architecture=model.config.model_type))
    assert again.keys() == first.keys()
    assert all(place.equals(first[key]) for key, place in again.items())
    second = export_run(back, tmp_path / "second.gguf", architecture=model.config.model_type)
    tensors = [GgufFile.open(path).places for path in (folder / "out.gguf", second)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(place.equals(tensors[1][key]) for key, place in tensors[0].items())


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_types_of_16_bits_are_used_where_they_lie_and_rounded_as_torch_does(kind: str, tmp_path: Path) -> None:
    model = MODELS["llama, tied"].model()
    path = written(tmp_path / "m.gguf", model, "llama", kind)
    run = import_folder(path, tmp_path / "run", tokenizer=False)
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    rounded = {name: value.to(dtype) if value.ndim > 1 else value for name, value in model.state_dict().items()}
    places = places_in(export_run(run, tmp_path / "folder"))
    assert all(torch.equal(place.read(), rounded[name]) for name, place in places.items())
    # Written by Forge in that type, it is the file of the package, tensor for tensor
    whole = import_folder(written(tmp_path / "w.gguf", model, "llama"), tmp_path / "whole", tokenizer=False)
    out = export_run(whole, tmp_path / "out.gguf", dtype=dtype)
    one, other = ({t.name: t for t in gguf.GGUFReader(file).tensors} for file in (path, out))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name].data, other[name].data) for name in one)
    assert all(one[name].tensor_type == other[name].tensor_type for name in one)


def test_8_bits_are_what_the_package_makes_of_them(tmp_path: Path) -> None:
    sizes = {**EXPERTS, "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True}
    path = written(tmp_path / "m.gguf", Published("Qwen3Moe", sizes).model(), "qwen3moe", "Q8_0")
    assert main(["weights", "import", str(path), "--out", str(tmp_path / "run"), "--no-tokenizer"]) == 0
    places = places_in(export_run(tmp_path / "run", tmp_path / "folder", architecture="qwen3_moe"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 3)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    kinds = set()
    for name, place in places.items():
        of_expert = EXPERT.fullmatch(name)
        stacked = f"{of_expert[1]}.{of_expert[3]}" if of_expert else name
        tensor = stored[names.get_name(stacked, try_suffixes=(".weight",))]
        kinds.add(tensor.tensor_type.name)
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        expected = expected[int(of_expert[2])] if of_expert else expected
        assert torch.equal(place.read(), expected.view(place.shape))
    assert kinds == {"F32", "Q8_0"}


def test_8_bits_of_llama_are_unpermuted(tmp_path: Path) -> None:
    model = Published("Llama", {"hidden_size": 64, "intermediate_size": 96}).model()
    run = import_folder(written(tmp_path / "m.gguf", model, "llama", "Q8_0"), tmp_path / "run", tokenizer=False)
    places = places_in(export_run(run, tmp_path / "folder"))
    for name, value in model.state_dict().items():
        largest = value.abs().max()
        assert (places[name].read() - value).abs().max() <= largest / 127, name


# --- tokenizers ----------------------------------------------------------------------------------------------------

TEXT = "Hello World, it's 12345 o'CLOCK!\n\n  naïve café 日本語 \t<|end|>x  y🦙 'RE we'll\r\n ∑ a/b //"


def byte_level(folder: Path, name: str, begins: bool = False) -> Tokenizer:
    """Save a tokenizer with one of the known patterns, trained on some text, and settings for it."""
    splitting = SPLITTINGS[name]
    backend = Tokenizer(models.BPE(ignore_merges=splitting.ignore_merges))
    table = json.loads(backend.to_str())
    table |= {"pre_tokenizer": splitting.pre_tokenizer(), "normalizer": splitting.normalizer}
    backend = Tokenizer.from_str(json.dumps(table))
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|begin|>", "<|end|>"]
    )
    backend.train_from_iterator([TEXT * 3, "the clock of the world says hello " * 9], trainer)
    backend.add_tokens(["<tool>"])
    if begins:
        backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>", chat_template="{{ messages }}"
    ).save_pretrained(folder)
    return backend


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model of Llama 3 with its kind of tokenizer, and more rows than that has tokens."""
    folder = tmp_path_factory.mktemp("gguf") / "published"
    # Heads of 64, as those of the smallest published ones: 32 frequencies, by which the keys of llama3 are found
    Published("Llama", {"vocab_size": 330, "rope_parameters": LLAMA3, "head_dim": 64}).write(folder)
    byte_level(folder, "llama-bpe", begins=True)
    return folder


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("gpt-2", False),
        ("llama-bpe", True),
        ("llama-bpe", False),
        ("qwen2", False),
        ("smollm", True),
        ("tekken", False),
    ],
)
def test_a_tokenizer_comes_back_with_equal_ids(name: str, begins: bool, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    Published("Llama", {"vocab_size": 330}).write(folder)
    before = byte_level(folder, name, begins)
    assert main(["weights", "import", str(folder), "--out", str(tmp_path / "run")]) == 0
    out = tmp_path / "out.gguf"
    assert main(["weights", "export", str(tmp_path / "run"), "--out", str(out)]) == 0
    file = GgufFile.open(out)
    assert file.metadata["tokenizer.ggml.pre"] == name
    back = tmp_path / "back"
    back.mkdir()
    write_tokenizer(file, back)
    after = Tokenizer.from_file(str(back / "tokenizer.json"))
    for text in (TEXT, "<tool> <|end|>", "e\u0301 Ⅷ", ""):
        assert after.encode(text).ids == before.encode(text).ids
        assert after.decode(after.encode(text).ids) == before.decode(before.encode(text).ids)
    assert after.get_vocab(with_added_tokens=True) == before.get_vocab(with_added_tokens=True)


def test_the_command_goes_in_and_out_with_the_tokenizer(with_tokenizer: Path, tmp_path: Path, capsys: Any) -> None:
    run, out = tmp_path / "run", tmp_path / "out.gguf"
    assert main(["weights", "import", str(with_tokenizer), "--out", str(run)]) == 0
    assert main(["weights", "export", str(run), "--out", str(out)]) == 0
    assert main(["weights", "inspect", str(out)]) == 0
    assert "model.attention.rope.type = 'forge-plugin-transformer/llama3'" in capsys.readouterr().out
    assert main(["weights", "import", str(out), "--out", str(tmp_path / "back")]) == 0
    assert main(["weights", "verify", str(run), str(out)]) == 0
    assert "equal, 0 with other values" in capsys.readouterr().out
    words = ["--prompt", "Hello", "--temperature=0", "--max-tokens=6"]
    answers = []
    for folder in (run, tmp_path / "back"):
        assert main(["generate", str(folder), *words]) == 0
        answers.append(capsys.readouterr().out)
    assert "Hello" in answers[0]
    assert answers[1].replace(str(tmp_path / "back"), str(run)) == answers[0]
    origin = json.loads((tmp_path / "back" / "origin.json").read_text())
    assert origin["folder"] == str(out)
    assert (tmp_path / "back/checkpoints/step-0/out.gguf").samefile(out)  # linked
    assert str(tmp_path / "back") in (tmp_path / "back/job.toml").read_text()


def test_the_metadata_is_what_the_converter_writes(with_tokenizer: Path, tmp_path: Path) -> None:
    """`LlamaModel.set_gguf_parameters`, `_set_vocab_gpt2` and `SpecialVocab` of llama.cpp."""
    run = import_folder(with_tokenizer, tmp_path / "mine")
    export_run(run, tmp_path / "out.gguf", dtype=torch.float16)
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    found = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tokens, types, merges = (found.pop(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "merges"))
    assert found.pop("llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert found == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "mine",
        "general.size_label": "109K",
        "general.file_type": 1,
        "general.quantization_version": 2,
        "llama.block_count": 3,
        "llama.context_length": 128,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 64,
        "llama.attention.value_length": 64,
        "llama.rope.freq_base": 50000.0,
        "llama.rope.dimension_count": 64,
        "llama.vocab_size": 330,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    backend = Tokenizer.from_file(str(with_tokenizer / "tokenizer.json"))
    size = backend.get_vocab_size()
    assert tokens == [backend.id_to_token(number) or f"[PAD{number}]" for number in range(330)]
    assert types == [3, 3, *[1] * (size - 3), 4, *[5] * (330 - size)]
    assert merges == [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    divisors = next(tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    inverse = 1 / 50000.0 ** (np.arange(0, 64, 2) / 64)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](
        transformers.AutoConfig.from_pretrained(with_tokenizer), "cpu"
    )
    assert np.allclose(inverse / divisors.data, scaled.numpy(), rtol=1e-6)


SPACE = "▁"
PIECES = (
    *(("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *((letter, -100.0 - number, 1) for number, letter in enumerate(f"{SPACE}abcdehlorw")),
    *(("he", -3.0, 1), ("ll", -1.0, 1), ("llo", -5.0, 1), ("hell", -4.0, 1), ("hello", -6.0, 1)),
    *((f"{SPACE}w", -2.0, 1), ("or", -2.5, 1), ("wor", -1.5, 1), (f"{SPACE}wor", -7.0, 1), ("ld", -8.0, 1)),
    *((f"{SPACE}{SPACE}", -1.2, 1), ("ab", 1.0, 4), ("<tool>", -1000.0, 4)),
)
"""Pieces with their scores and types."""


def merged(text: str) -> list[int]:
    """Ids by SentencePiece's own procedure: of all neighbours the pair whose union has the highest score, the first."""
    ids = {piece: number for number, (piece, _, kind) in enumerate(PIECES) if kind == 1}
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        pairs = [first + second for first, second in pairwise(symbols)]
        there = [(-PIECES[ids[pair]][1], at) for at, pair in enumerate(pairs) if pair in ids]
        if not there:
            break
        at = min(there)[1]
        symbols[at : at + 2] = [pairs[at]]
    known = [[ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()] for symbol in symbols]
    return [number for numbers in known for number in numbers]


def sentencepiece(path: Path, **keys: Any) -> Path:
    """A Llama with such a tokenizer, as llama.cpp has that of Llama 2."""
    model = Published("Llama", {"vocab_size": len(PIECES)}).model()
    added = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "model": "llama", "pre": "default"}
    return written(path, model, "llama", keys={**{f"tokenizer.ggml.{k}": v for k, v in special.items()}, **added})


def test_a_tokenizer_of_sentencepiece_merges_by_scores(tmp_path: Path) -> None:
    path = sentencepiece(tmp_path / "m.gguf")
    assert main(["weights", "import", str(path), "--out", str(tmp_path / "run")]) == 0
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "tokenizer" / "source")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ("hello world", "  hell  word 🦙 é", "hellohello", "wwor ldwor", "bacde\n", "orwor  or"):
        assert loaded.encode(text, add_special_tokens=False) == merged(text), text
        assert loaded.encode(text) == [1, *merged(text)]
        if text[0] != " ":  # before a first space its class puts no second, which llama.cpp and Llama 2 do
            assert loaded.encode(text) == theirs.encode(text)
        assert loaded.decode(loaded.encode(text), skip_special_tokens=True) == text
    assert loaded.encode("<tool>", add_special_tokens=False)[-1] == len(PIECES) - 1


def test_a_tokenizer_of_sentencepiece_comes_back(tmp_path: Path) -> None:
    run = import_folder(sentencepiece(tmp_path / "m.gguf"), tmp_path / "run")
    out = export_run(run, tmp_path / "out.gguf")
    one, other = (GgufFile.open(tmp_path / name).metadata for name in ("m.gguf", "out.gguf"))
    for name in ("model", "pre", "tokens", "token_type", "bos_token_id", "eos_token_id", "unknown_token_id"):
        assert other[f"tokenizer.ggml.{name}"] == one[f"tokenizer.ggml.{name}"], name
    assert other["tokenizer.ggml.add_bos_token"] is True
    # Scores are others, and their order is one
    made = [number for number, (piece, _, kind) in enumerate(PIECES) if kind == 1 and len(piece) > 1]
    orders = [sorted(made, key=lambda number: -data["tokenizer.ggml.scores"][number]) for data in (one, other)]
    assert orders[0] == orders[1]
    back = import_folder(out, tmp_path / "back")
    files = [folder / "tokenizer" / "source" / "tokenizer.json" for folder in (run, back)]
    assert json.loads(files[0].read_text()) == json.loads(files[1].read_text())


def test_merges_that_no_scores_make_are_refused(tmp_path: Path, capsys: Any) -> None:
    run = import_folder(sentencepiece(tmp_path / "m.gguf"), tmp_path / "run")
    path = run / "tokenizer" / "source" / "tokenizer.json"
    table = json.loads(path.read_text())
    merges = table["model"]["merges"]
    changes = {
        "fewer": {"model": {**table["model"], "merges": [pair for pair in merges if "".join(pair) != "llo"]}},
        "apart": {"model": {**table["model"], "merges": [*merges[1:], merges[0], merges[1]]}},
        "spaces": {"pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first"}},
    }
    for name, change in changes.items():
        path.write_text(json.dumps({**table, **change}))
        assert "--no-tokenizer" in refused(capsys, "export", run, "--out", tmp_path / f"{name}.gguf")


# --- what is refused -----------------------------------------------------------------------------------------------


def refused(capsys: Any, *words: object) -> str:
    capsys.readouterr()
    assert main(["weights", *map(str, words)]) == 2
    message = capsys.readouterr().err.strip()
    assert "\n" not in message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"qwen2.attention.sliding_window": 16}, ["qwen2.attention.sliding_window", "16", "--ignore"]),
        ({"qwen2.attention.scale": 0.5}, ["qwen2.attention.scale"]),
        ({"qwen2.rope.scaling.attn_factor": 0.5}, ["qwen2.rope.scaling.attn_factor"]),
        ({"qwen2.rope.scaling.type": "longrope"}, ["rope.scaling.type", "longrope", "yarn"]),
        ({"qwen2.rope.scaling.factor": 2.0}, ["rope.scaling.factor"]),
        ({"qwen2.rope.dimension_count": 4}, ["qwen2.rope.dimension_count = 4", "8"]),
        ({"qwen2.expert_count": 4}, ["qwen2.expert_count"]),
        ({"qwen2.rope.scaling.factor": [2.0, 4.0]}, ["qwen2.rope.scaling.factor = [2.0, 4.0]", "all layers"]),
        ({"general.type": "adapter"}, ["general.type", "adapter"]),
        ({"split.count": 3}, ["one of 3 parts", "llama-gguf-split --merge"]),
        ({"other.key": 3}, ["other.key"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_keys_that_are_not_read_are_named(
    keys: dict[str, Any], facts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "m.gguf", MODELS["qwen2"].model(), "qwen2", keys=keys)
    message = refused(capsys, "import", path, "--out", tmp_path / "run", "--no-tokenizer")
    assert [fact for fact in facts if fact not in message] == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "arch", "keys", "facts"),
    [
        ("phi3, longrope", "phi3", {"phi3.rope.scaling.attn_factor": 1.5}, ["attn_factor = 1.5", "1.32288"]),
        ("qwen3_moe", "qwen3moe", {"qwen3moe.expert_count": 5}, ["it lacks", "experts.4."]),
        ("qwen3_moe", "qwen3moe", {"qwen3moe.expert_weights_scale": 2.5}, ["qwen3moe.expert_weights_scale"]),
    ],
)
def test_keys_of_some_architectures_are_checked(
    name: str, arch: str, keys: dict[str, Any], facts: list[str], tmp_path: Path, capsys: Any
) -> None:
    path = written(tmp_path / "m.gguf", {**FAMILIES, **READ}[name].model(), arch, keys=keys)
    message = refused(capsys, "import", path, "--out", tmp_path / "run", "--no-tokenizer")
    assert [fact for fact in facts if fact not in message] == [], message
    assert not (tmp_path / "run").exists()


def test_a_key_may_be_ignored_and_is_recorded(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", MODELS["qwen2"].model(), "qwen2", keys={"qwen2.note": 3})
    words = ["weights", "import", str(path), "--out", str(tmp_path / "run"), "--no-tokenizer"]
    assert main(words) == 2
    assert main([*words, "--ignore", "qwen2.note"]) == 0
    assert json.loads((tmp_path / "run" / "origin.json").read_text())["ignored"] == {"qwen2.note": 3}


def raw(path: Path, arch: str = "qwen2", kind: Any = None, name: str = "token_embd.weight") -> Path:
    """A file with one tensor of any type."""
    writer = gguf.GGUFWriter(path, arch)
    kind = kind or gguf.GGMLQuantizationType.F32
    values = np.zeros((64, 256), np.float32)
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_types_and_architectures_that_are_not_read_are_named(tmp_path: Path, capsys: Any) -> None:
    for action in (["inspect"], ["import", "--out", tmp_path / "run"]):
        path = raw(tmp_path / "q.gguf", kind=gguf.GGMLQuantizationType.Q4_0)
        message = refused(capsys, action[0], path, *action[1:])
        assert all(fact in message for fact in ("Q4_0", "token_embd.weight", "Q8_0", "llama-quantize"))
        message = refused(capsys, action[0], raw(tmp_path / "f.gguf", "falcon"), *action[1:])
        assert all(fact in message for fact in ("general.architecture", "falcon", "qwen3"))
        message = refused(capsys, action[0], raw(tmp_path / "n.gguf"), *action[1:])
        assert "qwen2.block_count" in message
    path = written(tmp_path / "m.gguf", MODELS["qwen2"].model(), "qwen2")
    assert "--architecture" in refused(
        capsys, "import", path, "--out", tmp_path / "run", "--architecture=mistral", "--no-tokenizer"
    )
    assert "no file" in refused(capsys, "import", tmp_path / "none.gguf", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_header_is_what_the_package_reads(with_tokenizer: Path, tmp_path: Path) -> None:
    run = import_folder(with_tokenizer, tmp_path / "run")
    for path in (sentencepiece(tmp_path / "m.gguf"), export_run(run, tmp_path / "out.gguf")):
        file, reader = GgufFile.open(path), gguf.GGUFReader(path)
        expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert file.metadata.keys() == expected.keys()
        for name, value in file.metadata.items():
            assert value == expected[name] or np.float32(value) == np.float32(expected[name]), name
        assert {name: place.start for name, place in file.places.items()} == {
            tensor.name: int(tensor.data_offset) for tensor in reader.tensors
        }


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.05, 0.3, 0.999])
def test_a_truncated_file_is_one_line(share: float, with_tokenizer: Path, tmp_path: Path, capsys: Any) -> None:
    whole = sentencepiece(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
    message = refused(capsys, "import", tmp_path / "cut.gguf", "--out", tmp_path / "run")
    assert "cut.gguf" in message
    assert "truncated" in message
    assert not (tmp_path / "run").exists()


def test_tokenizers_that_are_not_read_are_named_with_what_to_do(
    with_tokenizer: Path, tmp_path: Path, capsys: Any
) -> None:
    for keys, fact in (
        ({"model": "t5"}, "t5"),
        ({"model": "gpt2", "pre": "jais"}, "jais"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"precompiled_charsmap": "x"}, "precompiled_charsmap"),
    ):
        (tmp_path / "m.gguf").unlink(missing_ok=True)
        path = sentencepiece(tmp_path / "m.gguf", **keys)
        message = refused(capsys, "import", path, "--out", tmp_path / "run")
        assert fact in message
        assert "--tokenizer FOLDER" in message
    assert main(["weights", "import", str(path), "--out", str(tmp_path / "none"), "--no-tokenizer"]) == 0
    words = ["weights", "import", str(path), "--out", str(tmp_path / "run")]
    assert main([*words, "--tokenizer", str(with_tokenizer)]) == 0
    kept = (tmp_path / "run" / "tokenizer" / "source" / "tokenizer.json").read_bytes()
    assert kept == (with_tokenizer / "tokenizer.json").read_bytes()
    assert "no such folder" in refused(capsys, *words[1:-1], tmp_path / "other", "--tokenizer", tmp_path / "nothing")


def test_models_that_gguf_does_not_express_are_refused_by_their_keys(tmp_path: Path, capsys: Any) -> None:
    published = {
        "window": (MODELS["mistral, window"], "window"),
        "dynamic": (MODELS["llama, dynamic"], "rope"),
        "olmo2": (MODELS["olmo2"], "olmo2"),
        "mscale": (Published("Qwen2", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}), "mscale"),
    }
    for name, (model, fact) in published.items():
        model.write(tmp_path / name)
        run = import_folder(tmp_path / name, tmp_path / f"run-{name}", tokenizer=False)
        out = tmp_path / f"{name}.gguf"
        assert fact in refused(capsys, "export", run, "--out", out)
        assert not out.exists()
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name]


def test_tokenizers_that_llama_cpp_lacks_are_refused_or_left_out(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "published"
    Published("Qwen2", {"vocab_size": 330}).write(folder)
    byte_level(folder, "gpt-2")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": {"type": "Lowercase"}}))
    run = import_folder(folder, tmp_path / "run")
    out = tmp_path / "out.gguf"
    message = refused(capsys, "export", run, "--out", out)
    assert "tokenizer" in message
    assert "--no-tokenizer" in message
    assert not out.exists()
    assert main(["weights", "export", str(run), "--out", str(out), "--no-tokenizer"]) == 0
    metadata = GgufFile.open(out).metadata
    assert (metadata["tokenizer.ggml.model"], metadata["qwen2.vocab_size"]) == ("none", 330)
    assert "--no-tokenizer" in refused(capsys, "export", run, "--out", tmp_path / "folder", "--no-tokenizer")


@pytest.mark.parametrize("option", ["--push=a/b", "--adapters", "--shard-size=1", "--verify"])
def test_options_of_a_folder_are_refused_for_a_file(option: str, tmp_path: Path, capsys: Any) -> None:
    assert option.partition("=")[0] in refused(capsys, "export", "run", "--out", tmp_path / "m.gguf", option)


def test_what_is_there_is_not_overwritten(with_tokenizer: Path, tmp_path: Path, capsys: Any) -> None:
    run = import_folder(with_tokenizer, tmp_path / "run")
    (tmp_path / "mine.gguf").write_bytes(b"mine")
    assert "mine.gguf exists already" in refused(capsys, "export", run, "--out", tmp_path / "mine.gguf")
    assert (tmp_path / "mine.gguf").read_bytes() == b"mine"


def test_a_full_disk_is_one_line(with_tokenizer: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    run = import_folder(with_tokenizer, tmp_path / "run")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    assert "No space left" in refused(capsys, "export", run, "--out", tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_file_without_the_package_names_the_extra(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    path = raw(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "forge-plugin-weights[gguf]" in refused(capsys, "inspect", path)


def test_numbers_that_are_not_finite_are_found_in_what_is_computed_too(tmp_path: Path, capsys: Any) -> None:
    model = MODELS["llama, tied"].model()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[3, 4] = float("nan")
    path = written(tmp_path / "m.gguf", model, "llama")
    message = refused(capsys, "import", path, "--out", tmp_path / "run", "--no-tokenizer")
    assert "blk.1.attn_q.weight" in message
    assert not (tmp_path / "run").exists()
