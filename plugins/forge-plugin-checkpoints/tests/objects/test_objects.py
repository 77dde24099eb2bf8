"""Runs whose checkpoints are in a bucket: ranks with caches of their own, faults, other machines, commands."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from proxy import Rule

from forge_core import Trainer, load_job
from forge_core.cli import main
from forge_core.contracts.errors import CheckpointError
from forge_core.contracts.layout import Layout
from forge_plugin_checkpoints.objects import Objects
from forge_testing import TINY_JOB, tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, naming, refuses

pytestmark = pytest.mark.slow

SAVED_ONCE = {"checkpoint.interval": 0}
"""Of a run whose losses are compared: at its end only."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def make(store):
    def make(name="run", storage="", checkpoint="", extra="", **overrides):
        text = f"""
[job]
name = "{name}"
{TINY_JOB}
{extra}
[checkpoint]
interval = 2
keep = 2
{checkpoint}
[checkpoint.storage]
type = "objects"
url = "s3://{store.name}/forge/{{job}}"
options = {{endpoint_url = "{store.endpoint}"}}
retries = 2
backoff_s = 0.01
timeout_s = 5.0
{storage}
"""
        Path(f"{name}-{os.getpid()}.toml").write_text(text)
        return load_job(f"{name}-{os.getpid()}.toml", overrides=[f"{k}={v}" for k, v in overrides.items()])

    return make


def train(job, *hooks, **options):
    return Trainer(job, hooks=hooks, echo=lambda text: None, **options).run()


def curve(summary):
    return [(row["step"], row["loss"]) for row in summary.metrics() if "loss" in row]


@pytest.mark.parametrize("background", ["false", "true"])
def test_two_ranks_with_caches_of_their_own_continue_to_the_bit_on_empty_machines(make, store, background):
    overrides = {"checkpoint.async_save": background, "train.micro_batch_size": 2}

    def work(rank):
        storage = f'cache = "machine-{rank}"'
        straight = train(make("straight", storage, **overrides, **SAVED_ONCE, **{"train.steps": 5}))
        train(make(storage=storage, **overrides))
        own = sorted(path.name for path in Path(f"machine-{rank}/step-4").glob("*"))
        shutil.rmtree(f"machine-{rank}")
        torch.distributed.barrier()
        goes_on = train(make(storage=storage, **overrides, **{"train.steps": 5}))
        return curve(straight), curve(goes_on), own

    (straight, continued, ours), (_, _, theirs) = run_on_ranks(2, work)
    assert len(straight) == 5
    assert straight == continued
    assert ours == ["__0_0.distcp", "index.json", "manifest.json"]
    assert theirs == ["__1_0.distcp"], "each machine has what its ranks wrote, for a start there"
    assert store.steps() == [4, 5]
    assert not [key for key in store.contents() if "probe" in key]


def test_a_run_goes_on_where_nothing_is_but_its_job_file(make, store):
    straight = train(make("straight", **SAVED_ONCE, **{"train.steps": 6}))
    train(make())
    for folder in ("runs/run", "runs/straight/checkpoints"):
        shutil.rmtree(folder)
    continued = train(make(**{"train.steps": 6}))
    assert curve(continued) == curve(straight)[4:]


def test_a_start_on_the_same_machine_downloads_the_manifest_only(make, proxy):
    train(make())
    del proxy.lines[:]
    train(make(**{"train.steps": 5}))
    assert [
        line.split("?")[0].rpartition("/step-4/")[2].split()[0]
        for line in proxy.lines
        if line[:3] == "GET" and "/step-4/" in line.split("?")[0]
    ] == ["manifest.json"]


def test_a_manifest_whose_upload_is_never_answered_is_sent_again(make, proxy, store):
    proxy.rules.append(Rule("PUT .*/step-2/manifest", "stall", times=1))
    assert train(make()).step == 4
    assert proxy.rules[0].hits == 2
    assert store.steps() == [2, 4]


