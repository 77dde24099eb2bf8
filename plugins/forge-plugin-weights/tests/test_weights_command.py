"""The command as a user calls it, with a tokenizer, and a job of `configs/` that goes on from there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from published_models import MODELS, SIZES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from forge_core import load_model
from forge_core.cli import main
from forge_testing.refusals import lacks

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer of bytes, which begins texts with a token."""
    folder = tmp_path_factory.mktemp("weights") / "published"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|end_of_turn|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=letters, special_tokens=special))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template="{{ messages[0]['content'] }}"
    ).save_pretrained(folder)
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": tokenizer.get_vocab_size()})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1, 2]}))
    return folder


def test_a_published_model_is_trained_further_and_taken_out(published, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["weights", "import", str(published), "--out", "runs/theirs"]) == 0
    assert "forge-run runs/theirs/start.toml JOB.toml" in capsys.readouterr().out
    job = ["runs/theirs/start.toml", str(ROOT / "configs/continue-smollm2.toml")]
    small = ["--train.steps=2", "--train.seq_len=64", "--train.global_batch_size=2", "--train.precision=fp32"]
    data = ["--data.sources.0.type=text", f"--data.sources.0.path={ROOT}/forge_core/data/*.py", "--eval.at_start=false"]
    assert main(["run", *job, *small, *data, "--scheduler.warmup_steps=1"]) == 0, capsys.readouterr().err
    assert main(["generate", "runs/smollm2-python", "--prompt", "import", "--max-tokens=2"]) == 0
    capsys.readouterr()
    export = ["weights", "export", "runs/smollm2-python", "--out", "out", "--dtype=bfloat16"]
    assert main(export) == 0
    assert "out/config.json\n" in capsys.readouterr().out

    model, loading = transformers.AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(loading.values())
    assert str(model.dtype) == "torch.bfloat16"
    config = json.loads(Path("out/config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 64, "of the training"
    assert json.loads(Path("out/generation_config.json").read_text())["eos_token_id"] == [1, 2]
    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (published, "out"))
    assert after("def go(): é")["input_ids"] == before("def go(): é")["input_ids"]
    assert after.chat_template == before.chat_template
    record = json.loads(Path("out/forge/provenance.json").read_text())
    assert record["step"] == 2
    assert 'name = "smollm2-python"' in Path("out/forge/job.toml").read_text()

    assert main(export) == 2
    assert not lacks(capsys.readouterr().err, "out", "exists")

    [manifest] = Path("runs/smollm2-python/checkpoints").glob("*/manifest.json")
    text = manifest.read_text().replace("forge-plugin-adamw/adamw", "forge-plugin-nowhere/nobody")
    manifest.write_text(text.replace("forge-plugin-text/text", "forge-plugin-nowhere/pages"))
    assert main(["weights", "export", "runs/smollm2-python", "--out", "again"]) == 0
    card = Path("again/README.md").read_text()
    assert "`forge-plugin-nowhere/nobody`, learning rate" in card, "parts of the training need not be installed"
    assert "`forge-plugin-nowhere/pages`" in card


def test_an_imported_model_has_the_logits_of_the_published_one_in_python(published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["weights", "import", str(published), "--out", "runs/theirs"]) == 0
    model = load_model("runs/theirs", device="cpu")
    ids = torch.tensor([model.tokenizer.encode("import os"), model.tokenizer.encode("return it"[:9])])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
    assert model.step == 0


def test_an_import_comes_out_as_it_was(published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["weights", "import", str(published), "--out", "runs/theirs"]) == 0
    assert main(["weights", "export", "runs/theirs", "--out", "out"]) == 0
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (published, Path("out")))
    assert after["max_position_embeddings"] == before["max_position_embeddings"]
    assert (after["bos_token_id"], after["eos_token_id"]) == (before["bos_token_id"], before["eos_token_id"])
    origin = json.loads(Path("out/forge/origin.json").read_text())
    assert origin["model_type"] == "llama"
    assert set(origin["files"]) == {path.name for path in published.glob("*.safetensors")}


