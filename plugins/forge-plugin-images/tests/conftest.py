from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from forge_core.cli import main
from forge_core.contracts.components import DatasetComponent
from forge_core.engine.build import build_context, build_datasets, build_tokenizer
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_plugin_huggingface import Auto
from forge_plugin_text import Bytes
from forge_testing import tiny_job
from forge_testing.images import VISION_LANGUAGE_JOB, tiny_model


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return Catalog.installed()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for every test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FORGE_CACHE", str(folder))
    return folder


@pytest.fixture
def make_job(tmp_path: Path, catalog: Catalog) -> Callable[..., Job]:
    """(dataset, further settings) -> a tiny job with a vision-language model and the tokenizer `bytes`."""

    def make(dataset: DatasetComponent, data: dict[str, Any] | None = None, **changes: Any) -> Job:
        settings: dict[str, Any] = {"model": tiny_model(), "seq_len": 24, **changes}
        sources = {"sources": (dataset,), "tokenizer": Bytes(), **(data or {})}
        return tiny_job(str(tmp_path / "runs"), catalog, data=sources, **settings)

    return make


@pytest.fixture
def build(make_job: Callable[..., Job], catalog: Catalog) -> Callable[..., Any]:
    """Like `make_job`, but returns the dataset that the engine builds."""

    def make(dataset: DatasetComponent, **changes: Any) -> Any:
        job = make_job(dataset, **changes)
        context = build_context(job, catalog, None)
        [built] = build_datasets(job, attrs.evolve(context, tokenizer=build_tokenizer(job, context)))
        return built

    return make


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[..., Auto]:
    """(template, further settings) -> a tokenizer of bytes with it."""

    def make(template: str, **settings: Any) -> Auto:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        special = ["<|im_start|>", "<|im_end|>", "<|image|>"]
        fast = PreTrainedTokenizerFast(
            tokenizer_object=inner, eos_token="<|endoftext|>", additional_special_tokens=special, **settings
        )
        fast.chat_template = template
        fast.save_pretrained(tmp_path / "tokenizer")
        return Auto(path=str(tmp_path / "tokenizer"))

    return make


@pytest.fixture
def run_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """(options) -> exit code, output and errors of `forge-run check job.toml …`, in `tmp_path`, with `pairs.jsonl`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["forge-run"])
    (tmp_path / "job.toml").write_text(
        f'{VISION_LANGUAGE_JOB}[[data.sources]]\ntype = "image_text"\npath = "pairs.jsonl"\n'
    )

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return (main(["check", "job.toml", *argv]), *capsys.readouterr())

    return run
