"""Whatever is wrong with a published model is named, with exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from published_models import MODELS
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from forge_core import Trainer, load_job
from forge_core.checkpoint.resume import locate
from forge_core.cli import main
from forge_core.contracts.errors import CheckpointError, ForgeError, JobError
from forge_core.contracts.runtime import SpreadStorage
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights import exporting
from forge_plugin_weights.files import Boxes, Place, places_in, plan_files
from forge_plugin_weights.importing import added_tokens, import_folder, read_folder, renamed
from forge_plugin_weights.kinds import Filler
from forge_plugin_weights.matching import match_names
from forge_plugin_weights.reading import Piece, Reader
from forge_plugin_weights.tables import architecture_of, load_architecture
from forge_plugin_weights.verifying import text_batch
from forge_testing.refusals import lacks, naming, refuses


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    MODELS["llama, tied"].write(folder)
    return folder


def tensor_file(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def change(path: Path, **keys: object) -> None:
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def rewritten(path: Path, function) -> None:
    tensors = load_file(path)
    function(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


NORM = "model.norm.weight"


def truncate(folder: Path) -> None:
    path = tensor_file(folder, NORM)
    path.write_bytes(path.read_bytes()[:-4])


def rename_a_file(folder: Path) -> None:
    path = tensor_file(folder, NORM)
    path.rename(path.with_name("other.safetensors"))


def exchange_two_files(folder: Path) -> None:
    first, second = tensor_file(folder, NORM), tensor_file(folder, "model.layers.0.mlp.up_proj.weight")
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def rename_a_tensor(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    path = next(path for path in folder.glob("*.safetensors") if NORM in load_file(path))
    rewritten(path, lambda tensors: tensors.update({"model.nrom.weight": tensors.pop(NORM)}))


def other_config(folder: Path) -> None:
    change(folder / "config.json", hidden_size=64)


def other_head(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    path = next(path for path in folder.glob("*.safetensors") if NORM in load_file(path))
    rewritten(path, lambda tensors: tensors.update({"lm_head.weight": torch.randn(64, 32)}))


def untied_without_head(folder: Path) -> None:
    change(folder / "config.json", tie_word_embeddings=False)


def unknown_key(folder: Path) -> None:
    change(folder / "config.json", attention_chunk_size=8)


def unknown_model(folder: Path) -> None:
    change(folder / "config.json", model_type="llamma")


def two_ropes(folder: Path) -> None:
    change(folder / "config.json", rope_theta=5.0)


def no_header(folder: Path) -> None:
    tensor_file(folder, NORM).write_bytes(b"\0" * 100)


def pickles(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").touch()


def in_dtype(folder: Path, dtype: torch.dtype) -> None:
    rewritten(tensor_file(folder, NORM), lambda tensors: tensors.update({NORM: tensors[NORM].to(dtype)}))


def integers(folder: Path) -> None:
    in_dtype(folder, torch.int8)


def float8_without_scales(folder: Path) -> None:
    in_dtype(folder, torch.float8_e4m3fn)


def not_a_number(folder: Path) -> None:
    rewritten(tensor_file(folder, NORM), lambda tensors: tensors[NORM][3].fill_(float("nan")))


FAULTS = {
    integers: [NORM, "int8"],
    float8_without_scales: [NORM, "float8_e4m3fn"],
    not_a_number: [NORM, "NaN"],
    truncate: ["truncated or damaged"],
    rename_a_file: ["No such file"],
    exchange_two_files: ["model.safetensors.index.json", "model.layers.0.input_layernorm.weight"],
    rename_a_tensor: [NORM, "model.nrom.weight"],
    other_config: ["model.embed_tokens.weight", "[64, 32]", "[64, 64]"],
    other_head: ["lm_head.weight", "model.embed_tokens.weight", "config.json"],
    untied_without_head: ["lacks lm_head.weight"],
    unknown_key: ["attention_chunk_size", 8],
    unknown_model: ["model_type", "'llamma'", "clip_vision_model, cohere"],
    two_ropes: ["disagree"],
    no_header: ["no safetensors file"],
    pickles: ["pytorch_model.bin", "pickle"],
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named_and_nothing_is_left(published, tmp_path, capsys, fault):
    fault(published)
    assert main(["weights", "import", str(published), "--out", str(tmp_path / "run"), "--no-tokenizer"]) == 2
    assert not lacks(capsys.readouterr().err, *FAULTS[fault])
    assert {path.name for path in tmp_path.iterdir()} == {"published"}


INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"
EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
BYTES = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


def raw(header: object, content: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def mapped(**files: object) -> bytes:
    return json.dumps({"weight_map": files}).encode()


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        ({ONE: raw({"x": BYTES | {"dtype": "F4"}}, b"..")}, [ONE, "'F4'", "BF16"]),
        ({ONE: raw({"x": BYTES | {"dtype": "F32"}}, b"..")}, [ONE, "2 bytes", "[2]", "F32"]),
        ({ONE: raw({"x": BYTES | {"shape": [1]}}, b"..")}, [ONE, "2 bytes", "[1]"]),
        ({ONE: raw({"x": 3})}, [ONE, "TypeError"]),
        ({ONE: raw({"x": {}})}, [ONE, "KeyError", "data_offsets"]),
        ({ONE: raw([])}, [ONE, "AttributeError"]),
        ({ONE: raw(b"{x}")}, [ONE, "JSONDecodeError"]),
        ({ONE: raw(b"0")}, [ONE, "1 bytes"]),
        ({ONE: raw(b"{}")[:-1]}, [ONE, "2 bytes"]),
        ({ONE: raw({"x": BYTES, "y": BYTES}, b"..")}, [ONE, "y", "byte 128", "byte 130"]),
        ({ONE: raw({"x": BYTES | {"data_offsets": [1, 3]}}, b"...")}, [ONE, "x", "byte 69", "byte 68"]),
        ({ONE: raw({"x": BYTES}, b".")}, [ONE, 69, 70]),
        ({ONE: raw({"x": BYTES}, b"...")}, [ONE, 71, 70]),
        ({"a.safetensors": raw({"x": EMPTY}), "b.safetensors": raw({"x": EMPTY})}, ["a.safetensors", "b.safetensors"]),
        ({INDEX: b"{"}, [INDEX, "JSONDecodeError"]),
        ({INDEX: b"\xff"}, [INDEX, "UnicodeDecodeError"]),
        ({INDEX: b"{}"}, [INDEX, "weight_map"]),
        ({INDEX: b'{"weight_map": 1}'}, [INDEX, "TypeError"]),
        ({INDEX: mapped(x="../other.safetensors")}, [INDEX, "'../other.safetensors'"]),
        ({INDEX: mapped(x="..")}, [INDEX, "'..'"]),
        ({INDEX: mapped(x="parts/other.safetensors")}, [INDEX, "'parts/other.safetensors'"]),
        ({INDEX: mapped(x=1)}, [INDEX, 1]),
        ({INDEX: mapped(x=ONE, y=ONE), ONE: raw({"x": EMPTY})}, [INDEX, ONE, "y"]),
    ],
)
def test_a_file_that_is_not_of_the_format_is_named(tmp_path, files, facts):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(JobError) as caught:
        places_in(tmp_path)
    assert not lacks(str(caught.value), tmp_path, *facts)


def test_a_file_is_of_the_format_up_to_its_last_byte(tmp_path):
    (tmp_path / ONE).write_bytes(raw({"x": BYTES, "y": BYTES | {"data_offsets": [2, 4]}}, b"abcd"))
    assert [place.read().tolist() for place in places_in(tmp_path).values()] == [[97, 98], [99, 100]]
    (tmp_path / ONE).write_bytes(raw(b"{}"))
    assert places_in(tmp_path) == {}


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    path = tmp_path / ONE
    path.write_bytes(raw({"x": BYTES}, b".."))
    [place] = places_in(tmp_path).values()
    path.write_bytes(raw({"x": BYTES}, b"."))
    with pytest.raises(JobError, match=naming(path)):
        place.read()
    with Reader() as reader, pytest.raises(CheckpointError, match=naming(path)):
        reader.submit(path, [Piece(place.start, place.size)]).result()


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("config.json", None, ["No such file"]),
        ("config.json", b"{", ["JSON"]),
        ("config.json", b"\xff", ["JSON"]),
        ("config.json", b"[]", ["object"]),
        ("preprocessor_config.json", b"{", ["line 1"]),
        ("preprocessor_config.json", b"\xff", ["utf-8"]),
        ("preprocessor_config.json", b"[1]", ["object"]),
        ("processor_config.json", b"[1]", ["object"]),
    ],
)
def test_a_configuration_that_is_no_object_in_json_is_named(tmp_path, name, content, facts):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(JobError) as caught:
        read_folder(tmp_path)
    assert not lacks(str(caught.value), tmp_path / name, *facts)


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ["llama"]}])
def test_a_configuration_without_a_type_needs_one_by_the_option(config):
    with refuses("model_type", "--architecture"):
        architecture_of(config, Catalog.installed())


def test_longest_sequences_that_are_no_number_are_refused(published, tmp_path):
    change(published / "config.json", max_position_embeddings="128")
    with refuses("train.seq_len", "'128'"):
        import_folder(published, tmp_path / "run", tokenizer=False)


def test_two_names_of_one_tensor_are_named(tmp_path):
    with pytest.raises(JobError, match=naming(tmp_path, "model.norm", "norm")):
        renamed(dict.fromkeys(["model.norm", "norm"]), {r"^model\.": ""}, tmp_path)


def test_tensors_that_no_rule_has_are_listed_up_to_five():
    llama = load_architecture("llama", Catalog.installed())
    for count, shown in ((5, "extra.4"), (6, "and 1 more")):
        with pytest.raises(JobError, match=naming("LlamaForCausalLM", "extra.0", shown)) as caught:
            match_names(llama, {"tie_embeddings": True}, {f"extra.{number}": (2,) for number in range(count)})
        assert ("more" in str(caught.value)) == (count > 5)


@pytest.mark.parametrize("action", [["export", "--out", "out"], ["verify", "."]])
def test_a_folder_without_checkpoints_is_named(tmp_path, monkeypatch, capsys, action):
    monkeypatch.chdir(tmp_path)
    assert main(["weights", *action, str(tmp_path / "nothing")]) == 2
    assert not lacks(capsys.readouterr().err, "checkpoint")


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_prompts_that_cannot_be_read_are_named(tmp_path, content):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobError, match=naming(path)):
        text_batch(path, [])


def test_a_full_disk_is_named():
    full = Place(Path("/dev/full"), 0, torch.uint8, (2,))
    with pytest.raises(ForgeError, match=naming("/dev/full", "No space left on device")):
        Boxes({"x": full}, writable=True).fill(Filler("x", (2,), 0.0))


@pytest.mark.parametrize("words", [("import", "published", "--no-tokenizer", "--copy"), ("export", "run")])
def test_a_file_that_the_system_refuses_is_one_line(published, tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    import_folder(Path("published"), Path("run"), tokenizer=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # as a full disk, but for this process alone
    try:
        code = main(["weights", *words, "--out", "out"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert not lacks(error, "--out out cannot be made", "File too large")
    assert {path.name for path in tmp_path.iterdir()} == {"published", "run"}


@pytest.mark.parametrize("size", ["0", "-1", "1e-10", "nan", "inf", "x"])
def test_a_size_of_files_is_above_zero_and_finite(capsys, size):
    with pytest.raises(SystemExit, match="2"):
        main(["weights", "export", "run", "--out", "out", f"--shard-size={size}"])
    assert not lacks(capsys.readouterr().err, "--shard-size", size)


def test_a_run_that_is_damaged_or_changes_during_the_export_is_named(published, tmp_path, monkeypatch, capsys):
    run = import_folder(published, tmp_path / "run", tokenizer=False, copy=True)
    path = next((run / "checkpoints/step-0").glob("*.safetensors"))
    settings = run / "tokenizer/generation_config.json"
    settings.parent.mkdir()
    settings.write_text("{")
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "out")]) == 2
    assert not lacks(capsys.readouterr().err, settings, "JSON")
    settings.unlink()

    class Away:
        def size(self, step, name):
            return (path.parent / name).stat().st_size

        def fetch(self, step, names):
            if path.name in names:  # the index is there
                raise CheckpointError(f"step {step}: no bucket")

    with monkeypatch.context() as patch:
        patch.setitem(SpreadStorage.opened, path.parent.absolute(), (Away(), 3))
        assert main(["weights", "export", str(run), "--out", str(tmp_path / "out")]) == 2
        assert not lacks(capsys.readouterr().err, "step 3: no bucket")

    def shrink(*arguments):
        path.write_bytes(path.read_bytes()[:-1])
        return plan_files(*arguments)

    monkeypatch.setattr(exporting, "plan_files", shrink)
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "out")]) == 2
    assert not lacks(capsys.readouterr().err, path, "truncated")
    assert {path.name for path in tmp_path.iterdir()} == {"published", "run"}


def test_nan_is_found_while_files_are_copied_too(published, tmp_path, capsys):
    not_a_number(published)
    words = ["import", str(published), "--out", str(tmp_path / "run"), "--no-tokenizer", "--copy"]
    assert main(["weights", *words]) == 2
    assert not lacks(capsys.readouterr().err, NORM, "NaN")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [("inspect",), ("import", "--out", "run")], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("source", "facts"),
    [
        ("HuggingFaceTB/SmolLM2-135M", ["no folder HuggingFaceTB/SmolLM2-135M", "HF_HUB_OFFLINE"]),
        ("m.gguf", ["m.gguf", "GGUF"]),
        ("quantised", ["quantised/m.gguf", "GGUF"]),
        ("published/model-00001-of-00002.safetensors", ["is a file", "published"]),
        ("nothing", ["no folder", "nothing"]),
    ],
)
def test_what_is_no_folder_of_a_model_is_answered_by_what_to_give(
    published, tmp_path, monkeypatch, capsys, source, facts, command
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for path in (Path("m.gguf"), Path("quantised/m.gguf"), Path("published/model-00001-of-00002.safetensors")):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert main(["weights", command[0], source, *command[1:]]) == 2
    assert not lacks(capsys.readouterr().err, *facts)
    assert not Path("run").exists()


def test_a_name_that_no_run_may_have_is_of_the_option(published, tmp_path, capsys):
    words = ["weights", "import", str(published), "--no-tokenizer", "--out", str(tmp_path / "my model")]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("--out ")


def test_a_vocabulary_of_words_is_imported_and_refused_for_training(published, tmp_path, capsys):
    words = {"</s>": 0, "a": 1, "b": 2, "?": 3}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="?").save_pretrained(published)
    with pytest.warns(UserWarning, match=naming("'</s>'")):
        run = import_folder(published, tmp_path / "run")
    (tmp_path / "text.txt").write_text("a b ? </s> a\n" * 50)
    rest = {
        "train": {"steps": 1, "global_batch_size": 1, "seq_len": 8},
        "data": {"sources": [{"type": "text", "path": str(tmp_path / "text.txt")}]},
        "optimizer": {"type": "forge_testing:TinyAdamW"},
        "job": {"output": str(tmp_path / "runs")},
    }
    with pytest.raises(JobError, match='spelled_tokens to "warn"'):
        Trainer(load_job(run / "start.toml", rest), echo=lambda text: None).run()


def test_a_folder_without_a_tokenizer_is_named(published, tmp_path, capsys):
    assert main(["weights", "import", str(published), "--out", str(tmp_path / "run")]) == 2
    assert not lacks(capsys.readouterr().err, "tokenizer_config.json")
    assert not (tmp_path / "run").exists()


def test_a_bit_that_flips_after_the_import_is_found(published, tmp_path, capsys):
    run = import_folder(published, tmp_path / "run", tokenizer=False, copy=True)
    path = next((run / "checkpoints/step-0").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=naming(path, "SHA-256")):
        locate(run, "full")
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "out")]) == 2
    assert not lacks(capsys.readouterr().err, path, "SHA-256")
    assert {path.name for path in tmp_path.iterdir()} == {"published", "run"}


def test_a_folder_that_exists_is_not_overwritten(published, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert main(["weights", "import", str(published), "--out", str(tmp_path / "run"), "--no-tokenizer"]) == 2
    assert "exists already" in capsys.readouterr().err
    run = import_folder(published, tmp_path / "other", tokenizer=False)
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "run")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_sentence(published, tmp_path, capsys):
    run = import_folder(published, tmp_path / "run", tokenizer=False)
    for line in (["import", str(published), "--no-tokenizer"], ["export", str(run)]):
        assert main(["weights", *line, "--out", "/proc/out"]) == 2  # no user may make a folder there
        error = capsys.readouterr().err
        assert not lacks(error, "--out /proc/out")
        assert error.count("\n") == 1


def test_another_file_system_needs_a_copy(published, tmp_path, monkeypatch, capsys):
    import errno
    import os

    def refuse(*_args):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert main(["weights", "import", str(published), "--out", str(tmp_path / "run"), "--no-tokenizer"]) == 2
    assert not lacks(capsys.readouterr().err, "--copy")
    assert not (tmp_path / "run").exists()


JOB = """
[train]
steps = 1
global_batch_size = 2
seq_len = 8
[model]
type = "transformer"
dim = 32
layers = 2
vocab_size = 64
attention.heads = 4
{keys}
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "adamw"
"""


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ('ffn = { type = "moe", experts = 4, router.type = "hash" }', ["ffn.router.type = 'forge-plugin-moe/hash'"]),
        ('norm.type = "layernorm"', ["norm.type = 'forge-plugin-transformer/layernorm'"]),
        ("mtp.depth = 1", ["model.mtp.depth", 1, "LlamaForCausalLM"]),
    ],
)
def test_a_model_without_a_published_form_is_refused_by_its_keys(tmp_path, monkeypatch, capsys, keys, facts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB.format(keys=keys))
    assert main(["run", "job.toml"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["weights", "export", "runs/run", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert not lacks(error, "deepseek_v3", "llama", *facts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tokens", [None, 3, [None], [{"content": "<s>"}], ["<s>"]])
def test_added_tokens_of_another_form_are_refused_by_the_file(tmp_path: Path, tokens: object) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"added_tokens": tokens}))
    with pytest.raises(JobError, match=naming(str(path), "added_tokens")):
        added_tokens(tmp_path)
