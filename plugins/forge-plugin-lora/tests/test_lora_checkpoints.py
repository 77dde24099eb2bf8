"""`forge-run checkpoints` on a run whose checkpoints have a base, and bases that are kept elsewhere."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core import Trainer, load_model
from forge_core.checkpoint.storage import read_manifest
from forge_core.cli import main
from forge_kit.tools.checkpoints import stored_tensors
from forge_plugin_adamw import AdamW
from forge_plugin_checkpoints import Parts
from forge_plugin_checkpoints.objects import Objects
from forge_plugin_lora import LoRA
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.catalogs import installed
from forge_testing.refusals import lacks


def trained(folder: Path, name: str, **changes: Any) -> Path:
    settings = {"job": {"name": name, "output": str(folder)}, "steps": 4, **changes}
    job = tiny_job(str(folder), installed(), **settings)
    return Trainer(job, catalog=installed(), echo=lambda line: None).run().folder


def adapted(base: Path) -> Path:
    checkpoint = {"load": Parts(path=str(base)), "interval": 2, "keep": 0}
    data = {"sources": (Numbers(start=7),)}
    return trained(base.parent, "adapted", plugins={"lora": LoRA(rank=2)}, checkpoint=checkpoint, data=data)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """The base, and a run with adapters beside it that has two checkpoints."""
    base = trained(tmp_path, "base")
    return base, adapted(base)


def test_the_trained_part_of_a_checkpoint_is_at_most_3_percent_of_the_model(tmp_path):
    """At rank 8 beside all matrices of a layer of 512 channels, in float32.

    Without the optimizer's state: AdamW's two moments, which add twice the adapters and nothing of the frozen weights.
    """
    model = Transformer(vocab_size=32, dim=512, layers=1, attention=GroupedQueryAttention(heads=8))
    settings: dict[str, Any] = {"model": model, "optimizer": AdamW(), "precision": "fp32", "steps": 1}
    base = trained(tmp_path, "base", **settings)
    load = {"load": Parts(path=str(base))}
    run = trained(tmp_path, "adapted", plugins={"lora": LoRA(rank=8)}, checkpoint=load, **settings)
    folder = run / "checkpoints/step-1"
    tensors = stored_tensors(folder)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
    whole = sum(size for name, size in sizes.items() if name.startswith("model."))
    written = json.loads((folder / "index.json").read_text())
    adapters = sum(sizes[name] for name in written if name.startswith("model."))
    assert {dtype for name, (_, dtype) in tensors.items() if name.startswith("model.")} == {torch.float32}
    assert 0 < adapters <= 0.03 * whole
    # What lies on the disk has no more than that: 3 x the adapters, and names and offsets
    files = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    assert 3 * adapters <= files <= 3 * adapters + 10_000


def facts_of(run: Path, action: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    capsys.readouterr()
    code = main(["checkpoints", str(run), action, "--json"])
    return code, json.loads(capsys.readouterr().out)["checkpoints"]


def test_the_list_names_the_base(runs, capsys):
    base, run = runs
    code, rows = facts_of(run, "list", capsys)
    assert code == 0
    assert [(row["base"], row["faults"]) for row in rows] == [(str(base / "checkpoints/step-4"), [])] * 2
    assert main(["checkpoints", str(run)]) == 0
    assert capsys.readouterr().out.count(f"{base}/checkpoints/step-4") == 1
    assert facts_of(base, "list", capsys)[1][0]["base"] is None


def test_a_damaged_base_is_a_fault_of_the_checkpoints(runs, capsys):
    base, run = runs
    [victim] = (base / "checkpoints/step-4").glob("*.distcp")
    data = bytearray(victim.read_bytes())
    data[20] ^= 1
    victim.write_bytes(data)
    code, rows = facts_of(run, "verify", capsys)
    assert code == 1
    for row in rows:
        assert not lacks(row["faults"][0], "base", victim, "SHA-256")
    assert facts_of(run, "list", capsys)[1][0]["faults"] == []  # sizes only


def test_another_or_no_base_is_a_fault_of_the_checkpoints(runs, capsys):
    base, run = runs
    manifest = base / "checkpoints/step-4/manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    for action, code in (("list", 0), ("verify", 1)):
        found, rows = facts_of(run, action, capsys)
        assert found == code
        assert not lacks(rows[0]["faults"][0], base, "another checkpoint")
    shutil.rmtree(base)
    assert not lacks(facts_of(run, "verify", capsys)[1][0]["faults"][0], base, "not there")


def test_nothing_is_pruned_where_what_stays_has_lost_its_base(runs, capsys):
    base, run = runs
    shutil.rmtree(base)
    assert main(["checkpoints", str(run), "prune", "--keep", "1"]) == 1
    assert not lacks(capsys.readouterr().err, "nothing is deleted", base)


def test_a_base_in_a_bucket_is_copied_into_the_checkpoints(tmp_path):
    """Its folder is a cache of this machine: another process would not find it."""
    bucket = Objects(url=f"file://{tmp_path}/bucket/{{job}}")
    base = trained(tmp_path, "base", checkpoint={"storage": bucket})
    run = adapted(base)
    assert "base" not in read_manifest(run / "checkpoints/step-4")
    expected = dict(load_model(base).model.named_parameters())
    shutil.rmtree(base)
    actual = dict(load_model(run).model.named_parameters())
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())
