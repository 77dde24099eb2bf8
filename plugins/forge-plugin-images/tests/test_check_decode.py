"""`forge-run check --decode`: every file that cannot be decoded, before a run meets it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forge_testing.refusals import lacks

DAMAGE = {2: slice(None, 300), 5: slice(0, 0), 7: slice(None, 500)}
"""Of two images of these documents, what is left of the second."""


@pytest.fixture
def check(run_check: Any) -> Any:
    """Run `forge-run check job.toml --decode …` on 40 documents of two images."""
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    for name in ("first.png", "second.png"):
        Image.fromarray(noise).save(name)
    whole = Path("first.png").read_bytes()
    for number, left in DAMAGE.items():
        Path(f"{number}.png").write_bytes(whole[left])
    names = [f"{number}.png" if number in DAMAGE else "second.png" for number in range(40)]
    Path("pairs.jsonl").write_text("\n".join(json.dumps({"image": ["first.png", n], "text": "x"}) for n in names))
    return partial(run_check, "--decode")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_damaged_file_is_named(check: Any, workers: str) -> None:
    code, out, err = check("--workers", workers)
    assert code == 2
    damaged = [f"pairs.jsonl:{number + 1}" for number in DAMAGE]
    named = [line for line in out.splitlines() if line.startswith("pairs.jsonl:")]
    assert [line.split(": ")[0] for line in named] == damaged
    [empty] = [line for line in named if line.startswith("pairs.jsonl:6: ")]
    assert not lacks(empty, "'5.png'", "empty")
    assert not lacks(out, "source 0", 40, 3)
    assert not lacks(err, "data.sources.0.unreadable", "3 of 40")


def test_damage_that_training_leaves_out_is_no_mistake(check: Any) -> None:
    skip = ("--workers=0", "--json", "--data.sources.0.unreadable=skip")
    code, out, _ = check(*skip, "--data.sources.0.max_unreadable=0.1")
    facts = json.loads(out)
    assert (code, facts["ok"]) == (0, True)
    assert (facts["decoded"]["0"]["documents"], facts["decoded"]["0"]["damaged"]) == (40, 3)
    assert [message.split(": ")[0] for message in facts["decoded"]["0"]["messages"]] == [
        f"pairs.jsonl:{number + 1}" for number in DAMAGE
    ]
    code, out, _ = check(*skip, "--data.sources.0.max_unreadable=0.05")
    [problem] = json.loads(out)["problems"]
    assert (code, problem["key"]) == (2, "data.sources.0.max_unreadable")