@pytest.mark.parametrize("where", ["bucket", "cache"])
def test_flipped_bytes_are_found_wherever_they_are(make, store, where):
    train(make())
    key = next(key for key in store.contents() if "step-4" in key and key.endswith("distcp"))
    data = bytes([store.get(key)[0] ^ 1]) + store.get(key)[1:]
    if where == "bucket":
        store.put(key, data)
        shutil.rmtree("runs/run/checkpoints")
    else:
        Path("runs/run/checkpoints/step-4", Path(key).name).write_bytes(data)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        summary = train(make(**{"train.steps": 5}))
    texts = [str(one.message) for one in told if "damaged" in str(one.message)]
    assert [row["step"] for row in summary.metrics() if "loss" in row] == [1, 2, 3, 4, 5]
    assert len(texts) == (where == "bucket")
    if texts:
        assert not lacks(texts[0], f"s3://{store.name}/{key}", "SHA-256")


class TestAStoreThatIsDown:
    """No step of a save succeeds; what is there already stays as it is."""

    @pytest.mark.parametrize(("on_failure", "background"), [("stop", "false"), ("continue", "true")])
    def test_on_failure_holds_for_all_ranks(self, make, store, proxy, on_failure, background):
        # From the third upload of rank 1's file on: steps 1 and 2 are there
        proxy.rules.append(Rule("PUT .*__1_0", "503", skip=1, times=3))
        overrides = {"checkpoint.async_save": background, "train.micro_batch_size": 2, "train.steps": 6}

        def work(rank):
            storage = f'cache = "machine-{rank}"'
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    train(make(storage=storage, checkpoint=f'on_failure = "{on_failure}"', **overrides))
                    error = ""
                except CheckpointError as failure:
                    error = str(failure)
            return error, [str(one.message) for one in told if "could not save" in str(one.message)]

        (error, told), (other, none) = run_on_ranks(2, work)
        message = error or told[0]
        assert not lacks(message, "step 4", "machine-0", "rank 1", "steps 2")
        assert "step-4/__1_0.distcp" in message
        assert not lacks(message, "3 attempts")
        assert (error == other, none, len(told)) == (True, [], on_failure == "continue")
        assert store.steps() == ([2] if on_failure == "stop" else [2, 6])
        assert not [key for key in store.contents() if "step-4" in key], "nothing of it is left"

    def test_from_the_start_is_refused_before_training(self, make, proxy, store):
        proxy.rules.append(Rule("PUT", "503"))
        with pytest.raises(CheckpointError, match=naming("rank 0", "3 attempts")):
            train(make())
        assert not Path("runs/run/metrics.jsonl").exists()

    def test_the_manifest_comes_last(self, make, proxy, store):
        proxy.rules.append(Rule("PUT .*step-4/manifest.json", "503"))
        with pytest.raises(CheckpointError, match=naming("step 4", "3 attempts")):
            train(make())
        assert store.steps() == [2]
        assert not [key for key in store.contents() if "step-4" in key]


def test_a_deletion_takes_the_manifest_first(make, proxy, store):
    train(make(checkpoint="keep_every = 0"))
    del proxy.lines[:]
    assert main(["checkpoints", "runs/run", "prune", "--keep", "1"]) == 0
    deleted = [line for line in proxy.lines if line.startswith("DELETE")]
    assert "step-2/manifest.json" in deleted[0]
    assert len(deleted) == 3
    assert store.steps() == [4]


@pytest.mark.parametrize("moment", ["a part", "the manifest"])
def test_a_run_killed_while_it_uploads_goes_on_from_the_one_before(make, store, proxy, moment):
    """In the upload of a part, and with all files there but the manifest: then there is no checkpoint."""
    large = {"model.dim": 500} if moment == "a part" else {}
    storage = "part_mb = 5"
    straight = train(make("straight", storage, **large, **SAVED_ONCE))
    pattern = "PUT .*step-4/.*partNumber=2" if moment == "a part" else "PUT .*step-4/manifest"
    proxy.rules.append(Rule(pattern, "stall", times=1))
    make(storage=storage, **large)
    text = Path(f"run-{os.getpid()}.toml").read_text().replace("timeout_s = 5.0", "timeout_s = 600.0")
    Path("killed.toml").write_text(text)
    program = [sys.executable, "-m", "forge_core"]
    overrides = [f"--{key}={value}" for key, value in large.items()]
    process = subprocess.Popen([*program, "killed.toml", *overrides], stdout=subprocess.DEVNULL)

    def is_half_uploaded():  # files are uploaded at the same time: the part may come before the first whole one
        return proxy.rules[0].hits and any("run/step-4" in key for key in store.contents())

    deadline = time.monotonic() + 60
    while not is_half_uploaded() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert is_half_uploaded()
    assert bool(store.uploads()) == (moment == "a part")
    committed = [key for key in store.contents() if "run/" in key and key.endswith("manifest.json")]
    assert [key.split("/")[2] for key in committed] == ["step-2"]
    summary = train(make(storage=storage, **large))
    assert curve(summary) == curve(straight)
    assert store.uploads() == []
    assert {key.split("/")[1] for key in store.contents() if "step-4/manifest" in key} == {"run", "straight"}


