"""Jobs that train on files of ids, as a user would run them."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_kit.data.token_file import TokenFileWriter
from forge_testing.refusals import lacks

Run = Callable[..., tuple[int, str, str]]
Train = Callable[..., list[dict[str, Any]]]

JOB = """
[job]
name = "tiny"
output = "{output}"

[train]
steps = 3
global_batch_size = 2
seq_len = 8
device = "cpu"

[model]
type = "forge_testing:TinyModel"

[optimizer]
type = "forge_testing:TinyAdamW"

{data}
"""
"""Its vocabulary is 32."""


@pytest.fixture
def train(forge_run: Run) -> Train:
    """Trains on a source (the keys of its table, as TOML); returns the lines of metrics."""
    runs = iter(range(100))

    def run(keys: str, data: str = "", *arguments: str) -> list[dict[str, Any]]:
        output = f"runs-{next(runs)}"
        source = f'[[data.sources]]\ntype = "memmap"\n{keys}\n{data}'
        Path("job.toml").write_text(JOB.format(output=output, data=source))
        code, _, err = forge_run("job.toml", *arguments)
        assert code == 0, err
        return [json.loads(line) for line in Path(output, "tiny/metrics.jsonl").read_text().splitlines()]

    return run


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]


def test_every_format_gives_the_same_losses(train: Train) -> None:
    tokens = np.random.default_rng(0).integers(1, 32, 400)
    tokens[39::40] = 0
    np.save("whole.npy", tokens.astype(np.uint8))
    tokens.astype("<u4").tofile("raw.bin")
    for number, part in enumerate(np.split(tokens, [7, 150])):
        np.save(f"part-{number}.npy", part)
    with TokenFileWriter(Path("file"), 32, 0) as writer:
        for document in np.split(tokens, 10):
            writer.add("document", document[:-1])
    whole = losses(train('path = "whole.npy"\nend_of_text = 0'))
    assert len(whole) == 3
    assert losses(train('path = "part-*.npy"\nend_of_text = 0')) == whole
    assert losses(train('path = "raw.bin"\nformat = { type = "raw", dtype = "uint32" }\nend_of_text = 0')) == whole
    assert losses(train('path = "file.bin"')) == whole


@pytest.fixture
def prepared(prepare: Callable[..., str]) -> None:
    """The folder `data`, of 40 documents, four of them held out."""
    rng = np.random.default_rng(0)
    words = ["".join(chr(letter) for letter in rng.integers(97, 123, 20)) for _ in range(40)]
    Path("a.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    prepare("a.jsonl", "--out=data", "--held-out-every=10")


def test_what_was_prepared_is_trained_on_and_its_held_out_documents_are_evaluated(train: Train, prepared: None) -> None:
    lines = train('path = "data"', '[data.tokenizer]\ntype = "prepared"\npath = "data"')
    assert len(losses(lines)) == 3
    [evaluation] = [line for line in lines if "eval/loss" in line]
    assert evaluation["eval/tokens"] == 4 * 21
    assert evaluation["eval/bits_per_byte"] > 0


def test_no_tokenizer_is_needed(train: Train, prepared: None) -> None:
    assert losses(train('path = "data"')) == losses(
        train('path = "data"', '[data.tokenizer]\ntype = "prepared"\npath = "data"')
    )


def test_worker_processes_read_the_same(train: Train, prepared: None) -> None:
    assert losses(train('path = "data"', "", "--data.workers=2")) == losses(train('path = "data"'))


def test_a_run_keeps_its_tokenizer_and_needs_the_folder_no_more(train: Train, prepared: None, here: Path) -> None:
    from forge_plugin_generate.command import load_model_and_tokenizer

    train('path = "data"', '[data.tokenizer]\ntype = "prepared"\npath = "data"')
    shutil.rmtree("data")
    _, tokenizer = load_model_and_tokenizer(here / "runs-0/tiny")
    assert tokenizer.decode(tokenizer.encode("still here")) == "still?here"


@pytest.mark.parametrize(("path", "fact"), [("nowhere", "exist"), (".", "folder")])
def test_a_tokenizer_of_another_folder_is_refused(forge_run: Run, prepared: None, path: str, fact: str) -> None:
    data = f'[[data.sources]]\ntype = "memmap"\npath = "data"\n[data.tokenizer]\ntype = "prepared"\npath = "{path}"'
    Path("job.toml").write_text(JOB.format(output="runs", data=data))
    code, _, err = forge_run("check", "job.toml")
    assert code == 2
    assert not lacks(err, "data.tokenizer.path", f"'{path}'", fact, "forge-run data prepare")


def test_ids_beyond_the_vocabulary_stop_a_run_before_training(forge_run: Run) -> None:
    np.save("a.npy", np.arange(300, dtype=np.int32) - 5)
    data = '[[data.sources]]\ntype = "memmap"\npath = "a.npy"\nend_of_text = 0'
    Path("job.toml").write_text(JOB.format(output="runs", data=data))
    code, _, err = forge_run("job.toml")
    assert code == 2
    assert not lacks(err, "a.npy", "token 0 is -5")
    assert not Path("runs/tiny/metrics.jsonl").exists()


def test_a_shard_that_was_written_again_between_save_and_resume_is_noticed(forge_run: Run) -> None:
    """Of the same size, so that neither the number of sequences nor the layout of the file tells."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        np.save(f"{name}.npy", np.append(rng.integers(1, 32, 400), 0).astype(np.uint8))
    data = '[[data.sources]]\ntype = "memmap"\npath = "a.npy"\nend_of_text = 0'
    Path("job.toml").write_text(JOB.format(output="runs", data=data))
    assert forge_run("job.toml", "--train.steps=2")[0] == 0
    assert forge_run("job.toml", "--train.steps=3")[0] == 0
    shutil.copy("b.npy", "a.npy")
    code, _, err = forge_run("job.toml", "--train.steps=4")
    assert code == 2
    assert not lacks(err, "source '0'", "--resume-with-changes")
    assert forge_run("job.toml", "--train.steps=4", "--resume-with-changes")[0] == 0


def test_a_shard_is_described_once_by_a_process_with_few_looks_at_files(train: Train, monkeypatch) -> None:
    looks: dict[str, int] = {}

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and "shards/" in os.fspath(path):
                name = os.path.basename(os.fspath(path))
                looks[name] = looks.get(name, 0) + 1
            return function(path, *arguments, **options)

        return call

    Path("shards").mkdir()
    for number in range(6):
        with TokenFileWriter(Path(f"shards/part-{number}"), vocab_size=32, end_of_text=0) as writer:
            writer.add("document", [1, 2, 3] * 8)
    for module, name in ((os, "stat"), (os, "lstat"), (builtins, "open")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    train('path = "shards"')
    assert {name: looks[name] for name in sorted(looks) if "-3" in name} == {"part-3.bin": 1, "part-3.ends": 1}
