"""Jobs of preference losses on a small transformer in float64, with a reference that was trained on other text."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attrs import evolve, frozen

from forge_core.engine.evaluation import HeldOut
from forge_core.engine.trainer import Trainer
from forge_core.job import Job
from forge_plugin_moe import MoE
from forge_plugin_preference import KTO, Pairs, Preferences
from forge_plugin_preference.hooks import AdaptersOff, Baseline
from forge_plugin_text import Bytes, Text
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Curve, Training

DENSE = Transformer(vocab_size=258, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2))
EXPERTS = evolve(DENSE, ffn=MoE(experts=4, hidden=16))
LENGTH = 64


def pair_lines(count: int = 44, **further: Any) -> list[dict[str, Any]]:
    """Pairs of answers of many lengths, the shorter one chosen."""
    return [
        {
            "prompt": f"{'again ' * (n % 3)}{n}? ",
            "chosen": "yes" * (n % 2 + 1),
            "rejected": f"no, {n}" + "!" * (n % 5),
            **further,
        }
        for n in range(count)
    ]


def single_lines(count: int = 60) -> list[dict[str, Any]]:
    """Single answers with a label, which is true for two of three."""
    pairs = pair_lines(count)
    kinds = ["rejected" if n % 3 == 0 else "chosen" for n in range(count)]
    return [
        {"prompt": line["prompt"], "completion": line[kind], "label": kind == "chosen"}
        for line, kind in zip(pairs, kinds, strict=True)
    ]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


@frozen
class Prepared:
    """Files that all runs of a session use, and that ranks inherit."""

    pairs: str
    single: str
    reference: str
    experts: str


@functools.cache
def prepared() -> Prepared:
    """Train the references, once a session."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Of characters that no answer has, which makes answers less likely than under a model that begins: KTO's z is then
    # positive, and shows in the loss
    (folder / "text.txt").write_text("#&% @$& %@#$ " * 80)
    names = {"reference": DENSE, "experts": EXPERTS}
    for name, model in names.items():
        data = {"tokenizer": Bytes(), "sources": (Text(path=str(folder / "text.txt")),)}
        settings: dict[str, Any] = {"steps": 3, "seq_len": 16, "precision": "fp64", "job": {"name": name, "seed": 5}}
        job = tiny_job(str(folder), installed(), model=model, data=data, **settings)
        Trainer(job, catalog=installed(), echo=lambda text: None).run()
    pairs, single = (
        write_lines(folder / "pairs.jsonl", pair_lines()),
        write_lines(folder / "single.jsonl", single_lines()),
    )
    return Prepared(pairs, single, *(str(folder / name) for name in names))


def preference_job(folder: Path, loss: Any, *, experts: bool = False, **changes: Any) -> Job:
    """A job that learns from the prepared answers; `loss` may be a class, to which the reference is given."""
    if isinstance(loss, type):
        loss = loss(reference=prepared().experts if experts else prepared().reference, beta=0.5)
    settings: dict[str, Any] = {
        "steps": 3,
        "precision": "fp64",
        "global_batch_size": 8,
        "seq_len": LENGTH,
        "evaluations": {"held_out": HeldOut(), "preferences": Preferences()},
        "model": EXPERTS if experts else DENSE,
    }
    if "data" not in changes:
        path = prepared().single if isinstance(loss, KTO) else prepared().pairs
        source = Pairs(path=path, held_out_every=5, row_examples=4)
        settings["data"] = {"tokenizer": Bytes(), "sources": (source,)}
    return tiny_job(str(folder), installed(), loss=loss, **settings | changes)


@frozen
class WithHooks:
    """A loader after which the hooks of a loss add to batches, as in the run loop."""

    run: Any
    loader: Any

    def next_step(self) -> list[Any]:
        batches = self.loader.next_step()
        context: Any = SimpleNamespace(
            build=self.run.context, executor=self.run.executor, model=self.run.model, batches=batches
        )
        for hook in self.run.job.loss.training_hooks(self.run.job):
            if isinstance(hook, AdaptersOff | Baseline):
                hook.on_step_begin(context)
        return batches

    def close(self) -> None:
        self.loader.close()


def curve(job: Job) -> Curve:
    """Train a job from the start, with the hooks of its loss that add to batches. Collective."""
    with Training.of(job, installed()) as training:
        training = evolve(training, loader=WithHooks(training.run, training.loader))
        return training.curve(job.train.steps)


def observe(loss: Any, *, experts: bool = False) -> Any:
    """An `observe` of `forge_testing.laws.Case`."""

    def observed(folder: Path, changes: Mapping[str, Any]) -> Curve:
        # The second step has what the first one changed
        return curve(preference_job(folder, loss, experts=experts, **{"steps": 2, **changes}))

    return observed
