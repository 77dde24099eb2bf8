"""A run that starts from a published model has its weights, and the losses of one process, under every layout."""

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
from arrival import arrived
from published_models import MODELS as LANGUAGE_MODELS
from published_models import ours
from safetensors.torch import load_file

from forge_core.checkpoint.state import model_tensors
from forge_core.config.load import parse_job
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.importing import START, import_folder
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import naming

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "fsdp2": {"fsdp": {}},
    "tp2": {"tp": {"degree": 2}},
    "pp2": {"pp": {"degree": 2}},
    "ep2": {"fsdp": {}, "ep": {"degree": 2}},
}
SEEING = {**published_vision.MODELS, "mllama": published_vision.TILED["mllama"]}
MODELS: Mapping[str, Any] = {**LANGUAGE_MODELS, **SEEING}
ALWAYS = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "llava", "mllama")
HALF = " in bf16"
"""The end of the name of a model whose files have bfloat16."""
STEPS = 3
IMAGES = "forge_plugin_vision.testing:RandomImages"
JOB: Mapping[str, Any] = {
    "train": {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 1, "seq_len": 24, "precision": "fp64"},
    "data": {"sources": [{"type": "forge_testing:Numbers"}]},
    "optimizer": {"type": "adamw", "lr": 1e-2},
}


def run_name(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def train(runs: Mapping[str, Path], output: Path, stages: Mapping[str, Any], spoilt: int = -1) -> None:
    """Train each model further, as `forge-run RUN/start.toml job.toml` does."""
    for name, run in runs.items():
        export = {"architecture": name.removesuffix(HALF).partition(",")[0]}
        table = tomllib.loads((run / START).read_text()) | JOB
        if name.endswith(HALF):
            table["train"] = {**JOB["train"], "steps": 1, "precision": "fp32"}
        if "vision" in table["model"]:
            table["data"] = {"sources": [{"type": IMAGES, "vocabulary": 60, "sequences": 4}]}
        table |= {
            "job": {"name": run_name(name), "output": str(output)},
            "parallel": stages,
            "hooks": {
                "before": {"type": "arrival:ExportBefore", "dtype": stored_dtype(name), **export},
                "arrival": {"type": "arrival:Arrival", "expected": str(expected_file(run)), "spoilt": spoilt},
                "export": export,
            },
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


def stored_dtype(name: str) -> str:
    """The dtype of a model's files."""
    return "bfloat16" if name.endswith(HALF) else "float32"


def expected_file(run: Path) -> Path:
    """Where the tensors of a single process are kept."""
    return run.with_name(f"{run.name}.tensors")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check_arrival(published: Path, imported: Path, run: Path) -> None:
    """Before the first step each rank had its part, and all together the published numbers."""
    ranks = [sum(counts.values()) for counts in arrived(run)]
    total = sum(tensor.numel() for tensor in torch.load(expected_file(imported)).values())
    if len(ranks) == 1:
        assert ranks == [total]
    else:
        assert all(0 < rank < 0.9 * total for rank in ranks), f"{ranks} of {total}"
    before, after = tensors_of(published), tensors_of(run / "exports/step-0")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), f"{run}, {name}"


def has_experts(name: str) -> bool:
    name = name.removesuffix(HALF)
    if name not in LANGUAGE_MODELS:
        return "experts" in name
    keys = LANGUAGE_MODELS[name].keys
    return "moe_intermediate_size" in keys or "num_local_experts" in keys


def takes(layout: str, name: str, run: Path) -> bool:
    """Whether a layout is one for the model: its experts, or its heads, divide."""
    model = tomllib.loads((run / START).read_text())["model"]
    heads = model.get("language", model)["attention"].get("kv_heads", 2)
    return has_experts(name) if layout == "ep2" else layout != "tp2" or heads % 2 == 0


def bring_in(folder: Path, name: str) -> Path:
    """Write a published model and import it, with the tensors that one process has beside it."""
    published = folder / "published" / run_name(name)
    MODELS[name.removesuffix(HALF)].write(published, getattr(torch, stored_dtype(name)))
    run = import_folder(published, folder / "imported" / run_name(name), tokenizer=False)
    torch.save(model_tensors(ours(run)), expected_file(run))
    return run


def check_layouts(folder: Path, names: Sequence[str]) -> None:
    runs = {name: bring_in(folder, name) for name in names}
    train(runs, folder / "one", {})
    for layout, stages in {"one": {}, **LAYOUTS}.items():
        chosen = {name: run for name, run in runs.items() if takes(layout, name, run)}
        if stages:
            run_on_ranks(2, lambda rank, s=stages, c=chosen, o=folder / layout: train(c, o, s))
        for name, run in chosen.items():
            files = folder / "published" / run_name(name)
            if name in SEEING:  # an export has other names than version 5 writes
                files = folder / "one" / run_name(name) / "exports/step-0"
            check_arrival(files, run, folder / layout / run_name(name))
            expected = losses(folder / "one", name)
            if name.endswith(HALF):
                assert losses(folder / layout, name) == pytest.approx(expected, rel=1e-5), f"{name}, {layout}"
                continue
            assert len(expected) == STEPS
            assert expected[-1] < expected[0]
            assert losses(folder / layout, name) == pytest.approx(expected, rel=1e-12), f"{name}, {layout}"
            check_exports(folder / "one" / run_name(name), folder / layout / run_name(name))


def test_weights_and_losses_are_those_of_one_process_under_every_layout(tmp_path):
    check_layouts(tmp_path, [*ALWAYS, f"qwen3_moe{HALF}"])


@pytest.mark.thorough
def test_weights_and_losses_of_all_others_are_those_of_one_process_under_every_layout(tmp_path):
    others = [name for name in MODELS if name not in ALWAYS]
    check_layouts(tmp_path, [*others, *(f"{name}{HALF}" for name in LANGUAGE_MODELS if name != "qwen3_moe")])


@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "pp2"])
def test_a_rank_with_other_numbers_is_found(tmp_path, layout):
    """The tests above would fail if a rank loaded a wrong part: one number of one is changed after it was loaded."""
    run = bring_in(tmp_path, "llama")
    with pytest.raises(AssertionError, match=naming("layers.0.ffn_norm.weight")):
        run_on_ranks(2, lambda rank: train({"llama": run}, tmp_path / "out", LAYOUTS[layout], spoilt=0))
