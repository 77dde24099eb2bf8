"""Checkpoints in memory, on machines that are folders: each looks into its own, and asks others over the network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import warnings
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from attrs import define

from forge_core import Trainer, load_job
from forge_core.checkpoint.storage import LocalStorage, write_file, write_manifest
from forge_core.cli import main
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import CheckpointError, ForgeError
from forge_core.job import CheckpointSection
from forge_plugin_checkpoints.tiered import NODE
from forge_plugin_checkpoints.tiered.exchange import Exchange, Peer
from forge_plugin_checkpoints.tiered.storage import TieredStorage
from forge_testing import TINY_JOB
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks, naming

pytestmark = pytest.mark.slow

DURABLE = Path("runs/run/checkpoints")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


class PowerFailure(Exception):
    """Nothing is saved any more."""


@define(kw_only=True, slots=False)
class PowerCut(TrainingHook):
    """Ends a run on all ranks at once."""

    resumes_as = "safe"
    step: int = 8

    def on_step_begin(self, context):
        if context.step == self.step:
            raise PowerFailure


def job_text(name="run", storage="", checkpoint="interval = 1"):
    return f"""
[job]
name = "{name}"
{TINY_JOB}
[checkpoint]
keep = 2
{checkpoint}
[checkpoint.storage]
type = "tiered"
fast = "memory-{{node}}"
durable_every = 3
{storage}
"""


def make(name="run", storage="", checkpoint="interval = 1", **overrides):
    path = Path(f"{name}-{os.getpid()}.toml")
    path.write_text(job_text(name, storage, checkpoint))
    overrides = {"train.steps": 10, "train.micro_batch_size": 1, **overrides}
    return load_job(str(path), overrides=[f"{key}={value}" for key, value in overrides.items()])


def train(job, *hooks, **options):
    """Train; returns the losses, and the warnings about checkpoints."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            summary = Trainer(job, hooks=hooks, echo=lambda text: None, **options).run()
        except PowerFailure:
            return [], []
    texts = [str(one.message) for one in told]
    words = ("memory", "damaged", "machine")
    losses = [(row["step"], row["loss"]) for row in summary.metrics() if "loss" in row]
    return losses, [text for text in texts if any(word in text for word in words)]


def on_machine(rank, each):
    os.environ[NODE] = f"{rank // each}"


def held(machine, step):
    return sorted(path.name for path in Path().glob(f"memory-{machine}/run-*/step-{step}/[!.]*"))


def lose(*machines):
    for machine in machines:
        while (folder := Path(f"memory-{machine}")).exists():  # a rank that was cut may still remove files of a step
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """A run of two machines with a rank each that was cut in step 8, and the losses of one that was not."""
    folder = tmp_path_factory.mktemp("cut")
    background = {"checkpoint.async_save": "true"}

    def work(rank):
        on_machine(rank, 1)
        straight, _ = train(make("straight", **background))
        train(make(**background), PowerCut())
        return straight

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        straight, other = run_on_ranks(2, work)
    assert straight == other
    assert len(straight) == 10
    return folder, straight, background


@pytest.fixture
def again(cut, tmp_path, monkeypatch):
    """Start the run that was cut again; returns losses and warnings of each rank."""
    folder, straight, background = cut
    shutil.copytree(folder, tmp_path / "again")
    monkeypatch.chdir(tmp_path / "again")
    # The folder in memory has the path of the run folder in its name
    for old in Path().glob("memory-*/run-*"):
        mark = hashlib.sha256(os.path.abspath("runs/run").encode()).hexdigest()[:8]
        old.rename(old.with_name(f"run-{mark}"))

    def again(ranks=2, each=1, damage=lambda: None, **overrides):
        damage()

        def work(rank):
            on_machine(rank, each)
            return train(make(**background, **overrides))

        results = run_on_ranks(ranks, work)
        return straight, results[0][0], results[0][1]

    return again


def test_each_machine_has_its_own_files_those_of_its_neighbour_and_the_manifest(cut, monkeypatch):
    monkeypatch.chdir(cut[0])
    newest = max(int(path.name[5:]) for path in Path().glob("memory-0/run-*/step-?"))
    assert newest in (6, 7)
    for machine in (0, 1):
        assert held(machine, newest) == ["__0_0.distcp", "__1_0.distcp", "index.json", "manifest.json"]
    assert not list(Path().glob("memory-?/run-*/*/.*.lock")), "nothing was read"
    assert {path.name for path in DURABLE.glob("step-*")} <= {"step-3", "step-6"}


