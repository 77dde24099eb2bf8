from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from forge_core.contracts.errors import Problem
from forge_plugin_huggingface import Auto, HuggingFace

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEXTS = ["hello world, this is a text to train on\n" * 5, "user assistant system answer question " * 5]


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches for every test, and no network. Returns Forge's."""
    folder = tmp_path_factory.mktemp("caches")
    monkeypatch.setenv("FORGE_CACHE", str(folder / "forge"))
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    datasets.disable_progress_bars()
    return folder / "forge"


class Letters:
    """Ids 0 to 255 are the bytes of UTF-8, 256 is end-of-text. Counts the texts that it encodes."""

    vocab_size = 257
    end_of_text = 256

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.encoded += len(texts)
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id_ for id_ in ids if id_ != self.end_of_text).decode()

    def save(self, folder: Path) -> None: ...

    def fingerprint(self) -> str:
        return "letters"


@pytest.fixture
def letters() -> Letters:
    return Letters()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes files of rows: (format, rows of each file) -> the folder."""

    def run(format_: str, *files: Sequence[Mapping[str, Any]], name: str = "data") -> str:
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        if format_ == "saved":
            datasets.Dataset.from_list([row for rows in files for row in rows]).save_to_disk(str(folder))
        for number, rows in enumerate(files if format_ != "saved" else ()):
            path = folder / f"part-{number}.{format_}"
            if format_ == "jsonl":
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            else:
                datasets.Dataset.from_list(list(rows)).to_parquet(str(path), batch_size=2)
        return str(folder)

    return run


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    """A small byte-level BPE with special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@pytest.fixture
def pretrained(backend: Tokenizer, tmp_path: Path) -> Callable[..., str]:
    """Saves a tokenizer as transformers does: (chat template, further settings) -> its folder."""

    def run(chat_template: str | None = None, name: str = "tokenizer", **settings: Any) -> str:
        copy = Tokenizer.from_str(backend.to_str())
        settings = {"eos_token": "<|endoftext|>"} | settings
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=copy, chat_template=chat_template, **settings)
        tokenizer.save_pretrained(str(tmp_path / name))
        return str(tmp_path / name)

    return run


def _documents() -> Iterable[str]:
    return ()


@pytest.fixture
def auto() -> Callable[..., Any]:
    """Builds a tokenizer: keys of `auto` -> it."""
    return lambda path, **keys: Auto(path=path, **keys).build(SimpleNamespace(), _documents)


@pytest.fixture
def make_context(letters: Letters) -> Callable[..., Any]:
    """Surroundings of a dataset that is built."""

    def make(tokenizer: Any = None, rows: int = 4, seed: int = 42, component: Any = "some") -> SimpleNamespace:
        train = SimpleNamespace(seq_len=4, global_batch_size=rows)
        data = SimpleNamespace(tokenizer=component, seed=None)
        job = SimpleNamespace(train=train, data=data, job=SimpleNamespace(seed=seed))
        return SimpleNamespace(job=job, tokenizer=tokenizer or letters, mesh=None)

    return make


@pytest.fixture
def build_dataset(make_context: Callable[..., Any]) -> Callable[..., Any]:
    """Builds a dataset: path and keys -> documents, or a stream."""

    def run(path: str, tokenizer: Any = None, rows: int = 4, seed: int = 42, **keys: Any) -> Any:
        return HuggingFace(path=path, **keys).tokenised(make_context(tokenizer, rows, seed))

    return run


@pytest.fixture
def problems(make_context: Callable[..., Any]) -> Callable[..., list[Problem]]:
    """Component -> its problems."""

    def run(checked: Any, **surroundings: Any) -> list[Problem]:
        return list(checked.problems(make_context(**surroundings).job, None))

    return run


@pytest.fixture
def texts_of() -> Callable[[Any], list[str]]:
    """Token file of `Letters` -> the texts of its documents."""

    def run(documents: Any) -> list[str]:
        ids = documents.tokens(0, len(documents)).tolist()
        starts = [0, *documents.ends().tolist()]
        assert all(ids[end - 1] == Letters.end_of_text for end in starts[1:])
        return [bytes(ids[a : b - 1]).decode() for a, b in pairwise(starts)]

    return run
