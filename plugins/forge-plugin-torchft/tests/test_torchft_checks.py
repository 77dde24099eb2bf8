"""What is refused when a job is checked, and how a state travels."""

from __future__ import annotations

import importlib
import io
import socket
import stat
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from attrs import evolve

pytest.importorskip("torchft", reason="torchft is not installed: it has wheels for Linux")

from forge_core.cli import main
from forge_core.config.rules import check_rules
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.layout import Layout
from forge_core.contracts.runtime import State
from forge_core.data.loader import TrainLoader
from forge_core.parallel.layout import batch_problems, micro_batches
from forge_plugin_torchft import DiLoCo, LocalSGD, TorchFT
from forge_plugin_torchft.groups import Groups
from forge_plugin_torchft.secret import group_secret
from forge_plugin_torchft.transport import Received, StateTransport, read_state, write_state
from forge_testing import Numbers, tiny_job
from forge_testing.processes import HANG_S
from forge_testing.refusals import at, check_problems, lacks, naming

STAGE = TorchFT(groups=2, group=1, lighthouse="http://head:29510", trusted_network=True)


@pytest.mark.parametrize(
    ("changes", "path", "facts"),
    [
        ({"group": 2}, "parallel.torchft.group", [2, "groups = 2", "0 to 1"]),
        ({"group": None}, "parallel.torchft.group", ["FORGE_GROUP"]),
        ({"group": 0}, "parallel.torchft", [0, "run folder"]),
        ({"min_groups": 3}, "parallel.torchft.min_groups", [3, "2 groups"]),
        ({"lighthouse": "head:29510"}, "parallel.torchft.lighthouse", ["http://host:port"]),
        ({"start_wait_s": 60.0, "wait_s": 9.0}, "parallel.torchft.start_wait_s", [60, "wait_s = 9"]),
        ({"trusted_network": False}, "parallel.torchft.trusted_network", ["no secret", "http://head:29510"]),
        (
            {"trusted_network": False, "lighthouse": "http://127.0.0.1:29510", "host": "node7"},
            "parallel.torchft.trusted_network",
            ["node7"],
        ),
        (
            {"trusted_network": False, "host": "127.0.0.1"},
            "parallel.torchft.trusted_network",
            ["127.0.0.1", "http://head:29510"],
        ),
    ],
)
def test_a_stage_that_cannot_work_is_refused(tmp_path, catalog, monkeypatch, changes, path, facts):
    monkeypatch.delenv("FORGE_GROUP", raising=False)
    job = tiny_job(str(tmp_path), catalog, job={"name": "run-1"}, parallel={"torchft": evolve(STAGE, **changes)})
    check_problems(check_rules(job, catalog), at(path, *facts))


def test_a_second_stage_is_refused(tmp_path, catalog):
    stage = evolve(STAGE, lighthouse="http://127.0.0.1:29510")
    job = tiny_job(str(tmp_path), catalog, job={"name": "run-1"}, parallel={"torchft": stage, "more": stage})
    found = [problem for problem in check_rules(job, catalog) if "one stage" in problem.message]
    check_problems(found, at("parallel.torchft", "torchft"), at("parallel.more", "torchft"))


def test_on_loopback_no_network_need_be_trusted(tmp_path, catalog):
    stage = evolve(STAGE, lighthouse="http://127.0.0.1:29510", trusted_network=False)
    assert (
        check_rules(tiny_job(str(tmp_path), catalog, job={"name": "run-1"}, parallel={"torchft": stage}), catalog) == []
    )


@pytest.mark.parametrize(
    ("lighthouse", "words"),
    [("http://head:29510", "open to the network without a secret"), ("http://127.0.0.1:29510", "on loopback only")],
)
def test_the_summary_of_a_run_names_what_the_network_can_reach(make_job, build, lighthouse, words):
    stage = evolve(STAGE, lighthouse=lighthouse)
    run = build(make_job(job={"name": "run-1"}, parallel={"torchft": stage}))
    assert run.built_stages[0].describe() == f"group 1 of 2, lighthouse {lighthouse}, {words}"


