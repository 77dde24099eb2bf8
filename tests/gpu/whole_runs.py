"""Whole runs of the job files in `jobs/`, each on top of what earlier ones have written, on any device.

Tests call `train_all` once in a process with the pretended device, and once in one without it: most of the cost of a
short run is its process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

from attrs import define, field, frozen

from forge_core import Catalog, Job, Trainer, TrainingHook, load_job
from forge_core.config.load import read_job, structure
from forge_testing.pretend import reset_waits, waits

HERE = Path(__file__).parent


@frozen
class Recipe:
    """A job: files in `jobs/`, each over the one before, and keys of the command line."""

    files: Sequence[str]
    keys: Mapping[str, Any] = field(factory=dict)

    ranks: int = 1
    stops: bool = False
    """Whether it stops in the middle and is continued, on a device."""

    @property
    def sources(self) -> list[Path]:
        return [HERE / "jobs" / f"{file}.toml" for file in self.files]

    def job(self, name: str, device: str, stop_after: int = 0) -> Job:
        """Reads it, with paths relative to the working directory."""
        overrides = {"job.name": name, "train.device": device, **self.keys}
        overrides |= {"train.stop_after": stop_after} if stop_after else {}
        return load_job(*self.sources, overrides=overrides, world_size=self.ranks)

    def unchecked(self) -> Job:
        """Reads it without a look at the files that it names, which runs before it write."""
        job, findings = structure(read_job(self.sources, self.keys)[0], Job, Catalog.installed())
        assert not findings.problems, findings.problems
        return job


def _preference(loss: str, **keys: Any) -> Recipe:
    return Recipe(["preferences"], {"loss.type": loss} | {key.replace("__", "."): value for key, value in keys.items()})


BASE = "runs/watched"
STEPS_ALONE = {"train.steps": 5, "eval.interval": 0, "checkpoint.interval": 0}
RECIPES: Mapping[str, Recipe] = {
    "text": Recipe(["text"]),
    "lion": Recipe(["text"], {"optimizer.type": "lion", "plugins.mup.base.dim": 16, **STEPS_ALONE}),
    "soap": Recipe(
        ["text"],
        {"optimizer.type": "soap", "optimizer.precondition_frequency": 1, "train.non_finite": "ignore", **STEPS_ALONE},
    ),
    "watched": Recipe(["text", "watched"], stops=True),
    "edited": Recipe(["text", "edited"]),
    "adapted": Recipe(["text", "adapted"]),
    "distilled": Recipe(["text", "distilled"]),
    "rotated": Recipe(["rotated"]),
    "float8": Recipe(["float8"]),
    "dpo": _preference("dpo", loss__reference=BASE),
    "ipo": _preference("ipo", loss__reference=BASE),
    "kto": _preference("kto", loss__reference=BASE, data__sources__0__unpair=True),
    "simpo": _preference("simpo"),
    "orpo": _preference("orpo"),
    "reward": Recipe(["preferences", "reward"]),
    "grpo": Recipe(["grpo"]),
    "images": Recipe(["images"]),
    "features": Recipe(["images", "features"]),
    "video": Recipe(["video"]),
    "ranks": Recipe(["text", "ranks"], ranks=2),
}
"""In this order: later ones read what earlier ones have written."""
ALONE = tuple(name for name, recipe in RECIPES.items() if recipe.ranks == 1)

OF_TIME = ("time", "seconds", "_s", "_gb", "wait", "counts", "tokens_per_s", "mfu", "goodput", "disk")
"""Parts of the names of metrics that are different in each run."""
COUNTED_STEP = 4
"""Neither the first ones, in which caches are filled, nor one that evaluates or saves."""


@frozen
class Outcome:
    """What a run said and logged."""

    error: str = ""
    """The traceback, if it failed."""
    declared: str = ""
    """The line `waits` of its summary."""
    counted: Mapping[str, int] = field(factory=dict)
    """How often the host waited in one step, by file and line, if the run has so many steps."""
    lines: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics, without what is of time or memory."""


@define(kw_only=True, slots=False)
class CountsWaits(TrainingHook):
    """Counts the host's waits from the beginning of a step to that of the next one."""

    resumes_as = "safe"

    def __attrs_post_init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def on_step_begin(self, context: Any) -> None:
        if context.step == COUNTED_STEP:
            reset_waits()
        elif context.step == COUNTED_STEP + 1:
            for (_, where), count in waits().items():
                self.counted[where.rpartition("/")[2]] += count


def train_all(folder: str, device: str, names: Sequence[str] = ALONE) -> dict[str, Outcome]:
    """Trains jobs one after another in a folder of data; one that fails does not end the others."""
    os.chdir(folder)
    return {name: _outcome(name, RECIPES[name], device) for name in names}


def _outcome(name: str, recipe: Recipe, device: str) -> Outcome:
    said: list[str] = []
    hook = CountsWaits()
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if recipe.stops and device != "cpu":
                Trainer(recipe.job(name, device, stop_after=3), echo=lambda text: None).run()
            summary = Trainer(recipe.job(name, device), hooks=[hook], echo=said.append).run()
    except Exception:
        return Outcome(error=traceback.format_exc())
    declared = next((line for text in said for line in text.splitlines() if line.startswith("waits ")), "")
    return Outcome("", declared.removeprefix("waits").strip(), dict(hook.counted), lines_of(summary.folder))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics of a run, without what is of time or memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not any(word in key for word in OF_TIME)} for line in lines]


def write_data(folder: Path) -> None:
    """Texts, photos, clips, pairs of answers, prompts and questions, a few of each."""
    from PIL import Image

    from forge_testing.clips import write_clip

    for name in ("text", "photos", "clips"):
        (folder / name).mkdir(parents=True)
    for number in range(4):
        (folder / "text" / f"{number}.txt").write_text(f"the {number}th quick brown fox jumps over the lazy dog. " * 40)
    (folder / "held").write_text("text/3.txt\n")
    random = Random(0)
    for number in range(12):
        colour = random.choice(["red", "green", "blue"])
        Image.new("RGB", (random.randint(40, 80), random.randint(40, 80)), colour).save(folder / f"photos/{number}.png")
        (folder / f"photos/{number}.txt").write_text(colour)
    for number in range(8):
        write_clip(folder / f"clips/{number}.mp4", 6)
        (folder / f"clips/{number}.txt").write_text(f"clip {number}")
    sums = [(f"{number}+1=", f" {number + 1}") for number in range(12)]
    _write(folder / "pairs.jsonl", [{"prompt": sum, "chosen": right, "rejected": " well"} for sum, right in sums])
    _write(folder / "prompts.jsonl", [{"prompt": sum, "answer": right.strip()} for sum, right in sums])
    _write(folder / "questions.jsonl", [{"context": "1+1=", "choices": [" 2", " 3"], "answer": 0}])


def _write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
