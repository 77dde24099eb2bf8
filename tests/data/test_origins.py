"""From a token of a step back to the document that it is of, and to its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_core import Trainer, load_job
from forge_core.cli import main
from forge_core.contracts.components import TrainingHook

JOB = """
[job]
name = "traced"
[train]
steps = 3
global_batch_size = 4
seq_len = 24
[model]
type = "transformer"
dim = 16
layers = 1
attention = {{ heads = 2 }}
[optimizer]
type = "forge_testing:TinyAdamW"
[data.packing]
type = "{packing}"
[data.tokenizer]
type = "{tokenizer}"
[[data.sources]]
{source}
"""
SOURCES = {
    "memmap": ("bytes", 'type = "memmap"\npath = "data"'),
    "memmap, held out": ("bytes", 'type = "memmap"\npath = "data"\nheld_out_every = 4'),
    "text": ("bytes", 'type = "text"\npath = "web/*.jsonl"\nheld_out_every = 3'),
}


class Rows(TrainingHook):
    """Keeps the rows of every step, as they were trained on."""

    def __init__(self) -> None:
        self.steps: list[list[list[int]]] = []

    def on_step_end(self, context: Any) -> None:
        self.steps.append([row for batch in context.batches for row in batch["input_ids"].tolist()])


@pytest.fixture
def forge_run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*argv: str) -> str:
        capsys.readouterr()
        assert main(list(argv)) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture(autouse=True)
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of documents with ids, some empty, in an empty current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    Path("web").mkdir()
    for name in "ab":
        rows = [{"id": f"{name}-{n}", "text": f"{name}{n} " * (n % 9)} for n in range(30)]
        Path(f"web/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("packing", ["concatenate", "isolate", "best_fit"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_document_of_a_step_is_named_and_is_what_was_trained_on(
    forge_run: Callable[..., str], packing: str, source: str
) -> None:
    if source != "text":
        forge_run("data", "prepare", "web", "--out=data", "--tokenizer=bytes", "--workers=1", "--shard-tokens=300")
    tokenizer, table = SOURCES[source]
    Path("job.toml").write_text(JOB.format(packing=packing, tokenizer=tokenizer, source=table))
    rows = Rows()
    Trainer(load_job("job.toml"), hooks=[rows], echo=lambda text: None).run()
    shown = json.loads(forge_run("data", "runs/traced/job.toml", "--step=3", "--documents", "--json", "--measure=1"))
    assert {passage["sample"] for passage in shown["documents"]} == {0, 1, 2, 3}
    covered = [0] * 4
    for passage in shown["documents"]:
        origin = passage["origin"]
        document = json.loads(Path(origin["file"]).read_text().splitlines()[origin["line"] - 1])
        assert origin["kept"] == ({} if source == "text" else {"id": document["id"]})
        ids = [*document["text"].encode(), 256][passage["from_token"] :][: passage["tokens"]]
        # The last one of a row, or of a document that is packed, is a label alone
        inputs = rows.steps[2][passage["sample"]][passage["position"] :][: len(ids)]
        assert len(inputs) >= len(ids) - 1
        assert inputs[: len(ids) - 1] == ids[: len(inputs)][: len(ids) - 1]
        covered[passage["sample"]] += len(ids)
    if packing != "best_fit":
        assert covered == [25] * 4


def test_texts_of_a_sample_have_the_place_that_each_comes_from(forge_run: Callable[..., str]) -> None:
    forge_run("data", "prepare", "web", "--out=data", "--tokenizer=bytes", "--workers=1")
    Path("job.toml").write_text(JOB.format(packing="concatenate", tokenizer="bytes", source=SOURCES["memmap"][1]))
    out = forge_run("data", "job.toml", "--step=2")
    documents = [line for line in out.splitlines() if line.startswith("web/")]
    texts = [out.split(line)[1] for line in documents]
    assert documents
    for place, text in zip(documents, texts, strict=True):
        name = place.partition("(id ")[2].partition(")")[0].replace("-", "")
        assert name in text


def test_samples_whose_documents_are_not_known_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    source = 'type = "forge_testing:Numbers"'
    Path("job.toml").write_text(JOB.format(packing="concatenate", tokenizer="bytes", source=source))
    assert main(["data", "job.toml", "--documents"]) == 2
    assert "--documents" in capsys.readouterr().err
