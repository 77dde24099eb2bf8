"""Tokenizers of published models, as a user meets them: import, training, prompts, chats, stops, and the export.

Their model has no attention or feed-forward part to speak of: which token comes next depends on the last one alone, and
is written into its head, so that texts are known.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from attrs import define, frozen
from published_models import SIZES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from forge_core.cli import main
from forge_core.contracts.components import TrainingHook

LLAMA_TEMPLATE = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@frozen
class Kind:
    """A tokenizer of bytes with the special tokens of a published one."""

    special: tuple[str, ...]
    """By id; the first is the beginning of text."""
    end: str
    stops: tuple[str, ...]
    """What `generation_config.json` lists."""
    template: str
    inside: bool
    """Whether the template stands in `tokenizer_config.json`, as version 4 wrote it."""

    def id(self, token: str) -> int:
        return self.special.index(token)


KINDS: Mapping[str, Kind] = {
    "llama": Kind(
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
        ),
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        LLAMA_TEMPLATE,
        inside=True,
    ),
    "gemma": Kind(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        ("<eos>", "<end_of_turn>"),
        GEMMA_TEMPLATE,
        inside=False,
    ),
}
STARTS = "abc"
"""`a` is followed by `x` and the first stop, `b` by `x` and the second, and so on; stops are followed by `z`."""


def chained(kind: Kind, ids: Mapping[str, int], size: int) -> transformers.LlamaForCausalLM:
    """A model whose next token follows from the last."""
    torch.manual_seed(0)
    keys = {**SIZES, "vocab_size": size, "hidden_size": 512, "num_hidden_layers": 1, "num_key_value_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**keys))
    follows = {ids["u"]: ids["x"], ids["\n"]: ids["a"], kind.id(kind.special[0]): ids["a"]}
    for letter, middle, stop in zip(STARTS, "uvw", kind.stops, strict=False):
        follows |= {ids[letter]: ids[middle], ids[middle]: kind.id(stop), kind.id(stop): ids["z"]}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        embedding = torch.nn.init.orthogonal_(model.model.embed_tokens.weight)
        model.lm_head.weight.zero_()
        for before, after in follows.items():
            model.lm_head.weight[after] += embedding[before]
    return model


@pytest.fixture(scope="module", params=KINDS)
def published(request, tmp_path_factory) -> tuple[Kind, Path]:
    """A folder with such a model and tokenizer."""
    kind = KINDS[request.param]
    folder = tmp_path_factory.mktemp("tokenizers") / "published"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=letters, special_tokens=list(kind.special)))
    bos = kind.special[0]
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=kind.end, chat_template=kind.template
    )
    tokenizer.save_pretrained(folder)
    if kind.inside:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": kind.template}))
        (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}  # as published ones have
    path.write_text(json.dumps(settings, indent=1))
    ids = {letter: tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcuvwxz\n"}
    chained(kind, ids, backend.get_vocab_size()).save_pretrained(folder)
    listed = {"bos_token_id": 0, "eos_token_id": [kind.id(stop) for stop in kind.stops]}
    (folder / "generation_config.json").write_text(json.dumps(listed))
    return kind, folder


@pytest.fixture(scope="module")
def run(published) -> Path:
    """The imported run folder."""
    _, folder = published
    run = folder.with_name("run")
    assert main(["weights", "import", str(folder), "--out", str(run)]) == 0
    return run


def test_a_text_ends_at_each_of_the_listed_stops(published, run, capsys):
    kind, _ = published
    for letter, middle, _ in zip(STARTS, "uvw", kind.stops, strict=False):
        capsys.readouterr()
        assert main(["generate", str(run), "--prompt", letter, "--temperature=0", "--max-tokens=9"]) == 0
        assert middle in (out := capsys.readouterr().out)
        assert "z" not in out


def test_a_prompt_begins_with_the_beginning_of_text(run, capsys):
    """Behind it comes `a`: nothing but it was there to go by."""
    assert main(["generate", str(run), "--prompt", "", "--temperature=0", "--max-tokens=9"]) == 0
    assert "au" in capsys.readouterr().out


def test_a_chat_is_rendered_once_and_answered_until_the_turn_ends(published, run, capsys, monkeypatch):
    _, folder = published
    from forge_plugin_generate import generate as module

    prompts = []
    original = module.generate
    monkeypatch.setattr(
        "forge_plugin_generate.generate.generate",
        lambda model, given, *rest, **options: prompts.extend(given) or original(model, given, *rest, **options),
    )
    assert main(["generate", str(run), "--chat", "--prompt", "hello", "--temperature=0", "--max-tokens=9"]) == 0
    assert "au" in (out := capsys.readouterr().out)  # the template ends with a line break, which `a` follows
    assert "z" not in out
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "hello"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert [list(prompt) for prompt in prompts] == [expected]
    assert expected.count(0) == 1


@define(kw_only=True, slots=False)
class Batches(TrainingHook):
    """Writes the ids of the first step's batches to a file."""

    path: str

    def on_step_begin(self, context) -> None:
        ids = [batch["input_ids"].tolist() for batch in context.batches]
        Path(self.path).write_text(json.dumps(ids))


