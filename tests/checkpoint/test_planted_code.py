"""A checkpoint from anywhere can be opened: nothing in it is executed, whatever was planted in whichever file."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import warnings

import pytest
import torch

from forge_core.checkpoint.tensors import load_tensors
from forge_core.contracts.errors import CheckpointError, NonFiniteError
from forge_kit.tools.checkpoints import stored_tensors
from forge_testing.processes import run_on_ranks

FILES = ["manifest.json", "index.json", "__0_0.distcp", "__1_0.distcp"]
"""Of a checkpoint of two ranks; that these are all is a test."""
UNUSED = [".metadata", "__0.metadata", "__2_0.distcp", "extra.pt", "sitecustomize.py"]
"""Names that other programs would open."""


class Planted:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch planted",)


def as_torch_file():
    buffer = io.BytesIO()
    torch.save({"x": Planted()}, buffer)
    return buffer.getvalue()


CODE = {"pickle": pickle.dumps(Planted()), "torch.save": as_torch_file()}


def test_the_planted_code_would_do_its_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(CODE["pickle"])
    assert (tmp_path / "planted").exists()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, catalog):
    """A run folder whose checkpoint two ranks have written."""
    from forge_core.engine.trainer import Trainer
    from forge_testing import tiny_job

    folder = tmp_path_factory.mktemp("two_ranks")
    job = tiny_job(str(folder), catalog)
    run_on_ranks(2, lambda rank: Trainer(job, catalog=catalog, echo=lambda text: None).run().step)
    return folder / "run"


@pytest.fixture
def checkpoint(two_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(two_ranks, tmp_path / "run")
    return tmp_path / "run/checkpoints/step-4"


def make_digests_match(folder):
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except ValueError:
        return
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def open_in_every_way(train, make_job, verify, folder):
    """Continue the run, and read the checkpoint as commands do; returns what they say."""
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for action in (
            lambda: train(make_job(steps=5, checkpoint={"verify": verify})),
            lambda: stored_tensors(folder),
            lambda: load_tensors(folder, {"model.norm.weight": torch.zeros(16)}),
        ):
            try:
                action()
            except (CheckpointError, NonFiniteError) as error:  # numbers that code happens to be need not be finite
                said.append(str(error))
    return said


def test_the_files_are_all_there_are(checkpoint):
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("verify", ["full", "sizes"])
@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_replaced_by_code_is_named_and_nothing_runs(
    checkpoint, train, make_job, tmp_path, name, code, verify
):
    (checkpoint / name).write_bytes(CODE[code])
    make_digests_match(checkpoint)
    said = open_in_every_way(train, make_job, verify, checkpoint)
    assert any(name in text for text in said)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp"])
def test_code_in_the_place_of_a_tensors_bytes_is_only_numbers(checkpoint, train, make_job, tmp_path, name, code):
    data = (checkpoint / name).read_bytes()
    repeated = (CODE[code] * (len(data) // len(CODE[code]) + 1))[: len(data)]
    (checkpoint / name).write_bytes(repeated)
    make_digests_match(checkpoint)
    open_in_every_way(train, make_job, "sizes", checkpoint)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("code", CODE)
def test_an_index_that_points_at_code_does_not_run_it(checkpoint, train, make_job, tmp_path, code):
    (checkpoint / "evil").write_bytes(CODE[code])
    index = json.loads((checkpoint / "index.json").read_text())
    for entry in index.values():
        for chunk in entry["chunks"]:
            chunk |= {"file": "evil", "start": 0}
    (checkpoint / "index.json").write_text(json.dumps(index))
    make_digests_match(checkpoint)
    said = open_in_every_way(train, make_job, "full", checkpoint)
    assert any("evil" in text for text in said)
    assert not (tmp_path / "planted").exists()


def test_files_that_do_not_belong_there_are_never_opened(checkpoint, train, make_job, lines, tmp_path):
    for name in UNUSED:
        (checkpoint / name).write_bytes(CODE["pickle"])
    assert open_in_every_way(train, make_job, "full", checkpoint) == []
    assert not (tmp_path / "planted").exists()