@pytest.mark.parametrize("machine", [0, 1])
def test_a_machine_is_lost_and_the_run_goes_on_from_memory_to_the_bit(again, machine):
    newest = max(int(path.name[5:]) for path in Path().glob("memory-0/run-*/step-?"))
    shutil.rmtree(DURABLE)  # which has nothing to do with it
    straight, losses, told = again(damage=lambda: lose(machine))
    assert losses == straight
    assert newest >= 6
    assert [text for text in told if "lost" in text] == []
    assert sorted(path.name for path in DURABLE.iterdir())[-1] == "step-10"
    assert not list(Path().glob("memory-*/run-*")), "a run that ends in order leaves no memory taken"


def test_both_copies_are_lost_and_the_durable_one_is_taken_and_named(again):
    durable = max(int(path.name[5:]) for path in DURABLE.glob("step-?"))

    def damage():
        for path in Path().glob("memory-?/run-*/step-*/__1_0.distcp"):
            path.unlink()

    straight, losses, told = again(damage=damage)
    assert losses == straight
    [text] = [text for text in told if "lost" in text]
    assert not lacks(text, "__1_0.distcp", f"step {durable}")


def test_all_machines_are_lost(again):
    straight, losses, _ = again(damage=lambda: lose(0, 1))
    assert losses == straight


def test_a_damaged_copy_is_passed_over_and_the_neighbours_taken(again):
    shutil.rmtree(DURABLE)

    def damage():
        for path in Path().glob("memory-0/run-*/step-*/__0_0.distcp"):
            path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])

    straight, losses, told = again(damage=damage)
    assert losses == straight
    [text] = [text for text in told if "damaged" in text]
    assert not lacks(text, "__0_0.distcp", "SHA-256", "taken from 1")


def test_of_two_versions_of_a_step_the_newer_is_taken(again):
    """As after a roll-back, when a machine was lost before the step was committed once more."""

    def damage():
        for path in Path().glob("memory-1/run-*/step-*/manifest.json"):
            manifest = json.loads(path.read_text())
            older = manifest | {"time": manifest["time"] - 100, "tokens": 0}
            path.write_text(json.dumps(older | {"progress": manifest["progress"] | {"step": 1}}))

    straight, losses, told = again(damage=damage)
    assert losses == straight
    assert [text for text in told if "lost" in text or "damaged" in text] == []


def test_all_copies_damaged_fall_back_to_the_durable_one(again):
    def damage():
        for path in Path().glob("memory-?/run-*/step-*/__1_0.distcp"):
            path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])

    straight, losses, told = again(damage=damage)
    assert losses == straight
    assert any(not lacks(text, "damaged", "passing over", "the copy of") for text in told)


