"""A run that starts from a published model has the losses of one process under every layout."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import published_vision
import pytest
import tomli_w
import torch
from published_models import MODELS as LANGUAGE_MODELS
from safetensors.torch import load_file

from forge_core.config.load import parse_job
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.importing import START, import_folder
from forge_testing.processes import run_on_ranks

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "fsdp2": {"fsdp": {}},
    "tp2": {"tp": {"degree": 2}},
    "pp2": {"pp": {"degree": 2}},
    "ep2": {"fsdp": {}, "ep": {"degree": 2}},
}
MODELS: Mapping[str, Any] = {**LANGUAGE_MODELS, **published_vision.MODELS}
ALWAYS = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "llava")
STEPS = 3
IMAGES = "forge_plugin_vision.testing:RandomImages"
JOB: Mapping[str, Any] = {
    "train": {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 1, "seq_len": 24, "precision": "fp64"},
    "data": {"sources": [{"type": "forge_testing:Numbers"}]},
    "optimizer": {"type": "adamw", "lr": 1e-2},
}


def run_name(name: str) -> str:
    return name.replace(", ", "-")


def train(runs: Mapping[str, Path], output: Path, stages: Mapping[str, Any]) -> None:
    """Train each model further, as `forge-run RUN/start.toml job.toml` does."""
    for name, run in runs.items():
        export = {"architecture": name.partition(",")[0]}
        table = tomllib.loads((run / START).read_text()) | JOB
        if "vision" in table["model"]:
            table["data"] = {"sources": [{"type": IMAGES, "vocabulary": 60, "sequences": 4}]}
        table |= {
            "job": {"name": run_name(name), "output": str(output)},
            "parallel": stages,
            "hooks": {"export": export},
        }
        job = parse_job(tomli_w.dumps(table), "job.toml", Catalog.installed())
        Trainer(job, echo=lambda text: None).run()


def losses(output: Path, name: str) -> list[float]:
    records = map(json.loads, (output / run_name(name) / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def check_exports(one: Path, other: Path) -> None:
    """The weights after training, written by all ranks, are those of one process."""
    exports = [folder / f"exports/step-{STEPS}" for folder in (one, other)]
    expected, found = (load_file(folder / "model.safetensors") for folder in exports)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7, msg=f"{other}, {name}")


def has_experts(name: str) -> bool:
    if name not in LANGUAGE_MODELS:
        return "experts" in name
    keys = LANGUAGE_MODELS[name].keys
    return "moe_intermediate_size" in keys or "num_local_experts" in keys


def check_layouts(folder: Path, names: Sequence[str]) -> None:
    runs = {}
    for name in names:
        MODELS[name].write(folder / "published" / name)
        runs[name] = import_folder(folder / "published" / name, folder / "imported" / run_name(name), tokenizer=False)
    train(runs, folder / "one", {})
    for layout, stages in LAYOUTS.items():
        chosen = {name: run for name, run in runs.items() if layout != "ep2" or has_experts(name)}
        run_on_ranks(2, lambda rank, s=stages, c=chosen, o=folder / layout: train(c, o, s))
        for name in chosen:
            expected = losses(folder / "one", name)
            assert len(expected) == STEPS
            assert expected[-1] < expected[0]
            assert losses(folder / layout, name) == pytest.approx(expected, rel=1e-12), f"{name}, {layout}"
            check_exports(folder / "one" / run_name(name), folder / layout / run_name(name))


def test_losses_are_those_of_one_process_under_every_layout(tmp_path):
    check_layouts(tmp_path, ALWAYS)


@pytest.mark.thorough
def test_losses_of_all_others_are_those_of_one_process_under_every_layout(tmp_path):
    check_layouts(tmp_path, [name for name in MODELS if name not in ALWAYS])