def test_hooks_that_cannot_work_are_refused(tmp_path, catalog):
    alone = tiny_job(str(tmp_path), catalog, hooks={"diloco": DiLoCo()})
    check_problems(check_rules(alone, catalog), at("hooks.diloco", "[parallel.torchft]"))
    hooks = {"diloco": DiLoCo(sync_every=4, fragments=3), "local_sgd": LocalSGD()}
    both = tiny_job(str(tmp_path), catalog, job={"name": "run-1"}, parallel={"torchft": STAGE}, hooks=hooks)
    check_problems(
        check_rules(both, catalog),
        at("hooks.diloco.fragments", 3, "sync_every = 4"),
        at("hooks.local_sgd", "diloco or local_sgd"),
    )


def test_a_misspelt_key_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = '[parallel.torchft]\ngroups = 2\ngroup = 0\nmin_group = 1\nlighthouse = "http://head:1"\n'
    (tmp_path / "job.toml").write_text(job)
    assert main(["check", "job.toml"]) == 2
    assert not lacks(capsys.readouterr().err, "parallel.torchft.min_group", "'min_groups'")


def test_each_group_has_its_rows_of_the_global_batch(make_job, build):
    plain = build(make_job(global_batch_size=8))
    whole = torch.cat(
        [batch["input_ids"] for batch in TrainLoader(plain.job, plain.datasets, plain.context).next_step()]
    )
    parts = []
    for group in (0, 1):
        stages = {"torchft": evolve(STAGE, group=group)}
        run = build(make_job(job={"name": f"run-{group}"}, parallel=stages, global_batch_size=8, micro_batch_size=2))
        parts += [batch["input_ids"] for batch in TrainLoader(run.job, run.datasets, run.context).next_step()]
    assert torch.equal(torch.cat(parts), whole)


def test_a_batch_that_groups_cannot_share_is_refused(make_job):
    layout = Layout(run=(0, 3), replicate=2)
    check_problems(batch_problems(make_job(global_batch_size=8), layout), at("train.global_batch_size", 8, 6))
    assert micro_batches(make_job(global_batch_size=24, micro_batch_size=2), layout) == (2, 2)


def test_a_state_travels_to_the_bit_and_what_is_cut_short_is_no_state():
    tensors = {
        "model.weight": torch.randn(3, 2).to(torch.bfloat16),
        "optimizer.weight.step": torch.tensor(7.0),
        "optimizer.weight.exp_avg": torch.randn(3, 2, dtype=torch.float64),
        "hook:h.flags": torch.tensor([True, False]),
        "model.empty": torch.empty(0, 4),
    }
    values = {"progress": {"step": 7}, "optimizer": {"scalars": {}}, "extras": {"hook:h": {"x": [1, 2.5, None]}}}
    file = io.BytesIO()
    write_state(file, State(tensors, values), b"key")
    file.seek(0)
    received = read_state(file, 7, b"key").state({})
    assert received.values == values
    for name, tensor in tensors.items():
        assert received.tensors[name].dtype == tensor.dtype
        assert torch.equal(received.tensors[name], tensor)
    whole = file.getvalue()
    for cut in (9, 40):
        with pytest.raises(EOFError, match="ended within"):
            read_state(io.BytesIO(whole[:-cut]), 7, b"key")
    for place in (20, whole.index(b"\n") + 40, len(whole) - 1):  # in the line, in a tensor, in the last code
        changed = bytearray(whole)
        changed[place] ^= 1
        with pytest.raises(ForgeError, match="changed on its way"):
            read_state(io.BytesIO(changed), 7, b"key")


def test_streams_are_refused(make_job, build):
    from forge_core.contracts.errors import JobError

    class Stream(Numbers):
        def build(self, context):
            return Lanes()

    class Lanes:
        is_packed, held_out, bytes_per_token, lanes = True, None, None, 4

        def read(self, lane, position):
            yield from ()

    job = make_job(job={"name": "run-1"}, parallel={"torchft": STAGE}, data={"sources": (Stream(),)})
    with pytest.raises(JobError, match=naming("stream")):
        build(job)


def refused(port):
    """Whether a port of this machine is closed at an address that is not the one that loopback servers listen to."""
    try:
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_state_is_served_to_those_who_have_the_secret_and_on_loopback_only():
    server, friend, stranger = (StateTransport("127.0.0.1", 5.0, secret) for secret in (b"ours", b"ours", b"guessed"))
    empty = State({}, {"progress": {"step": 7}, "optimizer": {}, "extras": {}})
    try:
        server.serve(7, empty)
        fetch = (0, server.metadata(), 7, timedelta(seconds=5))
        assert friend.recv_checkpoint(*fetch)["user"]["default"].values == empty.values
        with pytest.raises(ForgeError, match=naming("FORGE_GROUP_SECRET")):
            stranger.recv_checkpoint(*fetch)
        assert refused(int(server.metadata().rstrip("/").rpartition(":")[2]))
    finally:
        for each in (server, friend, stranger):
            each.shutdown()


