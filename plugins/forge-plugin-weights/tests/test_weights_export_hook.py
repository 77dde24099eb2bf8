"""Exports of a run that goes on: the same files, to the byte, as one process makes of the checkpoint afterwards."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from forge_core import Catalog, Trainer
from forge_core.contracts.errors import CheckpointError, JobError
from forge_plugin_moe import MoE
from forge_plugin_parallel import FSDP, ExpertParallel, PipelineParallel, TensorParallel
from forge_plugin_schedule_free import ScheduleFreeAdamW
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_plugin_weights import Export
from forge_plugin_weights.exporting import export_run
from forge_testing import tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, problems_of

DENSE = Transformer(
    dim=32, layers=2, vocab_size=32, ffn=SwiGLU(hidden=48), attention=GroupedQueryAttention(heads=4, kv_heads=2)
)
TIED = Transformer(
    dim=32, layers=2, vocab_size=32, ffn=SwiGLU(hidden=48), tie_embeddings=True,
    attention=GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True, qk_norm_eps=1e-5),
)  # fmt: skip
EXPERTS = Transformer(
    dim=32, layers=2, vocab_size=32, ffn=MoE(experts=4, hidden=16), attention=GroupedQueryAttention(heads=4)
)
LAYOUTS: dict[str, tuple[Transformer, dict[str, Any]]] = {
    "fsdp2": (DENSE, {"fsdp": FSDP()}),
    "tp2": (TIED, {"tp": TensorParallel(degree=2)}),
    "pp2": (DENSE, {"pp": PipelineParallel(degree=2)}),
    "fsdp2/ep2": (EXPERTS, {"fsdp": FSDP(), "ep": ExpertParallel(degree=2)}),
}


def run(folder: Path, model: Any, stages: dict[str, Any], export: Export, **changes: Any) -> Path:
    settings = {"model": model, "steps": 2, "global_batch_size": 4, "micro_batch_size": 2, "seq_len": 8}
    job = tiny_job(str(folder), Catalog.installed(), **settings | changes, parallel=stages, hooks={"export": export})
    return Trainer(job, echo=lambda line: None).run().folder


def files_of(folder: Path) -> dict[str, bytes]:
    names = ("config.json", "model.safetensors.index.json")
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors" or path.name in names
    }


def test_ranks_write_what_one_process_would(tmp_path):
    export = Export(dtype="bfloat16", shard_size=2e-5)

    def both(rank: int) -> None:
        for number, (model, stages) in enumerate(LAYOUTS.values()):
            run(tmp_path / str(number), model, stages, export)

    run_on_ranks(2, both)
    for number, name in enumerate(LAYOUTS):
        folder = next((tmp_path / str(number)).glob("*/exports")).parent
        settings = {"dtype": torch.bfloat16, "shard_bytes": 20_000}
        expected = files_of(export_run(folder, tmp_path / f"expected {number}", **settings))
        assert len(expected) >= 4
        assert files_of(folder / "exports/step-2") == expected, name
        record = json.loads((folder / "exports/step-2/forge/parity.json").read_text())["tensors"]
        offline = json.loads((tmp_path / f"expected {number}/forge/parity.json").read_text())["tensors"]
        assert record == offline, f"{name}: each rank reads back its part"
        assert len(record["rounded"]) > 5


def test_a_disk_that_is_full_for_one_rank_ends_the_export_on_all(tmp_path, monkeypatch):
    """The others are on their way to a collective, in which they would wait for it."""

    def fails(rank: int) -> str:
        def write(writer: object, *arguments: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if rank == 1:
            monkeypatch.setattr("forge_plugin_weights.files.Boxes.write", write)
        with pytest.raises(CheckpointError) as caught:
            run(tmp_path / "full", TIED, {"tp": TensorParallel(degree=2)}, Export())
        return str(caught.value)

    for message in run_on_ranks(2, fails):
        assert not lacks(message, "rank 1", os.strerror(errno.ENOSPC))
    assert not list(tmp_path.glob("full/**/*.safetensors"))


def test_steps_are_exported_and_the_newest_kept(tmp_path):
    folder = run(tmp_path, DENSE, {}, Export(every=2, keep=2), steps=7)
    assert sorted(path.name for path in (folder / "exports").iterdir()) == ["step-6", "step-7"]
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "exports/step-7", output_loading_info=True
    )
    assert not any(loading.values())
    assert model.dtype == torch.float32
    assert json.loads((folder / "exports/step-6/config.json").read_text())["hidden_size"] == 32


def test_the_weights_that_are_evaluated_are_exported(tmp_path):
    folder = run(tmp_path, DENSE, {}, Export(verify=False), optimizer=ScheduleFreeAdamW(lr=0.1), steps=4)
    expected = files_of(export_run(folder, tmp_path / "expected"))
    assert files_of(folder / "exports/step-4") == expected
    records = {path.name for path in (folder / "exports/step-4/forge").iterdir()}
    assert records == {"job.toml", "provenance.json"}, "nothing was read back"


@pytest.mark.parametrize(
    ("export", "expected"),
    [
        (Export(), [at("hooks.export.model"), at("hooks.export.model.norm_placement", "'post'")]),
        (
            Export(architecture="mixtral"),
            [
                at("hooks.export", "ffn.type = 'forge-plugin-transformer/swiglu'"),
                at("hooks.export", "ffn.router.type"),
            ],
        ),
    ],
)
def test_a_model_without_a_published_form_is_refused_when_the_job_is_checked(tmp_path, export, expected):
    import attrs

    job = tiny_job(str(tmp_path), Catalog.installed(), model=attrs.evolve(DENSE, norm_placement="post"), seq_len=8)
    job = attrs.evolve(job, hooks={"export": export})
    check_problems(problems_of(job), *expected)
    with pytest.raises(JobError):
        Trainer(job, echo=lambda line: None).run()
