"""`forge-run check --data`: how many documents exceed a row's room, by headers alone."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from forge_testing.refusals import lacks

KEYS = (
    "--data.sources.0.held_out_every=3",
    "--model.vision.patches_per_sequence=12",
    "--model.vision.encoder.position_interpolation=bilinear",
)
PAIRS = [([2], 5), ([6], 30), ([2, 3, 4], 1), ([6, 6], 20), ([1], 0)]
"""Of each document: patches of its images, and letters."""
NEEDS = {"positions": [7, 36, 10, 32, 1], "patches": [2, 6, 9, 12, 1], "images": [1, 1, 3, 2, 1]}


@pytest.fixture
def check(run_check: Any) -> Any:
    """Run `forge-run check job.toml --data …` on documents whose images have headers only."""
    lines = []
    for number, (images, letters) in enumerate(PAIRS):
        names = [f"{number}-{place}.png" for place in range(len(images))]
        for name, patches in zip(names, images, strict=True):
            Image.new("RGB", (8 * patches, 8)).save(name)
            Path(name).write_bytes(Path(name).read_bytes()[:50])
        lines.append({"image": names, "text": "x" * letters})
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return partial(run_check, "--data", *KEYS)


@pytest.mark.parametrize("too_long", ["skip", "cut"])
def test_each_budget_says_how_many_documents_need_more(check: Any, too_long: str) -> None:
    code, out, err = check("--json", f"--data.sources.0.too_long={too_long}")
    assert (code, err) == (0, ""), out
    measured = json.loads(out)["data"]["0"]
    assert (measured["documents"], measured["over"], measured["first"]) == (5, 3, "pairs.jsonl:2")
    for budget, room in zip(measured["budgets"], (30, 12, 2), strict=True):
        needs = NEEDS[budget["name"]]
        assert (budget["room"], budget["largest"]) == (room, max(needs))
        assert budget["over"] == sum(need > room for need in needs)


def row_of(out: str, budget: str) -> str:
    """The line of a report that is about this budget."""
    [row] = [line for line in out.splitlines() if line.strip().startswith(f"{budget}:")]
    return row


def test_what_training_would_refuse_is_refused_after_the_numbers(check: Any) -> None:
    code, out, err = check()
    assert code == 2
    # Of each budget: documents that need more than a row has, what a row has, and the most needed
    positions, patches = (row_of(out, budget) for budget in ("positions", "patches"))
    assert not lacks(positions, 2, "train.seq_len = 30", 36)
    assert not lacks(patches, "none", "model.vision.patches_per_sequence = 12", 12)
    assert not lacks(err, "data.sources.0", "3 of 5", "train.seq_len", "model.vision.images_per_sequence")
    assert check("--train.seq_len=40", "--model.vision.images_per_sequence=3")[0] == 0


def test_images_that_are_no_images_are_named(check: Any) -> None:
    Path("1-0.png").write_bytes(b"no image")
    code, _, err = check()
    assert code == 2
    assert "pairs.jsonl:2" in err
    assert "1-0.png" in err
    code, out, err = check("--data.sources.0.unreadable=skip", "--data.sources.0.too_long=skip")
    assert (code, err) == (0, "")
    assert not lacks(row_of(out, "positions"), 1, "train.seq_len = 30", 32)
