"""Whole training steps: the 8B job of `configs/` at sequence 4096, and mixtures of experts beside a dense model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpu.bench import Bench, machine, piece
from gpu.runs import RANDOM_TOKENS, REPOSITORY, decoder, experts, load, steps_of

CONFIG = REPOSITORY / "configs" / "llama-8b-4gpu.toml"
STAGES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "float8-tensorwise": {"float8": {"recipe": "tensorwise"}},
    "float8-rowwise": {"float8": {"recipe": "rowwise"}},
}
GOALS = {"bf16": 13_100, "float8-tensorwise": 15_700, "float8-rowwise": 15_700}
"""Tokens a second of the 8B job on one H200 that are to be reached."""
OF_GOALS = "H200"
ACTIVE = 5632
"""Width of the feed-forward part that a token meets, of all three decoders beside each other."""


def dense(bench: Bench, name: str, stages: dict[str, Any]) -> None:
    """The job as it is, but for its length, what it is read from, and what one GPU's memory asks for: all activations
    computed again, and the loss in smaller chunks."""
    vocabulary = bench.size(128_256, 256)
    sections: dict[str, Any] = {
        "job": {"name": "llama-8b", "output": str(bench.folder)},
        "train": {
            "seq_len": bench.size(4096, 64),
            "micro_batch_size": 1,
            "global_batch_size": bench.size(8, 2),
            "device": bench.device.type,
            "dry_run": "never",
        },
        "data": {"sources": [{"type": RANDOM_TOKENS, "vocab_size": vocabulary, "sequences": 32}]},
        "loss": {"chunk_tokens": 1024},
        "parallel": {"activation_checkpointing": {"mode": "full"}, **stages},
    }
    if bench.tiny:
        small = {"dim": 64, "layers": 2, "vocab_size": vocabulary, "ffn": {"hidden": 128}}
        sections["model"] = {**small, "attention": {"heads": 4, "kv_heads": 2}}
        sections["parallel"]["compile"] = {"backend": "eager"}
    speed = _measure(bench, sections, [CONFIG], job=name)
    if OF_GOALS in str(machine(bench.device).get("gpu")) and not bench.tiny:
        bench.row("goal", tokens_per_s=speed, goal=GOALS[name], reached=speed >= GOALS[name])


def mixture(bench: Bench, number: int, chosen: int) -> None:
    """Experts against a dense decoder with the same FLOPs, in one process: 16 layers of width 2,048."""
    dense_speed = _measure(bench, _decoder(bench, {"hidden": bench.size(ACTIVE, 64 * chosen)}), [], job="dense")
    ffn = experts(number, chosen, bench.size(ACTIVE // chosen, 64))
    ffn["router"]["batch_balance"] = 0.01
    speed = _measure(bench, _decoder(bench, ffn), [], job=f"{chosen} of {number} experts")
    bench.row(
        "against a dense model with the same active FLOPs", experts=number, of_a_token=chosen, ratio=speed / dense_speed
    )


def _decoder(bench: Bench, ffn: dict[str, Any]) -> dict[str, Any]:
    """Tokens meet 1.2 billion weights."""
    model: dict[str, Any] = {"dim": bench.size(2048, 64), "layers": bench.size(16, 2)}
    model["attention"] = {"heads": bench.size(16, 4), "kv_heads": bench.size(8, 2)}
    train = {
        "seq_len": bench.size(4096, 64),
        "micro_batch_size": bench.size(4, 2),
        "global_batch_size": bench.size(16, 4),
    }
    stages = {"activation_checkpointing": {"mode": "selective"}, "compile": {}}
    if bench.tiny:
        stages.pop("compile")  # the piece `compile` traces such blocks
    sections = decoder(bench, model=model, train=train, parallel=stages)
    sections["model"]["ffn"] = ffn
    return sections


def _measure(bench: Bench, sections: dict[str, Any], files: list[Any], job: str) -> float:
    """Measures steps of a job; returns its tokens a second."""
    bench.reset_peak()
    torch.compiler.reset()  # graphs of the jobs before it, in one process
    with steps_of(load(bench, sections, files)) as steps:
        speed = steps.speed(bench, bench.size(6, 1), bench.size(2, 1))
        loss, norm = (float(value) for value in steps())
        peak = bench.peak_bytes()
        bench.check(loss == loss and norm == norm, f"loss {loss}, gradient norm {norm}")
        bench.row(
            "steps",
            job=job,
            parameters=sum(steps.run.outline.sizes.values()),
            tokens_a_step=steps.job.train.global_batch_size * steps.job.train.seq_len,
            **speed,
            **steps.utilisation(speed["tokens_per_s"]),
            peak_gb=None if peak is None else peak / 1e9,
            loss=loss,
        )
        for stage, built in zip(steps.run.stages, steps.run.built_stages, strict=True):
            bench.notes.append(f"{stage.name}: {built.describe()}")
        bench.notes += [f"{what}: {choice} ({why})" for what, choice, why in steps.run.outline.backend_choices]
        return speed["tokens_per_s"]


for _name, _stages in STAGES.items():
    _requires = ["torchao"] if _stages else []
    piece(
        f"dense-8b-{_name}",
        f"the 8B job at sequence 4096 in {_name}: tokens a second, MFU, memory",
        requires=_requires,
        checks=False,
    )(partial(dense, name=_name, stages=_stages))
for _number, _chosen in ((8, 2), (64, 8)):
    piece(
        f"experts-{_number}",
        f"{_number} experts, {_chosen} of a token, against a dense model with the same active FLOPs",
        checks=False,
    )(partial(mixture, number=_number, chosen=_chosen))
