"""`configs/video.toml`, with fewer clips and steps, as its reader would start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[3]
SHORTER = {"train.steps": 4, "eval.interval": 4, "scheduler.warmup_steps": 1, "data.sources.0.drawings": 1}
SHORTER |= {"data.sources.0.held_out_drawings": 1, "evaluations.answers.sequences": 6, "evaluations.answers.shown": 4}


def test_the_quickstart_ends_with_its_answers_and_a_picture_of_film_strips(tmp_path):
    settings = [f"--{key}={value}" for key, value in SHORTER.items()]
    command = [sys.executable, "-m", "forge_core", str(ROOT / "configs" / "video.toml"), *settings]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "FORGE_CACHE": str(tmp_path / "cache")}, check=True)
    lines = map(json.loads, (tmp_path / "runs" / "video" / "metrics.jsonl").open())
    [last] = [line for line in lines if "answers/exact" in line]
    assert {f"answers/{name}" for name in ("letters", "still_exact", "shuffled_exact")} <= last.keys()
    assert {f"looking/{name}" for name in ("bits", "time_bits", "motion_bits")} <= last.keys()
    with Image.open(tmp_path / "runs" / "video" / "answers.png") as picture:
        assert (picture.width, picture.height) == (2 * (488 + 8) + 8, 2 * (57 + 5 * 16 + 8) + 32)
