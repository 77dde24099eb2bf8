"""The folder that a store leaves: as a user reads it, after crashes, on a full disk, written by several ranks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.contracts.errors import ForgeError
from forge_core.engine.trainer import Trainer
from forge_plugin_parallel import FSDP
from forge_plugin_taps import Store, Taps
from forge_plugin_taps.tensor_file import TensorFile
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.laws import Case, layout_law
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks, refuses


def job(folder, name="run", store=None, stages=None, **settings):
    attention = GroupedQueryAttention(heads=4, kv_heads=2)
    points, gradients = ("embed", "layers.*.q"), ("layers.1.resid_post",)
    taps = Taps(interval=1, positions=3, points=points, gradients=gradients, sinks={"store": store or Store()})
    settings = {"steps": 4, "micro_batch_size": 2, "checkpoint": {"interval": 2}, **settings}
    return tiny_job(
        str(folder),
        job={"name": name},
        model=Transformer(vocab_size=32, dim=16, layers=2, attention=attention),
        data={"sources": (Numbers(ignored=1, held_out=5),)},
        parallel={**(stages or {}), "taps": taps},
        **settings,
    )


def digests(folder):
    return {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("step-*/*.safetensors"))
    }


def test_a_step_has_a_file_for_each_point_and_a_manifest(tmp_path):
    Trainer(job(tmp_path, store=Store(keep=2))).run()
    folder = tmp_path / "run" / "taps"
    assert sorted(path.name for path in folder.iterdir()) == ["step-3", "step-4"]
    manifest = json.loads((folder / "step-4" / "taps.json").read_text())
    names = ["embed", "layers.0.q", "layers.1.q", "layers.1.resid_post.grad", "tokens"]
    assert sorted(manifest["files"]) == [f"{name}.safetensors" for name in names]
    for name, entry in manifest["files"].items():
        path = folder / "step-4" / name
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
        if name != "tokens.safetensors":
            (tensor,) = load_file(path).values()
            assert list(tensor.shape) == entry["shape"]
    assert manifest["files"]["layers.0.q.safetensors"]["shape"] == [12, 4, 4]


def test_a_run_that_crashed_and_continues_has_each_step_once_and_whole(tmp_path, monkeypatch):
    Trainer(job(tmp_path, "whole")).run()
    killed = job(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("forge_plugin_taps.store_writer.StoreWriter._commit", _die_at(4))
        with pytest.raises(KeyboardInterrupt):
            Trainer(killed).run()
    folder = tmp_path / "run" / "taps"
    assert (folder / ".step-4").exists()  # torn; and step 3 is later than the checkpoint of step 2
    (folder / "step-3" / "embed.safetensors").write_bytes(b"as another curve left it")
    Trainer(job(tmp_path)).run()
    assert digests(folder) == digests(tmp_path / "whole" / "taps")
    assert [path.name for path in folder.glob(".*")] == []


def _die_at(step):
    from forge_plugin_taps.store_writer import StoreWriter

    commit = StoreWriter._commit

    def die(self, partial_folder, whole, manifest):
        if manifest["step"] == step:
            raise KeyboardInterrupt
        commit(self, partial_folder, whole, manifest)

    return die


def _full(rank, folder):
    """A disk on which one rank finds no room."""
    real = os.pwrite

    def pwrite(descriptor, data, offset):
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    os.pwrite = pwrite
    for on_error in ("fail", "warn"):
        made = job(folder, on_error, Store(on_error=on_error), {"fsdp": FSDP()}, steps=1)
        with warnings.catch_warnings(record=True) as seen:
            failure = pytest.raises(ForgeError) if on_error == "fail" else nullcontext()
            with failure as raised:
                Trainer(made, echo=lambda text: None).run()
        yield [str(warning.message) for warning in seen] if raised is None else str(raised.value)


def test_a_full_disk_leaves_a_step_out_or_ends_the_training_by_key(tmp_path):
    results = run_on_ranks(2, lambda rank: list(_full(rank, tmp_path)))
    [(_, warned), _] = results
    for message in (*(failed for failed, _ in results), next(text for text in warned if "cannot store" in text)):
        assert not lacks(message, "step 1", "No space left on device", "rank 1", "`keep`")
    for name in ("fail", "warn"):
        assert list((tmp_path / name / "taps").iterdir()) == []
    assert len((tmp_path / "warn/metrics.jsonl").read_text().splitlines()) > 0


def stored(folder, layout):
    Trainer(job(folder, stages=layout.get("parallel"), steps=1), echo=lambda text: None).run()
    return digests(folder / "run" / "taps")


def equal_files(ranks, alone):
    """In the first step, embeddings are equal to the bit."""
    for files in ranks:
        assert files.keys() == alone.keys()
        for file in ("step-1/embed.safetensors", "step-1/tokens.safetensors"):
            assert files[file] == alone[file], file


test_layouts = layout_law(Case("store", observe=stored, compare=equal_files, layouts=("fsdp2", "tp2", "pp2", "cp2")))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_rows_written_in_any_order_make_the_file_that_safetensors_makes(tmp_path, dtype):
    tensor = (torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    file = TensorFile(tmp_path / "ours", {"x": (dtype, (7, 3, 2))})
    for rows in ([5], [0, 1, 2, 4], [3, 6]):
        file.write_rows("x", torch.tensor(rows), tensor[rows])
    file.write_header()
    with pytest.raises(KeyError, match="y"):
        file.write_rows("y", torch.tensor([0]), tensor[:1])
    assert torch.equal(load_file(file.path)["x"], tensor)
    save_file({"x": tensor}, tmp_path / "theirs")
    assert file.path.read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_store_without_the_folder_of_a_run_is_refused():
    with refuses("parallel.taps.sinks", "store", "folder"):
        Store().build(SimpleNamespace(folder=None), None)