class TestCommands:
    """They find the storage in the run's `job.toml`, and fetch what they read."""

    @pytest.fixture(autouse=True)
    def trained(self, make):
        train(make())
        shutil.rmtree("runs/run/checkpoints")

    def test_checkpoints(self, capsys, proxy):
        del proxy.lines[:]
        assert main(["checkpoints", "runs/run"]) == 0
        assert capsys.readouterr().out.count("intact") == 2
        assert not [line for line in proxy.lines if "GET" in line and ".distcp" in line], "sizes need no file"
        assert main(["checkpoints", "runs/run", "verify"]) == 0
        assert main(["checkpoints", "runs/run", "export", "--step", "2", "--out", "out"]) == 0

    @pytest.mark.parametrize("path", ["runs/run", "runs/run/checkpoints/step-2"])
    def test_resume_and_load(self, make, path):
        step = 2 if "step" in path else 4
        other = {"train.steps": step + 1}
        summary = train(make("other", **other), resume=path, resume_with_changes=True)
        assert [row["step"] for row in summary.metrics() if "loss" in row] == [step + 1]
        assert train(make("loaded", checkpoint=f'load = {{path = "{path}"}}')).step == 4


class TestRefusals:
    def problems(self, **keys):
        return list(Objects(**keys).problems(tiny_job("runs"), Layout()))

    def test_urls(self):
        check_problems(self.problems(url="bucket/{job}"), at("url", "s3://bucket"))
        check_problems(self.problems(url="s3://bucket/runs"), at("url", "{job}", "s3://bucket/runs/{job}"))
        check_problems(self.problems(url="memory://runs/{job}"), at("url", "memory of one process"))
        check_problems(self.problems(url="s4://bucket/{job}"), at("url", "fsspec", "'s4'"))
        assert self.problems(url="s3://bucket/{job}") == []

    def test_secrets(self):
        found = self.problems(url="s3://bucket/{job}", options={"secret": "x", "endpoint_url": "http://x"})
        check_problems(found, at("options.secret", "job.toml"))

    def test_a_client_that_is_not_installed(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "gcsfs", None)
        install = "pip install 'forge-plugin-checkpoints[gcs]'"
        check_problems(self.problems(url="gs://bucket/{job}"), at("url", install))

    def test_a_bad_key_stops_the_command(self, make):
        with refuses("checkpoint.storage.url", "{job}"):
            make(**{"checkpoint.storage.url": '"s3://bucket/runs"'})


def test_a_local_run_of_the_same_name_elsewhere_is_read_where_it_is(make, monkeypatch, capsys):
    for folder, changes in {"bucket": {}, "local": {"checkpoint.storage": '{type = "local"}', "model.dim": 24}}.items():
        Path(folder).mkdir()
        monkeypatch.chdir(folder)
        train(make(**changes))
        assert main(["checkpoints", "runs/run"]) == 0
        assert capsys.readouterr().out.count("intact") == 2
        monkeypatch.chdir("..")


def test_a_folder_by_file_url_works_like_a_bucket(make, tmp_path):
    keys = {"checkpoint.storage.url": f'"file://{tmp_path}/shared/{{job}}"', "checkpoint.storage.options": "{}"}
    straight = train(make("straight", **keys, **SAVED_ONCE, **{"train.steps": 6}))
    train(make(**keys))
    shutil.rmtree("runs/run/checkpoints")
    assert curve(train(make(**keys, **{"train.steps": 6}))) == curve(straight)
    assert sorted(path.name for path in Path("shared/run").glob("step-*")) == ["step-4", "step-6"]
    assert not list(Path("shared").rglob("*.part"))
