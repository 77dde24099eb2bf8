"""Storages whose checkpoints are on no file system of all ranks: here a folder that stands for a bucket.

Each rank has a folder of its own, as on machines of its own, and looks into no other; what it reads it has fetched.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from attrs import define, field, frozen

from forge_core import Trainer, load_job, load_model
from forge_core.checkpoint.manager import Checkpoints, State
from forge_core.checkpoint.storage import MANIFEST
from forge_core.checkpoint.tensors import load_tensors
from forge_core.cli import main
from forge_core.contracts.components import Plugin, StorageComponent
from forge_core.contracts.errors import CheckpointError, ResumeError
from forge_core.contracts.hookspecs import hookimpl
from forge_core.contracts.runtime import SpreadStorage
from forge_core.job import Retention
from forge_testing import TINY_JOB
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks, naming


@frozen(kw_only=True)
class Bucket(StorageComponent):
    """A folder `bucket` that only `publish`, `commit` and `fetch` look into, and a cache for each rank."""

    broken_rank: int = -1
    """Rank that cannot upload."""

    def build(self, context):
        return BucketStorage(Path("bucket"), Path(f"cache-{os.environ.get('RANK', '0')}"), self.broken_rank)


class BucketStorage(SpreadStorage):
    def __init__(self, bucket, cache, broken_rank=-1):
        self._bucket, self._cache, self._broken_rank = bucket, cache, broken_rank
        self.fetched, self.ranks, self.closed = [], 0, False

    def join(self, gather):
        self.ranks = len(gather(os.getpid()))

    def begin(self, step):
        shutil.rmtree(self.folder(step), ignore_errors=True)
        self.folder(step).mkdir(parents=True)
        return self.folder(step)

    def publish(self, step):
        if os.environ.get("RANK", "0") == str(self._broken_rank):
            raise OSError(5, "the bucket is away")
        self._put(step, [path for path in self.folder(step).iterdir() if path.name != MANIFEST])

    def commit(self, step):
        self._put(step, self.folder(step).glob(MANIFEST))  # which rank 0 has
        shutil.rmtree(self.folder(step))
        return self.path(step)

    def _put(self, step, files):
        (self._bucket / f"step-{step}").mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copy(path, self._bucket / f"step-{step}")

    def discard(self, step):
        for folder in (self.folder(step), self._bucket / f"step-{step}"):
            shutil.rmtree(folder, ignore_errors=True)

    def clear(self):
        pass

    def steps(self):
        return sorted(int(path.parent.name.removeprefix("step-")) for path in self._bucket.glob(f"*/{MANIFEST}"))

    def folder(self, step):
        return self._cache / f"step-{step}"

    def delete(self, step):
        shutil.rmtree(self._bucket / f"step-{step}", ignore_errors=True)  # each rank tries

    def fetch(self, step, names):
        self.folder(step).mkdir(parents=True, exist_ok=True)
        for name in names:
            self.fetched.append(name)
            shutil.copy(self._bucket / f"step-{step}" / name, self.folder(step))

    def size(self, step, name):
        return (self._bucket / f"step-{step}" / name).stat().st_size

    def close(self):
        self.closed = True


@define(kw_only=True, slots=False)
class Counted(Plugin):
    """Notes every storage that a job builds."""

    built: list = field(init=False, factory=list)

    @hookimpl(wrapper=True)
    def forge_build_storage(self, component, context):
        storage = yield
        Path("built").write_text(type(component).__name__)
        return storage


def job(name="run", storage="Bucket", checkpoint="", **overrides):
    table = f'[checkpoint]\ninterval = 2\nkeep = 2\n{checkpoint}\n[checkpoint.storage]\ntype = "{__file__}:{storage}"\n'
    path = f"{name}-{os.getpid()}.toml"  # ranks that share a folder would read what another one has half written
    Path(path).write_text(f'[job]\nname = "{name}"\n{TINY_JOB}{table}')
    return load_job(path, overrides=[f"{key}={value}" for key, value in overrides.items()])


def train(made, **options):
    return Trainer(made, echo=lambda text: None, **options).run()


def curve(summary):
    return [(row["step"], row["loss"]) for row in summary.metrics() if "loss" in row]


def forget():
    for cache in Path().glob("cache-*"):
        shutil.rmtree(cache)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize("background", ["true", "false"])
def test_ranks_with_folders_of_their_own_continue_to_the_bit_after_both_are_lost(background):
    overrides = {"checkpoint.async_save": background, "train.micro_batch_size": 2}

    def work(rank):
        straight = train(job("straight", **overrides, **{"train.steps": 6}))
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree("bucket")
        torch.distributed.barrier()
        train(job("run", **overrides))
        assert [path.name for path in Path(f"cache-{rank}").glob("step-*/*")] == []
        torch.distributed.barrier()
        return curve(straight), curve(train(job("run", **overrides, **{"train.steps": 6})))

    for straight, continued in run_on_ranks(2, work):
        assert straight == continued
    assert len(straight) == 6
    assert sorted(path.name for path in Path("bucket").iterdir()) == ["step-4", "step-6"]


class TestCommands:
    """They build the storage from the run's `job.toml`, and fetch what they read."""

    @pytest.fixture(autouse=True)
    def trained(self, here):
        train(job())
        forget()

    def test_checkpoints_lists_verifies_compares_and_prunes(self, capsys):
        assert main(["checkpoints", "runs/run"]) == 0
        assert capsys.readouterr().out.count("intact") == 2
        assert not list(Path("cache-0").glob("*/*.distcp")), "sizes need no file"
        assert main(["checkpoints", "runs/run", "verify"]) == 0
        assert main(["checkpoints", "runs/run", "diff", "2", "4"]) == 0
        assert main(["checkpoints", "runs/run", "export", "--step", "2", "--out", "out"]) == 0
        assert main(["checkpoints", "runs/run", "prune", "--keep", "1"]) == 0
        assert [path.name for path in Path("bucket").iterdir()] == ["step-4"]

    def test_runs_and_show(self, capsys):
        assert main(["runs"]) == 0
        assert main(["show", "runs/run"]) == 0
        assert "finished" in capsys.readouterr().out

    @pytest.mark.parametrize("path", ["runs/run", "runs/run/checkpoints/step-2"])
    def test_a_model_is_loaded_from_the_newest_or_from_one_that_is_named(self, path):
        assert load_model(path).step == (2 if "step" in path else 4)

    @pytest.mark.parametrize("path", ["runs/run", "runs/run/checkpoints/step-2"])
    def test_another_run_continues_or_takes_weights(self, path):
        step = 2 if "step" in path else 4
        other = {"checkpoint.storage.type": "forge-run/local", "train.steps": step}
        assert train(job("other", **other), resume=path, resume_with_changes=True).step == step
        assert train(job("loaded", checkpoint=f'load = {{path = "{path}"}}', **other)).step == step

    def test_a_step_that_is_not_there_is_refused_by_name(self):
        with pytest.raises(CheckpointError, match=r"step-3/manifest.json"):
            train(job("other", **{"checkpoint.storage.type": "forge-run/local"}), resume="runs/run/checkpoints/step-3")

    def test_never_refuses_what_the_bucket_has(self):
        with pytest.raises(ResumeError, match=naming("steps [2, 4]", "job.name")):
            train(job(), resume="never")


