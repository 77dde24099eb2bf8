"""Memory while models come in and go out: blocks, whatever the size of a file or a tensor. No test measures time.

Each runs in a forked process, whose peak of resident memory, pages of mapped files included, is taken from the system.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import transformers

from forge_core import Catalog
from forge_plugin_parallel import FSDP
from forge_plugin_weights import exporting, parallel_export
from forge_plugin_weights.files import create, index_json, plan_files
from forge_plugin_weights.importing import import_folder
from forge_testing.processes import run_on_ranks

MEGABYTE = 1 << 20
PEAK = Path("/proc/self/clear_refs")
pytestmark = pytest.mark.skipif(not os.access(PEAK, os.W_OK), reason="the system does not tell peaks of memory")

LLAMA = transformers.LlamaConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=1,
    num_attention_heads=16,
    vocab_size=32_000,
    tie_word_embeddings=True,
)
"""An embedding of 66 MB in bfloat16 in a file of its own, and a layer of 34 MB in another."""
GPT2 = transformers.GPT2Config(n_embd=1024, n_inner=36_864, n_layer=1, n_head=16, vocab_size=512)
"""Two matrices of 75 MB in bfloat16, stored as the transposes of ours, in one file."""
LARGEST: Mapping[str, int] = {"llama": 62, "gpt2": 72}
"""Megabytes of the largest tensor of each model in bfloat16."""


def write(folder: Path, config: Any) -> int:
    """Write a model, all ones in bfloat16, in files of 70 MB or one; returns the bytes of its largest tensor."""
    folder.mkdir(exist_ok=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.named_parameters()}
    files = plan_files(folder, shapes, (70 if config is LLAMA else 200) * 10**6)
    create(folder, files)
    ones = torch.ones(MEGABYTE, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    for plan in files:
        with (folder / plan.name).open("ab") as file:
            file.truncate(len(plan.header))
            for start in range(len(plan.header), plan.size, len(ones)):
                file.write(ones[: plan.size - start])
    (folder / "model.safetensors.index.json").write_text(index_json(files))
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "dtype": "bfloat16"}))
    return max(place.size for plan in files for place in plan.places.values())


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in {"llama": LLAMA, "gpt2": GPT2}.items():
        assert write(folder / name, config) // MEGABYTE == LARGEST[name]
    return {"llama": folder / "llama", "gpt2": folder / "gpt2"}


def peak_of(action: Callable[[], Any], warm: Callable[[], Any] = lambda: None) -> float:
    """Returns the megabytes that an action takes at its peak, beside what the process has before."""

    def resident(key: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

    warm()  # modules and pages of libraries that are needed once
    PEAK.write_text("5")
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def on_one_rank(action: Callable[[], float]) -> float:
    [peak] = run_on_ranks(1, lambda rank: action())
    return float(peak)


def bring_in(folder: Path, run: Path) -> Path:
    return import_folder(folder, run, tokenizer=False)


def take_out(run: Path, out: Path, dtype: torch.dtype | None = None) -> Path:
    return exporting.export_run(run, out, dtype=dtype)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Mapping[str, Path]:
    """Models of the same kinds, by which a process warms up."""
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"llama": {"hidden_size": 64, "intermediate_size": 64}, "gpt2": {"n_embd": 64, "n_inner": 64}}
    for name, config in {"llama": LLAMA, "gpt2": GPT2}.items():
        write(folder / name, type(config)(**{**config.to_dict(), **sizes[name], "vocab_size": 64}))
    return {"llama": folder / "llama", "gpt2": folder / "gpt2"}


@pytest.fixture(scope="module")
def runs(models, tiny, tmp_path_factory) -> Mapping[str, tuple[Path, Path]]:
    """Run folders of a tiny and a large model of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: (bring_in(tiny[name], folder / f"tiny-{name}"), bring_in(models[name], folder / name)) for name in models
    }


def import_peak(models, tiny, name: str, folder: Path) -> float:
    def action() -> float:
        return peak_of(lambda: bring_in(models[name], folder / "run"), lambda: bring_in(tiny[name], folder / "warm"))

    return on_one_rank(action)


def export_peak(runs, name: str, folder: Path, dtype: torch.dtype | None = None) -> float:
    small, large = runs[name]

    def action() -> float:
        return peak_of(
            lambda: take_out(large, folder / "out", dtype), lambda: take_out(small, folder / "warm out", dtype)
        )

    return on_one_rank(action)


M_MMAP_THRESHOLD = -3  # malloc.h


def test_an_import_of_linked_files_takes_no_memory(models, tiny, tmp_path):
    assert import_peak(models, tiny, "llama", tmp_path) < LARGEST["llama"] / 4


def test_an_import_that_computes_takes_one_tensor(models, tiny, tmp_path):
    assert import_peak(models, tiny, "gpt2", tmp_path) < 2 * LARGEST["gpt2"]


@pytest.mark.parametrize(("name", "dtype"), [("llama", None), ("llama", torch.float32), ("gpt2", torch.float32)])
def test_an_export_takes_less_than_a_tensor(runs, tmp_path, name, dtype):
    assert export_peak(runs, name, tmp_path, dtype) < LARGEST[name]


def sharded(run: Path) -> Any:
    """A training, with its model's parameters in float32, rows of each on two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from forge_core.checkpoint.resume import locate
    from forge_core.config.load import parse_job
    from forge_core.engine.build import build_bare_model, build_context

    catalog = Catalog.installed()
    job = parse_job(locate(run, "sizes")[1]["job"], "manifest.json", catalog)
    job = attrs.evolve(job, train=attrs.evolve(job.train, global_batch_size=2), parallel={"fsdp": FSDP()})
    model, _ = build_bare_model(job, build_context(job, catalog, None))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    return SimpleNamespace(job=job, folder=run, model=model, optimizer=None, step=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_export_during_a_run_takes_less_than_a_tensor_a_rank(runs, tmp_path, name):
    def action(rank: int) -> float:
        # What is freed goes back at once; glibc raises its threshold by itself and then keeps what it was given
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000)
        small, large = map(sharded, runs[name])

        def export(context: Any, out: str) -> None:
            parallel_export.export_training(context, tmp_path / out, torch.bfloat16, 10**9, "", verify=True)

        return peak_of(lambda: export(large, "out"), lambda: export(small, "warm out"))

    assert max(run_on_ranks(2, action)) < 0.75 * 2 * LARGEST[name]  # in float32, as they are trained