def test_a_state_of_another_update_is_not_served():
    server = StateTransport("127.0.0.1", 0.05, b"ours")
    try:
        server.serve(7, State({}, {"progress": {"step": 7}, "optimizer": {}, "extras": {}}))
        with pytest.raises(ForgeError, match=naming(server.metadata(), "update 8")):
            server.recv_checkpoint(0, server.metadata(), 8, timedelta(seconds=5))
    finally:
        server.shutdown()


def test_a_state_that_is_split_otherwise_is_refused():
    tensors = {"model.layers.0.weight": (torch.zeros(2), [4], True)}
    received = Received(7, {}, tensors)
    for like in ({}, {"layers.0.weight": torch.zeros(4)}):
        with pytest.raises(ForgeError, match=naming("model.layers.0.weight", "layouts")):
            received.state(like)


class Stranger(StateTransport):
    """Answers every request with a state, as a process may that has joined by the lighthouse without the secret."""

    def _reply(self, request):
        request.send_response(200)
        request.end_headers()
        write_state(request.wfile, State({}, {"progress": {"step": 7}, "optimizer": {}, "extras": {}}), b"guessed")


def test_a_state_of_a_stranger_is_refused():
    stranger, friend = Stranger("127.0.0.1", 5.0, b"guessed"), StateTransport("127.0.0.1", 5.0, b"ours")
    try:
        with pytest.raises(ForgeError, match="is refused: it was not written by a process that has the groups' secret"):
            friend.recv_checkpoint(0, stranger.metadata(), 7, timedelta(seconds=5))
    finally:
        for each in (stranger, friend):
            each.shutdown()


def test_groups_of_one_user_share_a_secret_that_nobody_else_can_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path))
    assert group_secret() == group_secret()
    [file] = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text()) == 64
    monkeypatch.setenv("FORGE_GROUP_SECRET", "given")
    assert group_secret() == b"given"


def test_a_secret_that_cannot_be_kept_can_be_given(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ForgeError, match=naming(tmp_path / "file/group-secret", "FORGE_GROUP_SECRET")):
        group_secret()


def test_a_lighthouse_for_the_network_must_be_asked_for_by_name(capsys):
    assert main(["launch", "lighthouse", "--host=[::]", "--port=29999"]) == 2
    words = capsys.readouterr().err
    assert "--host=[::]: torchft's lighthouse has no secret, so whoever reaches it can join the groups" in words
    assert "add --trusted-network" in words


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize("option", ["dead-after", "join-within"])
def test_a_time_that_is_none_is_refused(capsys, option, seconds):
    assert main(["launch", "lighthouse", f"--{option}={seconds}"]) == 2
    assert not lacks(capsys.readouterr().err, "--dead-after", "--join-within", "above 0")


def test_a_lighthouse_that_cannot_listen_names_the_address(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["launch", "lighthouse", f"--port={port}"]) == 1
    assert not lacks(capsys.readouterr().err, f"127.0.0.1:{port}", "in use")


def test_what_needs_torchft_names_the_package(monkeypatch, capsys):
    for name in ("torchft", "torchft.coordination"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["launch", "lighthouse"]) == 1
    assert not lacks(capsys.readouterr().err, "torchft", "pip install")
    monkeypatch.delitem(sys.modules, "forge_plugin_torchft.session", raising=False)
    with pytest.raises(ForgeError, match=naming("parallel.torchft", "pip install")):
        importlib.import_module("forge_plugin_torchft.session")


def test_the_lighthouse_listens_on_loopback_unless_told_otherwise():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "forge_core", "launch", "lighthouse", f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().startswith(f"lighthouse = 'http://127.0.0.1:{port}'")
            assert refused(port)
            process.terminate()
            assert process.wait(HANG_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("lighthouse", "host", "reached"),
    [
        ("http://127.0.0.1:29510", "", "127.0.0.1"),
        ("http://head:29510", "", socket.gethostname()),
        ("http://127.0.0.1:29510", "node7", "node7"),
    ],
)
def test_a_machine_is_reached_on_loopback_where_the_lighthouse_is(lighthouse, host, reached):
    assert evolve(STAGE, lighthouse=lighthouse, host=host).reached_at == reached


