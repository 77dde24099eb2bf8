"""Tasks of lmms-eval with images on disk, asked by the command; as far as its package is installed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from PIL import Image

from forge_core.cli import main
from forge_plugin_evaluate.harness import image_command
from forge_testing.refusals import at, check_problems

COLOURS = ("red", "green", "blue", "white", "black", "orange")
JOB = """
[job]
name = "vlm"
output = "runs"

[train]
steps = 1
global_batch_size = 2
seq_len = 48
device = "cpu"

[optimizer]
type = "forge_testing:TinyAdamW"

[data.tokenizer]
type = "bytes"

[[data.sources]]
type = "image_text"
path = "training.jsonl"

[model]
type = "vision_language"

[model.language]
dim = 16
layers = 1
vocab_size = 258
init_std = 0.7
attention = { heads = 2 }

[model.vision.encoder]
type = "vit"
dim = 16
layers = 1
heads = 2
patch = 8
size = [8, 8]
init_std = 0.5
"""
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_visual: !function shown.images
doc_to_text: question
doc_to_target: {target}
{more}
"""
CHOICE = (
    'doc_to_choice: [red, green, a deep blue]\ntarget_delimiter: ""\nmetric_list: [{metric: acc}, {metric: acc_norm}]'
)
ANSWER = """
generation_kwargs: {max_new_tokens: 6, temperature: 0, top_p: 1.0, num_beams: 1, do_sample: false, until: ["\\n"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
SHOWN = """
from PIL import Image

def images(document):
    return [Image.open(document["file"])]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """A run, and a folder with tasks, in the working directory."""
    folder = tmp_path_factory.mktemp("lmms")
    records, questions = [], []
    for number, colour in enumerate(COLOURS):
        Image.new("RGB", (8, 8), colour).save(path := folder / f"{colour}.png")
        records.append({"image": str(path), "text": colour})
        questions.append(
            {"file": str(path), "question": "colour" * number + "?", "right": colour, "number": number % 3}
        )
    for name, lines in (("training", records), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "job.toml").write_text(JOB)
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "shown.py").write_text(SHOWN)
    for name, kind, target, more in (
        ("colour_choice", "multiple_choice", "number", CHOICE),
        ("colour_answer", "generate_until", "right", ANSWER),
    ):
        text = TASK.format(name=name, kind=kind, target=target, more=more, folder=folder)
        (tasks / f"{name}.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FORGE_CACHE", str(folder / "cache"))
        patch.setenv("HF_HOME", str(folder / "hub"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        assert main(["run", "job.toml"]) == 0
        yield folder, questions


def ask(*options: str) -> int:
    tasks = ["--tasks", "colour_choice,colour_answer", "--include", "tasks"]
    return main(
        ["evaluate", "runs/vlm", "--harness", "lmms-eval", "--device", "cpu", "--bootstrap", "0", *tasks, *options]
    )


def test_tasks_with_images_are_asked_and_scored_by_the_model(trained, capsys):
    """Against whole forward passes, question by question."""
    pytest.importorskip("lmms_eval")
    from forge_core import load_model
    from forge_plugin_images.prompts import prompts_with_images

    _, questions = trained
    assert ask("--out", "scores.json", "--items", "--batch-size", "4") == 0
    assert "colour_choice" in capsys.readouterr().out
    results = json.loads(Path("scores.json").read_text())
    loaded = load_model("runs/vlm")
    model, tokenizer = loaded.model, loaded.tokenizer

    def log_probabilities(question, tokens):
        prompt = prompts_with_images(["<image>" + question["question"]], [question["file"]], loaded.job, tokenizer)
        with torch.no_grad():
            hidden = model({"input_ids": torch.tensor([[*prompt.ids[0], *tokens]]), **prompt.entries})
            return model.head.logits(hidden)[0, len(prompt.ids[0]) - 1 :].double().log_softmax(-1)

    right, said = [], []
    for question in questions:
        losses = []
        for choice in ("red", "green", "a deep blue"):
            tokens = tokenizer.encode(choice)
            table = log_probabilities(question, tokens)
            losses.append(-sum(float(table[place, token]) for place, token in enumerate(tokens)) / len(tokens))
        right.append(losses.index(min(losses)) == question["number"])
        written: list[int] = []
        while len(written) < 6:
            token = int(log_probabilities(question, written)[-1].argmax())
            if token in (tokenizer.end_of_text, 10):  # "\n"
                break
            written.append(token)
        said.append(tokenizer.decode(written))
    assert results["results"]["colour_choice"]["acc,none"] == sum(right) / len(right)
    answers = {item["doc_id"]: item["filtered_resps"][0] for item in results["samples"]["colour_answer"]}
    assert [answers[number] for number in range(len(questions))] == said
    assert len(set(said)) > 1


def test_what_is_refused(trained, capsys, monkeypatch):
    pytest.importorskip("lmms_eval")
    for options, message in (
        (["--tasks", "colour_chioce"], "lmms-eval has no task 'colour_chioce'"),
        (["--max-length", "8"], "positions, and rows have 8; choose a larger --max-length"),
        (["--chat"], "this tokenizer has no chat template"),
        (["--system", "x"], "a system's message is part of a chat; add --chat"),
        (["--nproc", "2"], "2 ranks, but lmms-eval uses a single process here"),
        (["--gen-kwargs", "num_beams=3"], "generation_kwargs has num_beams"),
    ):
        assert ask(*options) == 2
        assert message in capsys.readouterr().err


def test_options_that_do_not_go_together_are_refused_whatever_is_installed(monkeypatch, tmp_path):
    def problems(**options):
        return image_command._problems(SimpleNamespace(**{"nproc": None, "system": "", "chat": False, **options}))

    monkeypatch.setattr(image_command, "find_spec", lambda name: name)
    folders = [tmp_path, tmp_path / "none"]
    check_problems(
        problems(nproc=2, system="Be brief.", include=folders),
        at("--nproc", "2 ranks", "forge-plugin-vlm-eval"),
        at("--system", "--chat"),
        at("--include", tmp_path / "none"),
    )
    check_problems(problems(nproc=1, system="Be brief.", chat=True, include=folders[:1]))


def test_a_missing_package_is_named_with_what_installs_it(trained, capsys, monkeypatch):
    monkeypatch.setattr(image_command, "find_spec", lambda name: None)
    assert ask() == 2
    message = 'lmms-eval is not installed; pip install "forge-plugin-evaluate[images]"'
    assert message in capsys.readouterr().err


TEXTS_ONLY = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|user|>' if message.role == 'user' else '<|answer|>' }}"
    "{{- message.content + '<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|answer|>' }}{%- endif %}"
)
WITH_IMAGES = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|user|>' if message.role == 'user' else '<|answer|>' }}"
    "{%- for part in message.content %}{{- '<|image|>' if part.type == 'image' else part.text }}{%- endfor %}"
    "{{- '<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|answer|>' }}{%- endif %}"
)
SPECIAL = ["<|user|>", "<|answer|>", "<|end|>", "<|image|>", "<|begin|>"]