@pytest.mark.parametrize(("ranks", "each"), [(1, 1), (4, 2)])
def test_another_number_of_ranks_and_machines_takes_it_over(again, ranks, each):
    shutil.rmtree(DURABLE)
    straight, losses, told = again(ranks, each, **{"train.micro_batch_size": 1})
    assert [step for step, _ in losses] == [step for step, _ in straight]
    for (_, ours), (_, theirs) in zip(losses, straight, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert any("1 machine(s): no copies" in text for text in told) == (ranks == 1)


def test_two_machines_of_two_ranks_send_to_the_same_seat_of_the_other():
    steps = {"train.steps": 5}

    def work(rank):
        on_machine(rank, 2)
        straight, _ = train(make("straight", **steps))
        train(make(**steps), PowerCut(step=4))
        torch.distributed.barrier()
        whole = held(0, 3), held(1, 3)
        torch.distributed.barrier()
        if rank == 0:
            lose(1)
            while DURABLE.exists():  # a copy into it may still be under way
                shutil.rmtree(DURABLE, ignore_errors=True)
        torch.distributed.barrier()
        return whole, straight, train(make(**steps))[0]

    for whole, straight, losses in run_on_ranks(4, work):
        assert whole[0] == whole[1] == [*(f"__{rank}_0.distcp" for rank in range(4)), "index.json", "manifest.json"]
        assert losses == straight


def test_a_roll_back_finds_what_is_durable_beside_the_newest_in_memory():
    @define(kw_only=True, slots=False)
    class Back(TrainingHook):
        resumes_as = "safe"
        rolls_back = False
        asked: bool = False

        def on_step_end(self, context):
            if context.step == 8 and not self.asked:
                self.asked = True
                context.request_rollback("a spike", to=7)

    def work(rank):
        on_machine(rank, 1)
        told = []
        summary = Trainer(make(**{"checkpoint.async_save": "true"}), hooks=[Back()], echo=told.append).run()
        return summary.step, [text for text in told if "went back" in text]

    ranks = run_on_ranks(2, work)
    assert [step for step, _ in ranks] == [10, 10]
    # Step 8 is saved while the roll-back is asked for, and takes the place of step 7 in memory
    assert ranks[0][1][0] in [f"step 8: went back to the state of step {step}: a spike" for step in (6, 7)]


def test_no_copies_means_that_a_lost_machine_is_lost():
    def work(rank):
        on_machine(rank, 1)
        train(make(storage="copies = 0"), PowerCut())
        torch.distributed.barrier()
        files = held(rank, 7)
        torch.distributed.barrier()
        if rank == 0:
            lose(1)
        torch.distributed.barrier()
        return files, train(make(storage="copies = 0"))[1]

    (ours, told), (theirs, _) = run_on_ranks(2, work)
    assert ours == ["__0_0.distcp", "index.json", "manifest.json"]
    assert theirs == ["__1_0.distcp", "manifest.json"]
    assert any(not lacks(text, "step 7", "lost", "__1_0.distcp", "step 6") for text in told)


def test_a_stop_and_the_end_put_the_newest_into_the_durable_storage():
    @define(kw_only=True, slots=False)
    class Stop(TrainingHook):
        resumes_as = "safe"

        def on_step_end(self, context):
            if context.step == 5:
                context.request_stop("enough")

    def work(rank):
        on_machine(rank, 1)
        train(make(), Stop())
        torch.distributed.barrier()
        stopped = sorted(path.name for path in DURABLE.glob("step-*"))
        memory = list(Path().glob("memory-*/run-*"))
        torch.distributed.barrier()
        train(make())
        return stopped, memory, sorted(path.name for path in DURABLE.glob("step-*"))

    for stopped, memory, ended in run_on_ranks(2, work):
        assert stopped == ["step-3", "step-5"]
        assert memory == []
        assert ended == ["step-10", "step-8"], "the third since the second start, and the last"


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_durable_storage_that_fails_is_told_and_handled_by_on_failure(on_failure):
    """Memory goes on; the last checkpoint must become durable."""
    Path("runs/run").mkdir(parents=True)
    DURABLE.write_text("no folder")

    def work(rank):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            job = make(checkpoint=f'interval = 1\non_failure = "{on_failure}"')
            with pytest.raises(CheckpointError) as failure:
                Trainer(job, echo=lambda text: None).run()
        return str(failure.value), [str(one.message) for one in told if "could not save" in str(one.message)]

    ((error, told),) = run_on_ranks(1, work)
    last = 4 if on_failure == "stop" else 10
    assert not lacks(error, f"step {last}")
    assert bool(told) == (on_failure == "continue")


def test_a_neighbour_that_cannot_take_its_copy_is_a_failed_save():
    def work(rank):
        on_machine(rank, 1)
        if rank == 1:
            take_nothing(Exchange)
        with pytest.raises(CheckpointError) as failure:
            train(make())
        return str(failure.value)

    first, second = run_on_ranks(2, work)
    assert first == second
    assert not lacks(first, "step 1", "copied to 1")


def take_nothing(exchange):
    """From now on, servers of this process end each connection at once."""
    start = exchange.__init__

    def broken(self, *arguments):
        start(self, *arguments)
        self._server.RequestHandlerClass.handle = lambda handler: None

    exchange.__init__ = broken


@define(kw_only=True, slots=False)
class First(TrainingHook):
    """Notes the step that a start has restored."""

    resumes_as = "safe"
    step: int = -1

    def on_train_begin(self, context):
        self.step = context.step


@define(kw_only=True, slots=False)
class Kill(TrainingHook):
    """Ends the process of a rank, of a machine, without a word."""

    resumes_as = "safe"
    rank: int

    def on_step_begin(self, context):
        if context.step == 7 and torch.distributed.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_is_killed_and_the_memory_of_its_machine_is_gone(cut, killed):
    def work(rank, *hooks):
        on_machine(rank, 1)
        first = First()
        return train(make(), first, *hooks)[0], first.step

    _, straight, _ = cut
    with pytest.raises(AssertionError):
        run_on_ranks(2, lambda rank: work(rank, Kill(rank=killed)))
    lose(killed)
    shutil.rmtree(DURABLE)
    assert run_on_ranks(2, work) == [(straight, 6)] * 2


@pytest.mark.thorough
def test_the_processes_of_a_machine_are_killed_and_its_memory_is_gone(cut):
    """Of the machine whose process is the rendezvous of the others."""
    killed = 0
    _, straight, _ = cut
    hook = f"""
import os, signal
from attrs import define
from forge_core import TrainingHook

@define(kw_only=True, slots=False)
class Kill(TrainingHook):
    resumes_as = "safe"

    def on_step_begin(self, context):
        if context.step == 7 and os.environ["RANK"] == "{killed}" and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""
    Path("kill.py").write_text(hook)
    text = job_text() + '[hooks.kill]\ntype = "./kill.py:Kill"\n'
    Path("job.toml").write_text(text)

    def start():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        keys = ["--train.steps=10", "--train.micro_batch_size=1"]
        program = [sys.executable, "-m", "forge_core", "job.toml", *keys]
        ranks = []
        for rank in range(2):
            where = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
            variables = {name: str(value) for name, value in {**where, "MASTER_PORT": port, NODE: rank}.items()}
            ranks.append(
                subprocess.Popen(
                    program,
                    env={**os.environ, **variables},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return [(rank.communicate(timeout=120)[0], rank.returncode) for rank in ranks]

    codes = [code for _, code in start()]
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] != 0
    lose(killed)
    shutil.rmtree(DURABLE)
    outputs = start()
    assert [code for _, code in outputs] == [0, 0], outputs
    assert "step 6" in outputs[0][0]
    assert losses_of("run") == straight


def losses_of(name):
    lines = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


class TestCommands:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch):
        monkeypatch.setenv(NODE, "0")

    def test_read_what_is_durable_after_the_end(self, capsys):
        train(make())
        assert main(["checkpoints", "runs/run"]) == 0
        assert capsys.readouterr().out.count("intact") == 2
        assert main(["checkpoints", "runs/run", "verify"]) == 0
        assert main(["runs"]) == 0

    def test_read_and_delete_what_this_machine_has_in_memory(self, capsys):
        train(make(), PowerCut())
        assert main(["checkpoints", "runs/run", "verify"]) == 0
        assert "step 7: intact" in capsys.readouterr().out
        assert main(["checkpoints", "runs/run", "prune", "--keep", "1"]) == 0
        assert "staying: 7" in capsys.readouterr().out
        assert not list(DURABLE.glob("step-*"))


def test_too_little_memory_is_refused_before_the_first_step(monkeypatch, tmp_path, build):
    state = 3 * sum(4 * parameter.numel() for parameter in build(make()).model.parameters())  # with two moments
    needed = state * (2 * (1 + 1) + 1)  # own checkpoint and copy of another machine, each old and new; one on its way
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable:       {int(0.9 * needed / 0.6 / 1024)} kB\n")
    monkeypatch.setattr("forge_plugin_checkpoints.tiered.memory.MEMINFO", meminfo)
    with pytest.raises(ForgeError, match=naming("checkpoint.storage.copies", "60%")) as refused:
        Trainer(make(), echo=lambda text: None).run()
    assert refused.value.exit_code == 2
    assert not list(Path().glob("memory-*"))


def test_a_tier_of_tiers_is_refused():
    with pytest.raises(ForgeError, match=naming("outlives")):
        make(storage='durable = {type = "tiered"}')


class TestExchange:
    @pytest.fixture
    def exchange(self, tmp_path):
        (tmp_path / "file").write_bytes(b"bytes")
        made = Exchange("here", lambda step, name: [tmp_path / name], lambda step: tmp_path / "copies")
        yield made
        made.close()

    def test_a_stranger_gets_nothing(self, exchange, tmp_path):
        from attrs import evolve

        with pytest.raises(OSError, match=naming("file")):
            exchange.get(evolve(exchange.own, secret="guessed"), 1, "file", tmp_path / "stolen")
        assert not (tmp_path / "stolen").exists()

    @pytest.mark.parametrize("name", ["../file", ".hidden"])
    def test_no_other_file_is_served(self, exchange, tmp_path, name):
        with pytest.raises(OSError, match="has no"):
            exchange.get(exchange.own, 1, name, tmp_path / "stolen")

    def test_a_file_arrives_as_it_was(self, exchange, tmp_path):
        exchange.get(exchange.own, 1, "file", tmp_path / "back")
        exchange.put(exchange.own, 1, tmp_path / "file")
        assert (tmp_path / "back").read_bytes() == (tmp_path / "copies/file").read_bytes() == b"bytes"

    @pytest.mark.parametrize(
        ("answer", "facts"),
        [
            (b"", ["file", "step 1"]),
            (b"5\nby", ["3 bytes", "file"]),
            (b"5\nbytes", ["damaged", "file"]),
            (b"5\nbytes" + zlib.crc32(b"other").to_bytes(4, "big"), ["damaged", "file"]),
        ],
    )
    def test_a_file_that_does_not_arrive_as_it_was_is_not_there(self, tmp_path, answer, facts):
        with served(answer) as peer, pytest.raises(OSError, match=naming(*facts)):
            Exchange.get(None, peer, 1, "file", tmp_path / "file")
        assert list(tmp_path.iterdir()) == []

    def test_a_file_with_the_right_sum_is_taken(self, tmp_path):
        with served(b"5\nbytes" + zlib.crc32(b"bytes").to_bytes(4, "big")) as peer:
            Exchange.get(None, peer, 1, "file", tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == b"bytes"


@contextmanager
def served(answer):
    """A peer that answers each request with these bytes."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            self.wfile.write(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield Peer("other", "127.0.0.1", server.server_address[1], "secret")
        server.shutdown()


class TestStorage:
    """A storage by itself, without a run."""

    @pytest.fixture
    def storage(self, monkeypatch):
        monkeypatch.setenv(NODE, "here")
        return TieredStorage(Path("memory"), LocalStorage(Path("durable")), CheckpointSection(), copies=0, every=1)

    @pytest.fixture
    def saved(self, storage):
        """Step 1, with a single file, which is in memory alone."""
        folder = storage.begin(1)
        entry = write_file(folder / "file", [b"bytes"])
        storage.publish(1)
        write_manifest(folder, {"format": 1, "time": 1.0, "files": {"file": entry}})
        storage.commit(1)
        return storage

    def test_a_step_is_there_with_its_sizes(self, saved):
        assert saved.steps() == [1]
        assert saved.size(1, "file") == 5
        with pytest.raises(FileNotFoundError, match="other"):
            saved.size(1, "other")

    @pytest.mark.parametrize(
        "text", ["{", "[]", "{}", '{"files": {}}', '{"time": 1.0, "files": {"file": {"size": 5}}}']
    )
    def test_a_step_with_a_damaged_manifest_is_not_there(self, saved, text):
        """As a machine that lost power leaves it."""
        Path("memory/step-1/manifest.json").write_text(text)
        assert saved.steps() == []

    def test_a_step_of_which_memory_lacks_a_file_is_not_there(self, saved):
        Path("memory/step-1/file").unlink()
        assert saved.steps() == []

    def test_what_was_damaged_in_memory_does_not_become_durable(self, saved):
        Path("memory/step-1/file").write_bytes(b"BYTES")
        with pytest.raises(CheckpointError, match=naming("file", "damaged in memory")):
            saved.close()
        assert not Path("durable/step-1").exists()

    def test_a_manifest_that_rank_0_cannot_send_is_a_failed_save(self, storage):
        with served(b"") as peer:
            storage.join(lambda value: [peer if isinstance(value, Peer) else type(value)(), value])
            storage.begin(2)
            with pytest.raises(CheckpointError, match=naming("step 2", "rank 0", "manifest.json")):
                storage.commit(2)
        assert storage.steps() == []
        storage._exchange.close()