def test_weights_are_compared_at_the_interval_and_not_after_a_skipped_update():
    compared = []
    session = mock.Mock(every_step=True, compare_weights=compared.append, quorum=lambda commits, context: None)
    session.anywhere.return_value = False
    hook = Groups(settings=SimpleNamespace(session=session, check_every=3))
    for step in range(1, 12):
        context = mock.Mock(step=step, skipped="a group was lost" if step == 6 else "", model=f"after {step}")
        context.job.train.steps = 100
        hook.on_step_end(context)
    assert compared == ["after 3", "after 9"]


def test_averages_are_of_the_groups_that_began_the_round(monkeypatch):
    """A newcomer has other weights, which must not enter the mean; it joins before the next round."""
    session = mock.Mock(takes_part=False)
    session.anywhere.return_value = False
    monkeypatch.setattr(LocalSGD, "_session", lambda hook, context: session)
    context = mock.Mock(step=4, model=torch.nn.Linear(1, 1))
    context.job.train.steps = 100
    LocalSGD(sync_every=4).on_step_end(context)
    of_round, of_newcomers = session.quorum.call_args_list
    assert (of_round.kwargs, of_newcomers.kwargs) == ({"heal": False, "shrink": True}, {})


class TestSession:
    """What groups have to say to each other, with a manager of torchft that says nothing."""

    @pytest.fixture
    def session(self, monkeypatch):
        from forge_plugin_torchft import session as module

        monkeypatch.setattr(module, "_any_rank", list)  # of a single rank
        session = module.Session(evolve(STAGE, min_groups=2, wait_s=1e-9, start_wait_s=0.0))
        session._manager, session._device = mock.Mock(), torch.device("cpu")
        session._manager.errored.return_value = None
        session._transport = mock.Mock(asked=False)
        return session

    def of_all(self, session, *rows):
        """Groups whose table, summed, has these rows."""
        session.sum = lambda table: table.copy_(torch.tensor(rows, dtype=table.dtype))

    def test_a_number_that_another_run_has_is_refused(self, session):
        session._changes = 1
        self.of_all(session, [1, 2], [0, 0], [0, 0])
        with pytest.raises(ForgeError, match=naming("parallel.torchft.group", "group 1")):
            session._know_each_other(2, healed=False)

    def test_a_lighthouse_that_has_gone_is_named(self, session):
        session._manager.start_quorum.side_effect = RuntimeError("connection refused")
        with pytest.raises(ForgeError, match=naming("http://head:29510", "connection refused")):
            session.quorum(0, mock.Mock())

    @pytest.mark.parametrize(
        ("failure", "facts"), [(None, ["1 of 2 groups", "min_groups = 2"]), (RuntimeError(), ["has failed"])]
    )
    def test_a_group_that_stays_alone_ends(self, session, failure, facts):
        session._manager.num_participants.return_value = 1
        session._manager.errored.return_value = failure and SimpleNamespace(original_exception=failure)
        with pytest.raises(ForgeError, match=naming("1e-09 s", *facts)):
            session.quorum(0, mock.Mock())

    def test_weights_that_differ_in_a_bit_end_the_run(self, session):
        model = torch.nn.Linear(2, 1)
        tables = []
        session.sum = tables.append
        session.compare_weights(model)
        digest = tables[0][1, 1].item()
        self.of_all(session, [1, 1], [digest, digest])
        session.compare_weights(model)
        self.of_all(session, [0, 1], [0, digest])  # the other group is gone
        session.compare_weights(model)
        self.of_all(session, [1, 1], [digest + 1, digest])
        with pytest.raises(ForgeError, match=naming("group 1", "group 0", "bit-identical")):
            session.compare_weights(model)

    def test_a_hook_without_its_stage_is_refused(self):
        context = mock.Mock(job=SimpleNamespace(parallel={}), model=torch.nn.Linear(1, 1))
        with pytest.raises(ForgeError, match=naming("[parallel.torchft]")):
            LocalSGD().on_train_begin(context)
