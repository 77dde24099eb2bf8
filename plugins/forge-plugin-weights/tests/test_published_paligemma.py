"""PaliGemma: packed rows, and what it is refused for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from published_models import lifted, ours
from published_vision import MODELS, PLACEHOLDER, SIDE, Seeing, batch_of, paligemma, pixels_of, text, wide
from test_published_vision import CONFIGS, imported, logits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from forge_core.checkpoint.resume import locate
from forge_core.config.load import parse_job
from forge_core.engine.build import build_context, build_tokenizer
from forge_core.plugins.catalog import Catalog
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_vision import GRIDS, IMAGE, PATCHES
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder, read_json
from forge_plugin_weights.tables import architecture_of, read_config
from forge_testing.refusals import ExpectedProblem, at, lacks, refuses_all


@pytest.mark.parametrize("name", ["paligemma", "paligemma, gemma2"])
@torch.no_grad()
def test_documents_of_a_packed_row_have_the_logits_that_they_have_alone(tmp_path: Any, name: str) -> None:
    """Two documents with an image each, of unlike lengths and prefixes; alone they are as `transformers` has them."""
    theirs, run = imported(tmp_path, MODELS[name])
    model = ours(run, "fp64")
    batch = {key: tensor[:1] for key, tensor in batch_of(SIDE**2, images=2, length=48).items()}
    batch[GRIDS] = torch.tensor([[[1, SIDE, SIDE]] * 2])
    ids = torch.cat([torch.full((16,), IMAGE), torch.arange(1, 9), torch.full((16,), IMAGE), torch.arange(9, 17)])[None]
    learned = torch.tensor([[18, *range(21, 23), *range(44, 47)]])
    labels = torch.full_like(ids, -100).scatter(1, learned, ids.roll(-1, 1).gather(1, learned))
    documents = (torch.arange(48) >= 24).long()[None]
    packed = {**batch, "input_ids": ids, "labels": labels, "document_ids": documents}
    packed["positions"] = (torch.arange(48) % 24)[None]
    together, pixels = logits(model, packed), pixels_of(model.vision, batch)
    for number, answer in enumerate((19, 21)):  # the first token of each answer
        own = slice(24 * number, 24 * number + 24)
        inputs = {
            "input_ids": ids[:, own].where(ids[:, own] >= 0, PLACEHOLDER),
            "pixel_values": pixels[number : number + 1],
            "token_type_ids": (torch.arange(24) >= answer).long()[None],
        }
        with lifted():
            expected = wide(theirs)(**inputs).logits
        assert (together[:, own] - expected).abs().max() < 1e-9


def test_its_files_say_what_its_processor_needs(tmp_path: Any) -> None:
    _, run = imported(tmp_path, MODELS["paligemma"])
    pixels = read_json(export_run(run, tmp_path / "out") / "preprocessor_config.json")
    assert (pixels["processor_class"], pixels["image_seq_length"]) == ("PaliGemmaProcessor", SIDE**2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text_config": {"model_type": "llama"}}, at("", "text_config.model_type = 'llama'", "PaliGemma", "gemma2")),
        ({"projection_dim": 7}, at("", "projection_dim = 7", "text_config.hidden_size = 2048")),
        ({"novelty": 7}, at("novelty", 7)),
    ],
)
def test_what_it_cannot_be_is_named(changes: dict[str, Any], expected: ExpectedProblem) -> None:
    config = {**CONFIGS["google/paligemma-3b-pt-224"], **changes}
    _, architecture = architecture_of(config, Catalog.installed())
    with refuses_all(expected):
        read_config(architecture, config)


def test_captions_and_prompts_have_the_ids_and_pixels_of_its_processor(tmp_path: Any) -> None:
    """The image first, the beginning of text behind it; the newline that ends a prompt is the data's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<eos>", "<bos>"]
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=letters, special_tokens=special))
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    begins = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    tokenizer.post_processor = begins
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    image, size = tokenizer.token_to_id("<image>"), tokenizer.get_vocab_size()
    language = text("Gemma", head_dim=16, num_key_value_heads=1, vocab_size=size)
    folder = tmp_path / "published"
    model = Seeing("PaliGemmaForConditionalGeneration", lambda: paligemma(language, image_token_index=image)).write(
        folder
    )
    pixels = transformers.SiglipImageProcessorPil(
        size={"height": 4 * SIDE, "width": 4 * SIDE}, image_seq_length=SIDE**2
    )
    pixels.image_seq_length = SIDE**2
    pixels.save_pretrained(folder)
    fast.save_pretrained(folder)
    run = import_folder(folder, tmp_path / "run")
    assert not lacks((run / "start.toml").read_text(), "[data.sources.tile_text]", 'after = "<bos>"')
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 44, 3), np.uint8))
    picture.save(tmp_path / "a.png")
    _, manifest = locate(run, "full")
    catalog = Catalog.installed()
    job = parse_job(manifest["job"], "job.toml", catalog)
    own: Any = build_tokenizer(job, build_context(job, catalog, run))
    prompt = prompts_with_images(["what is it\n"], [str(tmp_path / "a.png")], job, own)
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    made = transformers.PaliGemmaProcessor(pixels, fast)(images=picture, text="<image>what is it", suffix="x")
    expected = [IMAGE if id_ == image else id_ for id_ in made["input_ids"][0]]
    assert [*prompt.ids[0], *own.encode("x"), own.end_of_text] == expected
    seen = pixels_of(ours(run).vision, {PATCHES: prompt.entries[PATCHES]})
    assert (seen - torch.as_tensor(made["pixel_values"])).abs().max() < 1e-6
    again = transformers.AutoProcessor.from_pretrained(export_run(run, tmp_path / "out"), backend="pil")
    assert again(images=picture, text="<image>what is it", suffix="x")["input_ids"] == made["input_ids"]
    assert model.config.image_token_id == image