def test_a_language_model_is_sampled_and_exported(capsys):
    Path("text.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 40)
    words = {
        "job": {"name": "words"},
        "train": {"steps": 2, "global_batch_size": 2, "seq_len": 16, "device": "cpu"},
        "model": {"type": "transformer", "dim": 16, "layers": 1, "attention": {"heads": 2}},
        "data": {"tokenizer": {"type": "bytes"}, "sources": [{"type": "text", "path": "text.txt"}]},
        "optimizer": {"type": "forge_testing:TinyAdamW"},
        "checkpoint": {"storage": {"type": f"{__file__}:Bucket"}},
    }
    train(words)
    forget()
    assert main(["generate", "runs/words", "--prompt", "the cat", "--max-tokens", "3"]) == 0
    assert "the cat" in capsys.readouterr().out
    forget()
    assert main(["weights", "export", "runs/words/checkpoints/step-2", "--out", "out"]) == 0
    assert Path("out/model.safetensors").is_file()


def test_a_damaged_checkpoint_is_passed_over_on_all_ranks():
    def work(rank):
        train(job(**{"train.micro_batch_size": 2}))
        torch.distributed.barrier()
        if rank == 0:
            forget()
            for path in Path("bucket/step-4").glob("__1_*"):
                path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        torch.distributed.barrier()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            summary = train(job(**{"train.micro_batch_size": 2}))
        return summary.step, [str(one.message) for one in told if "damaged" in str(one.message)]

    (step, told), (other, none) = run_on_ranks(2, work)
    assert (step, other, none) == (4, 4, [])
    assert not lacks(told[0], "step-4/__1_0.distcp", "SHA-256")


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_publish_fails_the_save_on_all(broken):
    overrides = {"train.micro_batch_size": 2, "checkpoint.storage.broken_rank": broken}

    def work(rank):
        with pytest.raises(CheckpointError) as failure:
            train(job(**overrides))
        return str(failure.value)

    errors = run_on_ranks(2, work)
    assert errors[0] == errors[1]
    assert not lacks(errors[0], "step 2", "cache-0", f"rank {broken}: OSError: [Errno 5] the bucket is away")
    assert not list(Path("bucket").glob("*"))


def test_a_rank_fetches_only_what_it_reads(tmp_path):
    def work(rank):
        os.environ["RANK"] = str(rank)
        storage = BucketStorage(tmp_path / "bucket", tmp_path / f"cache-{rank}")
        checkpoints = Checkpoints(storage, Retention(), "full")
        tensors = {"a": torch.arange(4.0), "b": torch.arange(6.0)}
        checkpoints.save(1, State(tensors, {}))
        folder, manifest = checkpoints.newest()
        shares, storage.fetched = sorted(storage.fetched), []
        read = {"b": torch.zeros(6)}
        load_tensors(folder, read)
        checkpoints.close()
        return shares, storage.fetched, read["b"].tolist(), storage.ranks, storage.closed, sorted(manifest["files"])

    (ours, loaded, values, ranks, closed, files), (theirs, *_) = run_on_ranks(2, work)
    assert values == list(range(6))
    assert (ranks, closed) == (2, True)
    assert sorted(ours + theirs) == sorted([*files, MANIFEST]), "each verifies its share"
    assert len([name for name in loaded if name.endswith(".distcp")]) == 1


def test_a_storage_that_lacks_a_method_is_refused():
    class Half(BucketStorage):
        publish = SpreadStorage.publish

    with pytest.raises(TypeError, match="publish"):
        Half(Path(), Path())


@pytest.mark.parametrize("storage", ["Bucket", "forge-run/local"])
def test_a_plugin_wraps_the_storage_of_runs_and_of_commands(storage):
    table = f'[plugins.counted]\ntype = "{__file__}:Counted"\n'
    Path("run.toml").write_text(f'[job]\nname = "run"\n{TINY_JOB}{table}')
    name = storage if "/" in storage else f"{__file__}:{storage}"
    train(load_job("run.toml", overrides=[f'checkpoint.storage.type="{name}"']))
    Path("built").unlink()
    assert main(["checkpoints", "runs/run"]) == 0
    assert Path("built").read_text() == ("Bucket" if storage == "Bucket" else "Local")
