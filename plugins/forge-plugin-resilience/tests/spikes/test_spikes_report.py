"""Spikes in `forge-run report`: which steps, and of which documents they were made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_plugin_resilience.spikes import report_section
from forge_testing.refusals import lacks

AT = 14
POISON = f"""
from attrs import define
from forge_core import TrainingHook

@define(kw_only=True, slots=False)
class Poison(TrainingHook):
    '''Gradients of one step are far too large.'''

    def on_step_begin(self, context):
        if context.step == {AT}:
            weight = next(context.model.parameters())
            self.handle = weight.register_hook(lambda gradient: gradient * 1e6)

    def on_step_end(self, context):
        if context.step == {AT}:
            self.handle.remove()
"""
JOB = """
[job]
name = "spiked"
[train]
steps = 16
global_batch_size = 4
seq_len = 32
device = "cpu"
[model]
type = "transformer"
dim = 16
layers = 1
attention = { heads = 2 }
[optimizer]
type = "adamw"
[data.tokenizer]
type = "prepared"
path = "data"
[[data.sources]]
type = "memmap"
path = "data"
[hooks.spikes]
window = 8
warmup_steps = 0
threshold = 50.0
action = "skip"
[hooks.poison]
type = "./poison.py:Poison"
"""
Run = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of a run with a spike."""
    folder = tmp_path_factory.mktemp("spiked")
    lines = [json.dumps({"text": f"document {number} | of many", "id": f"doc-{number}"}) for number in range(120)]
    (folder / "web.jsonl").write_text("\n".join(lines))
    (folder / "poison.py").write_text(POISON)
    (folder / "job.toml").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FORGE_CACHE", str(folder / "cache"))
        assert main(["data", "prepare", "web.jsonl", "--out=data", "--tokenizer=bytes", "--workers=1"]) == 0
        assert main(["job.toml"]) == 0
        yield folder


@pytest.fixture
def report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The section of the report on a run in this folder, as Markdown."""
    monkeypatch.chdir(folder)

    def run(name: str) -> str:
        assert main(["report", name, "--sections=spikes", "--format=md", "--out=report.md"]) == 0
        return Path("report.md").read_text()

    return run


def test_each_document_of_a_spiked_step_is_listed(report: Run, capsys: pytest.CaptureFixture[str]) -> None:
    text = report("runs/spiked")
    [spike] = [line for line in text.splitlines() if "skipped" in line]
    assert spike.split("|")[1].strip() == str(AT)
    capsys.readouterr()
    main(["data", "runs/spiked/job.toml", f"--step={AT}", "--documents", "--json"])
    documents = json.loads(capsys.readouterr().out)["documents"]
    assert len({each["document"] for each in documents}) > 4
    for each in documents:
        origin = each["origin"]
        row = [each["sample"], each["position"], each["tokens"], "web.jsonl", origin["line"], origin["kept"]["id"]]
        assert f"| {' | '.join(map(str, row))} |" in text
    # No other document
    assert text.count("web.jsonl") == len(documents)


def test_what_is_listed_is_bounded(report: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_section, "DOCUMENTS", 3)
    text = report("runs/spiked")
    assert text.count("web.jsonl") == 3
    assert not lacks(text, "3 of", f"forge-run data runs/spiked/job.toml --step {AT}", "--documents")


def test_without_the_data_the_spikes_are_shown(report: Run, folder: Path) -> None:
    shutil.copytree("runs/spiked", "runs/moved")
    job = Path("runs/moved/job.toml")
    job.write_text(job.read_text().replace('path = "data"', 'path = "gone"'))
    assert not lacks(report("runs/moved"), "skipped", "not known here", "gone")


def test_a_run_without_spikes_has_no_section(report: Run) -> None:
    shutil.copytree("runs/spiked", "runs/calm")
    job = Path("runs/calm/job.toml")
    job.write_text(job.read_text().replace("threshold = 50.0", "threshold = 1e9"))
    assert "Spikes" not in report("runs/calm")
