"""The folder that skills and tasks for assistants begin in: a job, texts, and a run of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from forge_core.cli import main

JOB = """
[job]
name = "tiny"
[train]
steps = 20
global_batch_size = 4
seq_len = 32
[model]
type = "transformer"
vocab_size = 260
dim = 32
layers = 2
attention = { heads = 4 }
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = "texts"
held_out_every = 4
[optimizer]
type = "adamw"
lr = 3e-3
[eval]
interval = 10
[checkpoint]
interval = 10
[loggers.console]
style = "off"
"""


def make_world(folder: Path) -> Path:
    """Write `job.toml` and `texts` into a folder, train the job there, and return the folder."""
    (folder / "texts").mkdir(parents=True)
    for number in range(8):
        text = "".join(f"line {i} of text {number}: the quick fox\n" for i in range(40))
        (folder / f"texts/{number}.txt").write_text(text)
    (folder / "job.toml").write_text(JOB)
    with contextlib.chdir(folder):
        if code := main(["job.toml"]):
            raise RuntimeError(f"forge-run job.toml ended with {code}")
    return folder
