"""The share of learned tokens that a plan, a check and a run show is that of the labels that a run reads."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from attrs import evolve

from forge_core import load_job
from forge_core.cli import main
from forge_core.contracts.data import IGNORED_LABEL
from forge_core.engine.build import build_context, build_datasets, build_tokenizer
from forge_core.parallel.mesh import leave_group
from forge_core.plugins.catalog import Catalog
from forge_plugin_huggingface import row_sample

KEYS = {
    "pairs": 'prompt = "q"\ncompletion = "a"\n',
    "dropped": 'prompt = "q"\ncompletion = "a"\ntoo_long = "drop"\n',
    "cut": 'prompt = "q"\ncompletion = "a"\ntoo_long = "truncate"\nheld_out_every = 5\n',
    "chats": 'messages = "messages"\n',
}
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
JOB = """
[train]
steps = 1
global_batch_size = 2
seq_len = {length}
precision = "fp32"
device = "cpu"
[model]
type = "transformer"
dim = 16
layers = 1
vocab_size = 330
attention.heads = 2
[optimizer]
type = "adamw"
[data.packing]
type = "best_fit"
[[data.sources]]
type = "huggingface"
path = "data"
{keys}
[data.tokenizer]
{tokenizer}
"""


@pytest.fixture
def write_job(write, pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes rows and `job.toml` in the current folder: the name of its keys -> nothing."""
    pretrained(CHATML)
    monkeypatch.chdir(tmp_path)

    def make(case: str, rows: int = 40) -> None:
        if case == "chats":
            chat = [{"role": "user", "content": "hello?"}, {"role": "assistant", "content": "hello world"}]
            write("jsonl", [{"messages": chat * (1 + number % 3)} for number in range(rows)])
        else:
            # The documents of `dropped` and `cut` have 13 to 38 tokens
            write("jsonl", [{"q": f"ask {number} ", "a": "yes, " * (1 + number % 6)} for number in range(rows)])
        auto = 'type = "auto"\npath = "tokenizer"' if case == "chats" else 'type = "bytes"'
        length = 128 if case in ("chats", "pairs") else 24
        Path("job.toml").write_text(JOB.format(length=length, keys=KEYS[case], tokenizer=auto))

    return make


def labels_of_a_run() -> tuple[int, int]:
    """Returns tokens and labels of all sequences that a run of `job.toml` trains on, counted one by one."""
    leave_group()
    job = load_job("job.toml")
    context = build_context(job, Catalog.installed(), None)
    context = evolve(context, tokenizer=build_tokenizer(job, context))
    [dataset] = build_datasets(job, context)
    learned = inputs = documents = 0
    for number in range(len(dataset)):
        sample: Any = dataset[number]
        learned += int((sample["labels"] != IGNORED_LABEL).sum())
        for document in np.unique(sample["document_ids"]):
            ids = sample["input_ids"][sample["document_ids"] == document]
            # Padding is a document of end-of-text
            if (ids != context.tokenizer.end_of_text).any():
                inputs, documents = inputs + len(ids), documents + 1
    # The end-of-text of a document is a label, and no input
    return inputs + documents, learned


def rows_line(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Returns the line about rows of the plan of `job.toml`."""
    leave_group()
    assert main(["plan", "job.toml", "--json", *overrides]) == 0
    [line] = json.loads(capsys.readouterr().out)["lines"]
    assert line["title"] == "rows"
    return line["text"]


@pytest.mark.parametrize("case", KEYS)
def test_a_plan_a_check_and_a_run_show_the_share_of_labels(
    write_job, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    write_job(case)
    tokens, learned = labels_of_a_run()
    share = f"{learned / tokens:.1%} of {tokens:,} tokens learned"
    assert 0.05 < learned / tokens < 0.95
    line = rows_line(capsys)
    assert share in line
    assert main(["check", "job.toml", "--data"]) == 0
    assert share in capsys.readouterr().out
    assert main(["check", "job.toml", "--data", "--json"]) == 0
    [source] = json.loads(capsys.readouterr().out)["data"].values()
    assert source["labels"] == {"tokens": tokens, "learned": learned}
    lost = {"dropped": "rows longer than train.seq_len dropped", "cut": "truncated to train.seq_len"}
    assert lost.get(case, "tokens learned") in line


def test_a_plan_reads_no_more_than_a_sample_and_shows_that(
    write_job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job("pairs", rows=200)
    monkeypatch.setattr(row_sample, "ROWS", 60)
    line = rows_line(capsys)
    assert line.startswith("of a sample of 60 rows: 60 documents, ")
    # The rows of the sample are the first ones
    Path("data/part-0.jsonl").write_text("".join(Path("data/part-0.jsonl").read_text().splitlines(True)[:60]))
    tokens, learned = labels_of_a_run()
    assert line.endswith(f"{learned / tokens:.1%} of {tokens:,} tokens learned")


def test_a_sample_is_of_several_files(write_job, write, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    write_job("pairs")
    write("jsonl", *[[{"q": "q", "a": "a" * (file + 1)}] * 3 for file in range(10)])
    monkeypatch.setattr(row_sample, "ROWS", 16)
    leave_group()
    assert main(["plan", "job.toml"]) == 0
    # Two rows of the files 0, 1, 2, 3, 5, 6, 7 and 8: completions of one letter more than these numbers, and an end
    learned = 2 * (8 * 2 + sum((0, 1, 2, 3, 5, 6, 7, 8)))
    sample = r"rows       of a sample of 16 rows: 16 documents, ([\d.]+)% of (\d+) tokens"
    found = re.search(sample, capsys.readouterr().out)
    assert found is not None
    assert (float(found[1]), int(found[2])) == (round(100 * learned / (learned + 16), 1), learned + 16)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data.sources.0.path=nowhere/at-all", "the rows are not on this machine"),
        ("data.sources.0.data_files=missing.jsonl", "'data/missing.jsonl' does not exist"),
        ("data.sources.0.prompt=zzz", "no field 'zzz'"),
        ("data.sources.0.too_long=error", "more than train.seq_len = 24"),
    ],
)
def test_without_its_data_a_plan_shows_why_the_share_is_unknown(
    write_job, capsys: pytest.CaptureFixture[str], override: str, reason: str
) -> None:
    write_job("dropped")
    line = rows_line(capsys, f"--{override}")
    assert line.startswith("unknown: ")
    assert reason in line


def test_a_tokenizer_that_is_not_on_this_machine_is_not_waited_for(
    write_job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job("chats")
    asked: list[Any] = []

    def record(host: Any, *_: Any, **__: Any) -> None:
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", record)
    line = rows_line(capsys, "--data.tokenizer.path=owner/name")
    assert line.startswith("unknown: the tokenizer 'owner/name' is neither a folder nor in the cache of the hub")
    assert "learned" in rows_line(capsys)
    assert not asked
