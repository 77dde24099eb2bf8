"""Runs that were recorded while forge-plugin-images offered `answers`, and forge-plugin-vision `looking`."""

from __future__ import annotations

import json

import pytest

from forge_core import Trainer, load_model
from forge_core.cli import main
from forge_core.plugins.catalog import Catalog
from forge_plugin_images import RenderedText
from forge_plugin_text import Bytes
from forge_plugin_vlm_eval import Answers, Looking
from forge_testing import tiny_job
from forge_testing.images import tiny_model

OLD = {"answers": "forge-plugin-images", "looking": "forge-plugin-vision"}


@pytest.fixture
def earlier_run(tmp_path, catalog, monkeypatch):
    """The folder of a run of two steps whose job, provenance and manifests are of that time."""
    monkeypatch.chdir(tmp_path)
    data = {"sources": (RenderedText(held_out=6, length=(3, 4), text_size=(5, 5)),), "tokenizer": Bytes()}
    evaluations = {"answers": Answers(sequences=3, shown=1, max_tokens=2), "looking": Looking()}
    job = tiny_job("runs", catalog, data=data, model=tiny_model(), seq_len=24, steps=2, evaluations=evaluations)
    folder = Trainer(job, catalog=catalog, echo=lambda text: None).run().folder
    for path in (folder / "job.toml", folder / "provenance.json", *folder.glob("checkpoints/*/manifest.json")):
        text = path.read_text()
        for type_, distribution in OLD.items():
            text = text.replace(f"forge-plugin-vlm-eval/{type_}", f"{distribution}/{type_}")
        if path.suffix == ".json":
            record = json.loads(text)
            record.get("provenance", record)["distributions"].pop("forge-plugin-vlm-eval")
            text = json.dumps(record)
        assert "vlm-eval" not in text
        assert all(f"{distribution}/{type_}" in text for type_, distribution in OLD.items())
        path.write_text(text)
    return folder


def test_it_continues_and_evaluates_without_a_word_about_its_types(earlier_run, capsys):
    assert main(["resume", str(earlier_run), "--train.steps=3"]) == 0
    output = "".join(capsys.readouterr())
    assert "forge-plugin-images/answers" not in output
    assert "forge-plugin-vision/looking" not in output
    lines = [json.loads(line) for line in (earlier_run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if {"answers/exact", "looking/bits"} <= line.keys()]
    assert steps == [2, 3]
    recorded = json.loads((earlier_run / "provenance.json").read_text())
    assert recorded["components"]["evaluations.answers"] == "forge-plugin-vlm-eval/answers"
    assert "forge-plugin-vlm-eval" in recorded["distributions"]


def test_it_is_shown_and_loaded(earlier_run, capsys):
    assert main(["show", str(earlier_run)]) == 0
    assert not capsys.readouterr().err
    assert load_model(earlier_run) is not None


def test_the_old_distributions_keep_their_other_types():
    catalog = Catalog.installed()
    for name in ("forge-plugin-images/image_text", "forge-plugin-vision/vision_language", *OLD.values()):
        assert catalog.as_spelled_now(name) == name
