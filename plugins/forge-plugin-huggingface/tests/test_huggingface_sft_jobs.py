"""Job files for supervised fine-tuning, as users write them: whole and as a stream, and continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from forge_core import load_job
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import DataError
from forge_testing.refusals import refuses

PARTS = """
from attrs import frozen
from forge_testing import TinyModel
from forge_testing.tiny_model import TinyNetwork


@frozen(kw_only=True)
class Wide(TinyModel):
    def build(self, context):
        return TinyNetwork(self.dim, self.layers, self.dropout, 330, context.dtype)
"""
JOB = """
[job]
name = "sft"
output = "runs"
[train]
steps = 6
global_batch_size = 4
seq_len = 24
precision = "fp32"
[model]
type = "./parts.py:Wide"
[optimizer]
type = "forge_testing:TinyAdamW"
[[data.sources]]
type = "huggingface"
path = "data"
"""
BYTES = '[data.tokenizer]\ntype = "bytes"\n'
AUTO = '[data.tokenizer]\ntype = "auto"\npath = "tokenizer"\n'
STREAM = "streaming = true\nlanes = 2\n"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat(number: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"hello {number}"},
        {"role": "assistant", "content": "hello world", "train": number % 2 == 0},
        {"role": "user", "content": "text?"},
        {"role": "assistant", "content": f"text to train on {number}"},
    ]


ROWS = {
    "pairs": [{"q": f"question {n} ", "a": f"answer {n}" * (1 + n % 3)} for n in range(24)],
    "chat pairs": [{"q": chat(n)[:3], "a": chat(n)[3:]} for n in range(24)],
    "chats": [{"messages": chat(n)} for n in range(24)],
}
CASES = {
    "completions": ("pairs", 'prompt = "q"\ncompletion = "a"\n' + BYTES),
    "completions of messages": ("chat pairs", 'prompt = "q"\ncompletion = "a"\n' + AUTO),
    "flags": ("chats", 'messages = "messages"\n' + AUTO),
    "last turn": ("chats", 'messages = "messages"\nlearn = "last"\n' + AUTO),
    "drop": ("pairs", 'prompt = "q"\ncompletion = "a"\ntoo_long = "drop"\n' + BYTES),
    "truncate": ("pairs", 'prompt = "q"\ncompletion = "a"\ntoo_long = "truncate"\n' + BYTES),
}


@define(kw_only=True, slots=False)
class StopAfter(TrainingHook):
    """Asks to stop after a step."""

    step: int

    def on_step_end(self, context: Any) -> None:
        if context.step == self.step:
            context.request_stop("enough")


@pytest.fixture
def here(write, pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and a tokenizer."""
    (tmp_path / "parts.py").write_text(PARTS)
    pretrained(CHATML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def job_of(here: Path, write, catalog):
    """Writes rows and a job file: (case, streaming, overrides) -> the job."""

    def make(case: str, streaming: bool = False, *overrides: str) -> Any:
        rows, keys = CASES[case]
        write("jsonl", ROWS[rows])
        head, tail = keys.split("[data.tokenizer]")
        (here / "job.toml").write_text(JOB + head + STREAM * streaming + "[data.tokenizer]" + tail)
        return load_job("job.toml", catalog=catalog, overrides=overrides)

    return make


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_a_job_file_trains_and_continues_exactly(job_of, train, lines, case: str, streaming: bool) -> None:
    whole = lines(train(job_of(case, streaming)))
    train(job_of(case, streaming, "job.name=cut"), StopAfter(step=3))
    resumed = lines(train(job_of(case, streaming, "job.name=cut")))
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
    assert len(whole) == 6
    assert all(line["loss"] > 0 for line in whole)


def test_the_summary_of_a_run_counts_rows_and_learned_tokens(job_of, train, here: Path) -> None:
    train(job_of("drop"))
    rows = [line for line in (here / "runs/sft/plan.txt").read_text().splitlines() if line.startswith("rows")]
    # `question 0 answer 0` has 19 bytes and an end, of which 9 are learned; a second answer makes 28: of three rows,
    # one fits
    expected = "8 documents, 45.2% of 168 tokens learned; 16 rows longer than train.seq_len dropped (too_long = drop)"
    assert [row.split(maxsplit=2)[2] for row in rows] == [expected]


def test_forge_run_data_counts_them_too_and_by_source(job_of, here: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("forge_plugin_plan.data_view")
    from forge_core.cli import main

    job_of("drop")
    text = (here / "job.toml").read_text()
    source = text[text.index("[[data.sources]]") : text.index("[data.tokenizer]")]
    (here / "job.toml").write_text(text.replace(source, source + source + STREAM))
    assert main(["data", "job.toml", "--json"]) == 0
    whole, stream = json.loads(capsys.readouterr().out)["sources"]
    assert whole["rows"].startswith("8 documents, 45.2% of 168 tokens learned; 16 rows")
    assert stream["rows"].startswith("of 48 rows that were read: 16 documents")
    assert all(0.2 < source["learned"] < 0.7 for source in (whole, stream))


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
def test_a_run_whose_first_step_learns_nothing_ends_and_names_the_source(job_of, write, train, streaming: bool) -> None:
    job = job_of("completions", streaming, "data.sources.0.name=pairs", "train.global_batch_size=2")
    rows = [{"q": "a prompt that is longer than two sequences are " * 3, "a": "yes"}] * 4
    write("jsonl", rows)
    with pytest.raises(DataError) as error:
        train(job)
    assert all(fact in str(error.value) for fact in ("first global batch", "'pairs'", "train.seq_len = 24", "too_long"))


def test_a_job_with_two_ways_to_read_rows_is_refused_before_it_starts(job_of) -> None:
    with refuses("data.sources.0.prompt", "messages = 'messages'"):
        job_of("flags", False, "data.sources.0.prompt=q", "data.sources.0.completion=a")
