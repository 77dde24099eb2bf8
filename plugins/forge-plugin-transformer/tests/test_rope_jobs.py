"""Position encodings from job files: they train, generate, and mistakes are found by the check."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core import load_job
from forge_core.cli import main
from forge_testing.refusals import ExpectedProblem, at, refuses_all

JOB = """
[job]
name = "run"
output = "runs"

[model]
type = "transformer"
dim = 32
layers = 2

[model.attention]
type = "gqa"
heads = 4

[model.attention.rope]
{rope}

[train]
steps = 2
global_batch_size = 2
seq_len = 16
device = "cpu"

[optimizer]
type = "adamw"

[data.tokenizer]
type = "bytes"

[[data.sources]]
type = "text"
path = "text.txt"
held_out_every = 0

[checkpoint]
interval = 2
"""
LONG = 'type = "longrope"\noriginal_max_position_embeddings = 8\nfactor = 4.0\n'
ROPES = {
    "partial": 'type = "plain"\npartial_rotary_factor = 0.25',
    "proportional": 'type = "proportional"\npartial_rotary_factor = 0.25\nfactor = 2.0',
    "longrope": LONG + "short_factor = [1.0, 1.0, 1.1, 1.2]\nlong_factor = [1.0, 2.0, 4.0, 8.0]",
    "partial longrope": LONG + "partial_rotary_factor = 0.5\nshort_factor = [1.0, 1.2]\nlong_factor = [1.0, 8.0]",
    "dynamic": 'type = "dynamic"\noriginal_max_position_embeddings = 8\nfactor = 2.0',
    "none": 'type = "none"',
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 20)
    return tmp_path


@pytest.mark.parametrize("rope", ROPES.values(), ids=list(ROPES))
def test_they_train_and_generate_with_a_cache_and_without(rope: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text(JOB.format(rope=rope))
    assert main(["run", "job.toml"]) == 0
    capsys.readouterr()
    said = []
    for options in ([], ["--no-cache"]):
        # From 4 positions to 14, past the 8 of the original length.
        asked = ["--prompt", "the ", "--max-tokens", "10", "--temperature", "0", *options]
        assert main(["generate", "runs/run", *asked]) == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith("the ")
    if "dynamic" not in rope:  # whose cached keys keep the frequencies that they had
        assert said[0] == said[1]


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (
            'type = "plain"\npartial_rotary_factor = 0.4',
            [at("model.attention.rope.partial_rotary_factor", 0.4, 8, 3, "pairs")],
        ),
        ('type = "plain"\npartial_rotary_factor = 1.5', [at("model.attention.rope.partial_rotary_factor", 1.5)]),
        (
            LONG + "short_factor = [1.0, 1.0]\nlong_factor = [1.0, 2.0, 4.0, 8.0]",
            [at("model.attention.rope.short_factor", 2, 8, 4, "pairs")],
        ),
        (
            LONG,
            [at("model.attention.rope.short_factor", "missing"), at("model.attention.rope.long_factor", "missing")],
        ),
    ],
)
def test_mistakes_are_found_by_the_check(rope: str, expected: list[ExpectedProblem]) -> None:
    Path("job.toml").write_text(JOB.format(rope=rope))
    with refuses_all(*expected):
        load_job("job.toml")
    assert main(["check", "job.toml"]) == 2