def old_form(run: Path, copy: Path) -> Path:
    """A copy of a run whose tokenizer was kept without its published files."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "tokenizer/source")
    (copy / "tokenizer/source.sha256").unlink()
    path = copy / "tokenizer/tokenizer_config.json"
    settings = json.loads(path.read_text())
    assert settings["tokenizer_class"] == "TokenizersBackend"
    stop = json.loads((copy / "tokenizer/generation_config.json").read_text())["eos_token_id"][0]
    added = {
        token["id"]: token["content"]
        for token in json.loads((copy / "tokenizer/tokenizer.json").read_text())["added_tokens"]
    }
    path.write_text(json.dumps(settings | {"extra_special_tokens": [added[stop]]}))
    return copy


def test_data_begin_with_it_and_the_export_has_the_tokenizer_of_the_origin(published, run, tmp_path, capsys):
    kind, folder = published
    names = ("tokenizer.json", "tokenizer_config.json", *["chat_template.jinja"] * (not kind.inside))
    files = {name: (folder / name).read_bytes() for name in names}
    sha256 = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert json.loads((run / "origin.json").read_text())["tokenizer"] == sha256
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("hello hello")
    (tmp_path / "job.toml").write_text(f"""
job = {{ name = "more", output = "{tmp_path}" }}
train = {{ steps = 1, global_batch_size = 1, seq_len = 24, precision = "fp32" }}
optimizer = {{ type = "adamw", lr = 1e-9 }}
[hooks.batches]
type = "test_published_tokenizers:Batches"
path = "{tmp_path}/ids.json"
[[data.sources]]
type = "text"
path = "{tmp_path}/*.txt"
""")
    assert main(["run", str(run / "start.toml"), str(tmp_path / "job.toml")]) == 0, capsys.readouterr().err
    [[row]] = json.loads((tmp_path / "ids.json").read_text())
    before = transformers.AutoTokenizer.from_pretrained(folder)
    document = [*before("hello hello")["input_ids"], before.eos_token_id]
    assert document[0] == 0
    assert row in [(document * 4)[start : start + 24] for start in range(len(document))]

    assert main(["weights", "export", str(tmp_path / "more"), "--out", str(tmp_path / "out")]) == 0
    out = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert files.items() <= out.items(), "as they came, after training"
    assert ("chat_template.jinja" in out) is not kind.inside
    stops = [kind.id(stop) for stop in kind.stops]
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == stops
    after = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert after.chat_template == before.chat_template == kind.template
    for text in ("hello", "  two\n\n spaces é 漢字 ", kind.special[-1], ""):
        ids = before(text)["input_ids"]
        assert after(text)["input_ids"] == ids
        assert after.decode(ids) == before.decode(ids)
        assert after.decode(ids, skip_special_tokens=True) == before.decode(ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": " hello "}, {"role": "assistant", "content": "hm"}]
    for generation in (False, True):
        one, other = (t.apply_chat_template(chat, add_generation_prompt=generation) for t in (before, after))
        assert one["input_ids"] == other["input_ids"]
    assert main(["weights", "export", str(old_form(run, tmp_path / "old")), "--out", str(tmp_path / "of old")]) == 0
    written = json.loads((tmp_path / "of old/tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast", "transformers 4 has no TokenizersBackend"
    assert written["additional_special_tokens"] == [kind.stops[0]], "a list is for version 5 alone"
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "of old")
    assert again("hello")["input_ids"] == before("hello")["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = after("b", return_tensors="pt")
    generated = model.generate(**prompt, do_sample=False, max_new_tokens=9, pad_token_id=0)
    assert after.decode(generated[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True) == "v"
