"""Idefics3 and SmolVLM split images, with texts between: ids, pixels and logits are those of their processors."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
import transformers
from attrs import evolve, frozen
from PIL import Image
from published_models import ours
from published_vision import PATCH, SIDE, Seeing, shuffled, text
from test_published_vision import logits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from forge_core.cli import main
from forge_core.config.load import parse_job
from forge_core.engine.build import build_context, build_datasets, build_tokenizer
from forge_core.plugins.catalog import Catalog
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_vision import GRIDS, IMAGE, PATCHES
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder

TILE, LONGEST = PATCH * SIDE, 3 * PATCH * SIDE
FAKE = "<fake_token_around_image>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% generation %}<end_of_utterance>{% endgeneration %}{% endfor %}"
)
"""Learns the end of an answer, as all that `transformers` has no mask for."""


@frozen
class Published:
    folder: Path
    model: Any
    processor: Any


def tokenizer_with(rows: bool) -> Any:
    """A tokenizer that joins two newlines, and knows the texts of tiles as tokens if told."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=letters, special_tokens=["</s>"], vocab_size=280)
    tokenizer.train_from_iterator(["a\n\nb\n\n"] * 9, trainer)
    tags = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)] + ["<global-img>"]
    special = [FAKE, "<image>", "<end_of_utterance>", *(tags if rows else [])]
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    assert len(tokenizer.encode("\n\n").ids) == 1  # so that what ends a row and what begins the next are one token
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


def published(folder: Path, name: str, *, rows: bool) -> Published:
    """Write a random model with its processor."""
    tokenizer = tokenizer_with(rows)
    image = tokenizer.convert_tokens_to_ids("<image>")
    seeing = Seeing(
        f"{name}ForConditionalGeneration",
        lambda: shuffled(
            name, text("Llama", vocab_size=len(tokenizer), max_position_embeddings=512), image_token_id=image
        ),
    )
    model = seeing.write(folder)
    pixels = getattr(transformers, f"{name}ImageProcessorPil")(
        max_image_size={"longest_edge": TILE}, size={"longest_edge": LONGEST}
    )
    processor = transformers.Idefics3Processor(pixels, tokenizer, image_seq_len=SIDE**2 // 4, chat_template=TEMPLATE)
    processor.save_pretrained(folder)
    return Published(folder, model, processor)


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8))


SIZES = [(37, 61), (70, 20), (100, 7)]
QUESTION, ANSWER = "What is\n<image> this?", {"role": "assistant", "content": "Noise"}
PARTS = [{"type": "text", "text": "What is\n"}, {"type": "image"}, {"type": "text", "text": " this?"}]
CHAT = [{"role": "user", "content": PARTS}, ANSWER]


def keys_of(start: str) -> dict[str, Any]:
    """The table of a source that the comments of a `start.toml` say."""
    said = {
        line.split("[data.sources.")[-1].split("]")[0] if "below it" in line else "": line.split(" with ", 1)[-1]
        for line in start.splitlines()
        if "Images are as" in line or "below it" in line
    }
    plain = said.pop("").split("[[data.sources]]: ")[-1]
    table = tomllib.loads(plain)
    return table | {name: tomllib.loads(f"x = {{{settings}}}")["x"] for name, settings in said.items()}


@pytest.mark.parametrize(("name", "rows"), [("Idefics3", False), ("SmolVLM", True)])
@torch.no_grad()
def test_chats_prompts_and_logits_are_those_of_the_published_processor(tmp_path, name, rows):
    theirs = published(tmp_path / "published", name, rows=rows)
    run = import_folder(theirs.folder, tmp_path / "run")
    start, catalog = (run / "start.toml").read_text(), Catalog.installed()
    assert 'image_token = "<image>"' in start
    lines = []
    for number, size in enumerate(SIZES):
        photo(*size).save(tmp_path / f"{number}.png")
        messages = [{"role": "user", "content": QUESTION}, ANSWER]
        lines.append(json.dumps({"messages": messages, "images": [f"{number}.png"]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    source = {"type": "image_chat", "path": str(tmp_path / "chats.jsonl"), "image_token": "<image>", **keys_of(start)}
    tables = tomllib.loads(start)
    tables["data"]["sources"] = [source]
    tables |= {"job": {"name": "tuned", "output": str(tmp_path)}, "optimizer": {"type": "adamw"}}
    tables["train"] = {"steps": 1, "global_batch_size": 2, "seq_len": 256}
    job = parse_job(tomli_w.dumps(tables), "job.toml", catalog)
    context = build_context(job, catalog, None)
    [dataset] = build_datasets(job, evolve(context, tokenizer=build_tokenizer(job, context)))
    tokenizer: Any = build_tokenizer(job, context)
    model = ours(run)
    for number, size in enumerate(SIZES):
        chat = theirs.processor.apply_chat_template(CHAT, tokenize=False)
        made = theirs.processor(images=[photo(*size)], text=chat, return_tensors="pt")
        expected, row = made["input_ids"][0], dataset[number]
        image = theirs.processor.image_token_id
        ids = torch.from_numpy(row["input_ids"])[: len(expected)]
        assert torch.equal(ids, expected.where(expected != image, IMAGE))
        used = int(row[GRIDS].prod(-1).sum())
        assert used == SIDE**2 * made["pixel_values"].shape[1]
        patches = model.vision.normalise(torch.from_numpy(row[PATCHES][:used]))
        tiles = patches.view(-1, SIDE, SIDE, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, TILE, TILE)
        assert (tiles - made["pixel_values"][0]).abs().max() < 1e-6
        batch = {key: torch.from_numpy(np.asarray(row[key]))[None] for key in (PATCHES, GRIDS)}
        ours_, theirs_ = logits(model, {**batch, "input_ids": ids[None]}), theirs.model(**made).logits
        assert (ours_ - theirs_).abs().max() < 1e-4
        file = str(tmp_path / f"{number}.png")
        [prompt] = prompts_with_images(["Hm\n<image>?"], [file], job, tokenizer).ids
        plain = theirs.processor(images=[photo(*size)], text="Hm\n<image>?")["input_ids"][0]
        assert prompt == [IMAGE if id_ == image else id_ for id_ in plain]
    again = transformers.AutoProcessor.from_pretrained(export_run(run, tmp_path / "out"), backend="pil")
    assert type(again) is type(theirs.processor) or type(again).__name__ == f"{name}Processor"
    assert again(images=[photo(*size)], text="Hm\n<image>?")["input_ids"][0] == plain
    assert main(["generate", str(run), "--image", file, "--prompt", "<image>What?", "--max-tokens", "3"]) == 0
