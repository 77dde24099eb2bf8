"""What lies beside a published model that sees images goes along: processor, template, the token of an image."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import tomli_w
import transformers
from published_vision import PATCH, SIDE, Seeing, clip, llava, text
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from forge_core.cli import main
from forge_plugin_weights.importing import import_folder, read_json
from forge_testing.refusals import lacks

SIDES = {"height": PATCH * SIDE, "width": PATCH * SIDE}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
FILES = ("preprocessor_config.json", "processor_config.json")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A folder with a model, a tokenizer that has `<image>`, and the files of a processor, in their old places."""
    folder = tmp_path / "published"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=letters, special_tokens=["</s>"]))
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    size = len(tokenizer.get_vocab())
    image = tokenizer.token_to_id("<image>")
    Seeing(
        "LlavaForConditionalGeneration", lambda: llava(text("Llama", vocab_size=size), clip(), image_token_index=image)
    ).write(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    settings = {"size": {"shortest_edge": PATCH * SIDE}, "crop_size": SIDES, "do_center_crop": True}
    transformers.CLIPImageProcessorPil(**settings).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_token": "<image>", "patch_size": PATCH}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def test_they_are_there_again_after_training(tmp_path, published):
    run = import_folder(published, tmp_path / "run")
    assert all((run / "tokenizer" / name).is_file() for name in FILES)
    table = tomllib.loads((run / "start.toml").read_text()) | {
        "job": {"name": "tuned", "output": str(tmp_path)},
        "train": {"steps": 1, "global_batch_size": 2, "seq_len": 40},
        "optimizer": {"type": "adamw"},
    }
    table["data"]["sources"] = [{"type": "forge_testing.vision:RandomImages"}]
    job = tmp_path / "job.toml"
    job.write_text(tomli_w.dumps(table))
    assert main([str(job)]) == 0
    for name in ("run", "tuned"):
        out = tmp_path / f"out-{name}"
        assert main(["weights", "export", str(tmp_path / name), "--out", str(out)]) == 0
        for file in FILES:
            assert read_json(out / file) == read_json(published / file)
        config = read_json(out / "config.json")
        assert config["image_token_index"] == read_json(published / "config.json")["image_token_index"]
        assert transformers.AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE


def test_a_prompt_with_an_image_is_continued(tmp_path, published, capsys):
    from PIL import Image

    run = import_folder(published, tmp_path / "run")
    Image.new("RGB", (30, 20), (200, 10, 10)).save(tmp_path / "red.png")
    capsys.readouterr()
    prompt = ["--image", str(tmp_path / "red.png"), "--prompt", "<image>What?", "--max-tokens", "3"]
    assert main(["generate", str(run), *prompt]) == 0
    assert capsys.readouterr().out


def test_an_export_without_a_token_for_images_says_so(tmp_path, published, caplog):
    run = import_folder(published, tmp_path / "run", tokenizer=False)
    origin = read_json(run / "origin.json")
    config = {key: value for key, value in origin["config"].items() if key != "image_token_index"}
    (run / "origin.json").write_text(json.dumps({**origin, "config": config}))
    assert main(["weights", "export", str(run), "--out", str(tmp_path / "out")]) == 0
    assert not lacks(caplog.text, "image_token_index", "<image>")