def test_models_are_compared_on_texts(published, tmp_path, capsys):
    run, prompts = tmp_path / "run", tmp_path / "prompts.txt"
    assert main(["weights", "import", str(published), "--out", str(run)]) == 0
    prompts.write_text("def go():\n\nimport torch, a longer line\n")
    capsys.readouterr()
    for sides in ([published, run], [run, published]):
        assert main(["weights", "verify", *map(str, sides), "--prompts", str(prompts)]) == 0
        positions = len("def go():") + len("import torch, a longer line")  # a token is a byte
        assert not lacks(capsys.readouterr().out, "100.0%", f"{positions} positions")
    prompts.write_text("\n")
    assert main(["weights", "verify", str(published), str(run), "--prompts", str(prompts)]) == 2
    assert not lacks(capsys.readouterr().err, "text", prompts)
    prompts.write_text("text")
    MODELS["qwen2"].write(tmp_path / "other")
    assert main(["weights", "verify", *[str(tmp_path / "other")] * 2, "--prompts", str(prompts)]) == 2
    assert not lacks(capsys.readouterr().err, "tokenizer")


def test_a_configuration_is_shown_key_by_key(tmp_path, capsys):
    MODELS["qwen3_moe"].write(tmp_path)
    assert main(["weights", "inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "model.dim = 32" in out
    assert "NOT" not in out
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [1], "novelty": 3}))
    assert main(["weights", "inspect", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert not lacks(out, "NOT SUPPORTED: mlp_only_layers = [1]", "decoder_sparse_step")
    assert any("novelty" in line and "NOT KNOWN" in line for line in out.splitlines())
    assert main(["weights", "inspect", str(tmp_path), "--json"]) == 2
    facts = json.loads(capsys.readouterr().out)
    assert facts["supported"] is False
    [novelty] = [row for row in facts["keys"] if row["key"] == "novelty"]
    assert (novelty["value"], "NOT KNOWN" in novelty["in_forge"]) == ("3", True)


def test_a_key_without_meaning_is_ignored_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    MODELS["llama"].write(Path("published"))
    config = json.loads(Path("published/config.json").read_text())
    config |= {"internal_version": "7b-alpha", "deeper": {"note": 1}}
    Path("published/config.json").write_text(json.dumps(config))
    words = ["weights", "import", "published", "--no-tokenizer", "--out", "run"]
    assert main(words) == 2
    assert not lacks(capsys.readouterr().err, "internal_version: '7b-alpha'", "deeper", "--ignore KEY")
    assert main([*words, "--ignore", "internal_verson", "--ignore=deeper"]) == 2
    assert not lacks(capsys.readouterr().err, "--ignore internal_verson", "did you mean internal_version?")
    assert main([*words, "--ignore=internal_version", "--ignore=hidden_size"]) == 2
    assert not lacks(capsys.readouterr().err, "--ignore hidden_size", "model.dim = 32")
    assert main([*words, "--ignore=internal_version"]) == 2
    assert "deeper" in capsys.readouterr().err
    assert not Path("run").exists()
    both = ["--ignore=internal_version", "--ignore", "deeper"]
    assert main(["weights", "inspect", "published", *both]) == 0
    assert "ignored" in capsys.readouterr().out
    assert main([*words, *both]) == 0
    assert "note: internal_version = '7b-alpha' of config.json is ignored" in capsys.readouterr().out
    ignored = {"internal_version": "7b-alpha", "deeper": {"note": 1}}
    assert json.loads(Path("run/origin.json").read_text())["ignored"] == ignored
    assert main(["weights", "verify", "published", "run", *both]) == 0
    assert main(["weights", "verify", "published", "run", *both, "--ignore=other"]) == 2
    assert main(["weights", "export", "run", "--out", "out"]) == 0
    assert not json.loads(Path("out/config.json").read_text()).keys() & ignored.keys()


def test_json_of_an_import_and_an_export_has_what_their_folders_have(published, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["weights", "import", str(published), "--out", "runs/theirs", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["run"], facts["start"], facts["notes"]) == ("runs/theirs", "runs/theirs/start.toml", [])
    origin = json.loads(Path("runs/theirs/origin.json").read_text())
    for name in ("model_type", "files", "digests", "left_out", "ignored"):
        assert facts[name] == origin[name]
    assert main(["weights", "export", "runs/theirs", "--out", "out", "--dtype=float16", "--verify", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["out"] == "out"
    assert facts["files"] == sorted(path.name for path in Path("out").iterdir())
    assert facts["parity"] == json.loads(Path("out/forge/parity.json").read_text())
    assert facts["parity"]["computed"]["logits"] > 0, "rounded"


MORE = """
[job]
name = "more"
[train]
steps = 1
global_batch_size = 2
seq_len = 8
precision = "fp32"
[hooks.export]
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "forge_testing:TinyAdamW"
"""


def test_an_architecture_of_a_stranger_comes_from_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    MODELS["llama, tied"].write(Path("published"))
    readme = (ROOT / "plugins/forge-plugin-weights/README.md").read_text()
    Path("mine.py").write_text(readme.split("```python\n# mine.py\n")[1].split("```")[0])
    config = json.loads(Path("published/config.json").read_text())
    config |= {"model_type": "mine", "norm_epsilon": config.pop("rms_norm_eps"), "tie_word_embeddings": False}
    for key in ("attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(key, None)
    Path("published/config.json").write_text(json.dumps(config))
    arguments = ["published", "--out", "runs/mine", "--no-tokenizer"]
    assert main(["weights", "import", *arguments]) == 2
    assert not lacks(capsys.readouterr().err, "model_type", "'mine'")
    mine = ["--architecture", "./mine.py:Mine"]
    assert main(["weights", "import", *arguments, *mine]) == 2
    assert not lacks(capsys.readouterr().err, "lm_head.weight"), "it is tied in the files"
    config["tie_word_embeddings"] = True
    Path("published/config.json").write_text(json.dumps(config))
    assert main(["weights", "import", *arguments, *mine]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the class is remembered with its whole path
    (tmp_path / "job.toml").write_text(MORE)
    assert main(["run", str(tmp_path / "runs/mine/start.toml"), str(tmp_path / "job.toml")]) == 0
    assert main(["weights", "export", "runs/more", "--out", "tuned", "--architecture", "../mine.py:Mine"]) == 0
    for number, run in enumerate((tmp_path / "runs/mine", "runs/more", "runs/more/exports/step-1", "tuned")):
        if "exports" in (out := str(run)) or run == "tuned":
            written = json.loads(Path(out, "config.json").read_text())
        else:
            assert main(["weights", "export", str(run), "--out", f"out-{number}"]) == 0
            written = json.loads(Path(f"out-{number}/config.json").read_text())
        assert written["model_type"] == "mine"
        assert written["architectures"] == ["MineForCausalLM"]
        assert written["norm_epsilon"] == 1e-6
    capsys.readouterr()
    # A run that began with random weights does not say which type it is of.
    Path("scratch.toml").write_text((tmp_path / "runs/mine/start.toml").read_text().partition("[checkpoint")[0])
    assert (
        main(["run", "scratch.toml", str(tmp_path / "job.toml"), "--job.name=scratch", "--hooks.export.every=0"]) == 0
    )
    export = ["weights", "export", "runs/scratch", "--out", "scratch", "--architecture", "../mine.py:Mine"]
    assert main(export) == 2
    assert not lacks(capsys.readouterr().err, "../mine.py:Mine", "model_type", "class variable")
    source = (tmp_path / "mine.py").read_text()
    named = source.replace('    name = "Mine', '    model_type = "mine2"\n    name = "Mine')
    Path("named.py").write_text(named)
    assert main([*export[:-1], "./named.py:Mine"]) == 0
    assert json.loads(Path("scratch/config.json").read_text())["model_type"] == "mine2"
