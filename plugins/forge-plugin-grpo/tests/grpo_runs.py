"""Small runs with the loss `grpo`, for its tests."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core import Trainer, TrainingHook
from forge_plugin_adamw import AdamW
from forge_plugin_grpo import GRPO, Prompts, RewardComponent
from forge_plugin_text import Bytes
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import tiny_job
from forge_testing.catalogs import installed

MODEL = Transformer(vocab_size=258, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2))


@frozen(kw_only=True)
class Even(RewardComponent):
    """Share of tokens with an even id: something that any completion has to a degree."""

    def score(self, completion: Any) -> float:
        return sum(id_ % 2 == 0 for id_ in completion.ids) / max(1, len(completion.ids))


def prompts_in(folder: Path, count: int = 12) -> Path:
    """Prompts with answers. Ranks write the same file at the same time, so it appears whole."""
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"{os.getpid()}.part"
    own.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(count)))
    return own.replace(folder / "prompts.jsonl")


def settings(folder: Path, **loss: Any) -> dict[str, Any]:
    """Settings of `tiny_job`; `loss` are further keys of the loss."""
    keys = {"rewards": {"even": Even()}, "group": 4, "max_tokens": 5, **loss}
    return {
        "model": MODEL,
        "optimizer": AdamW(lr=1e-2),
        "precision": "fp64",
        "global_batch_size": 8,
        "seq_len": 48,
        "data": {"sources": (Prompts(path=str(prompts_in(folder)), held_out_every=6),), "tokenizer": Bytes()},
        "loss": GRPO(**keys),
        "eval": {"interval": 0},
    }


def lines_of(folder: Path, changes: Any, *hooks: TrainingHook, **loss: Any) -> list[dict[str, Any]]:
    """Train for 4 steps, or continue, and return what each step has logged."""
    job = tiny_job(str(folder), installed(), **{**settings(folder, **loss), "steps": 4, **changes})
    Trainer(job, hooks=hooks, catalog=installed(), echo=lambda line: None).run()
    return logged(folder)


def logged(folder: Path) -> list[dict[str, Any]]:
    """What the steps of the run in a folder have logged."""
    [path] = folder.rglob("metrics.jsonl")
    return [record for line in path.read_text().splitlines() if "loss" in (record := json.loads(line))]


@functools.cache
def reference() -> str:
    """The folder of a run that a job can start from, or be compared with; trained once a session."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    lines_of(folder, {"steps": 2, "job": {"name": "reference", "seed": 7}})
    return str(folder / "reference")