@pytest.mark.parametrize(("template", "token"), [(TEXTS_ONLY, ""), (WITH_IMAGES, "<|image|>")])
def test_a_chat_asks_with_the_positions_of_training(template, token, tmp_path, monkeypatch):
    """Against a row of `image_chat` with the same question."""
    pytest.importorskip("lmms_eval")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from forge_core.engine.build import build_context, build_datasets, build_tokenizer
    from forge_core.plugins.catalog import Catalog
    from forge_plugin_evaluate.harness.images import ForgeLMM
    from forge_plugin_huggingface import Auto
    from forge_plugin_images import ImageChat
    from forge_plugin_vision import image_input
    from forge_plugin_vlm_eval.questions import questions_of
    from forge_testing import tiny_job
    from forge_testing.images import tiny_model

    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", bos_token="<|begin|>", additional_special_tokens=SPECIAL
    )
    fast.chat_template = template
    fast.save_pretrained(tmp_path / "tokenizer")
    Image.new("RGB", (16, 8), "red").save(tmp_path / "red.png")
    content = [{"type": "image", "image": "red.png"}, {"type": "text", "text": "which?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    source = ImageChat(path=str(tmp_path / "chats.jsonl"), image_token=token)
    data = {"sources": (source,), "tokenizer": Auto(path=str(tmp_path / "tokenizer"))}
    catalog = Catalog.installed()
    job = tiny_job(str(tmp_path), catalog, data=data, model=tiny_model(8, 16), seq_len=32)
    context = build_context(job, catalog, None)
    tokenizer = build_tokenizer(job, context)
    [rows] = build_datasets(job, attrs.evolve(context, tokenizer=tokenizer))
    [question] = questions_of(rows[0], image_input(job))

    model = ForgeLMM(torch.nn.Linear(1, 1), tokenizer, job, max_length=32, chat=True)
    image = Image.open(tmp_path / "red.png")
    prompts = model._prompts([model._text("which?", [image])], [[image]])
    assert prompts.ids == [question.prompt.tolist()]
    assert (prompts.entries["patches"][0].numpy() == rows[0]["patches"]).all()
