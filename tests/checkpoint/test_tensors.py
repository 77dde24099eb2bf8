"""Tensors to the disk and back: dtypes, shapes, shardings, and what is wrong with an index."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from forge_core.checkpoint import storage, tensors
from forge_core.checkpoint.manager import Checkpoints, Retention, State, verify
from forge_core.checkpoint.storage import LocalStorage, threads
from forge_core.checkpoint.tensors import TensorWriter, load_tensors
from forge_core.contracts.errors import CheckpointError
from forge_core.engine.trainer import Trainer
from forge_kit.tools.checkpoints import stored_tensors
from forge_testing import tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks, naming

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def save(folder, tensors):
    return Checkpoints(LocalStorage(folder), Retention(), "full").save(1, State(tensors, {}))


def random(shape, dtype=torch.float32):
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=5))
def test_every_dtype_and_shape_comes_back_as_it_was(kinds):
    tensors = {f"t{number}": random(tuple(shape), dtype) for number, (dtype, shape) in enumerate(kinds)}
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), tensors)
        assert stored_tensors(path) == {name: (t.shape, t.dtype) for name, t in tensors.items()}
        loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        load_tensors(path, loaded)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_a_tensor_of_any_layout_comes_back(tmp_path):
    whole = torch.arange(24.0).view(2, 3, 4)
    tensors = {"transposed": whole.mT, "slice": whole[:, 1], "expanded": torch.ones(1).expand(5)}
    path = save(tmp_path, tensors)
    loaded = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    load_tensors(path, loaded)
    into = {"transposed": torch.zeros(2, 3, 4).mT}
    load_tensors(path, into)
    assert torch.equal(into["transposed"], whole.mT)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_tensor_is_converted_to_the_dtype_of_what_it_is_loaded_into(tmp_path):
    path = save(tmp_path, {"x": torch.tensor([1.5, 2.5])})
    loaded = {"x": torch.zeros(2, dtype=torch.bfloat16)}
    load_tensors(path, loaded)
    assert loaded["x"].tolist() == [1.5, 2.5]


def test_the_manifest_has_size_and_sha256_of_every_other_file(tmp_path):
    path = save(tmp_path, {"x": torch.randn(100)})
    manifest = verify(path, "full")
    assert manifest["files"].keys() | {"manifest.json"} == {file.name for file in path.iterdir()}
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_large_state_is_spread_over_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("forge_core.checkpoint.tensors.SMALLEST_SHARE", 1000)
    monkeypatch.setattr("forge_core.checkpoint.storage.BLOCK", 500)
    monkeypatch.setattr("forge_core.checkpoint.tensors.threads", lambda: 3)
    tensors = {f"t{n}": torch.randn(50 + n) for n in range(20)}
    path = save(tmp_path, tensors)
    sizes = [file.stat().st_size for file in path.glob("*.distcp")]
    assert len(sizes) == 3
    assert max(sizes) < 1.2 * min(sizes)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(verify_all(path), loaded)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def verify_all(path):
    verify(path, "full")
    return path


LAYOUTS = [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1)), (Shard(1), Shard(0))]


def test_any_sharding_can_read_any_other(tmp_path):
    """Written by four ranks in each layout, read by four in each, by two, and by one."""
    whole = torch.arange(7 * 10.0).view(7, 10)
    few = torch.ones(1, 2)  # some ranks have nothing of it

    def sharded(shape, placements, value):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("ab"[: len(shape)]))
        return distribute_tensor(value, mesh, placements)

    def write(rank):
        for number, placements in enumerate(LAYOUTS):
            x, y = sharded((2, 2), placements, whole), sharded((2, 2), placements, few)
            tensors = {"x": x, "few": y, "plain": whole + 1}
            save(tmp_path / str(number), tensors)

    def read(rank, shape, layouts):
        for number in range(len(LAYOUTS)):
            for placements in layouts:
                x, plain = sharded(shape, placements, torch.zeros(7, 10)), torch.zeros(7, 10)
                y = sharded(shape, placements, torch.zeros(1, 2))
                load_tensors(tmp_path / str(number) / "step-1", {"x": x, "few": y, "plain": plain})
                assert torch.equal(x.full_tensor(), whole)
                assert torch.equal(y.full_tensor(), few)
                assert torch.equal(plain, whole + 1)

    run_on_ranks(4, lambda rank: [write(rank), read(rank, (2, 2), LAYOUTS)])
    run_on_ranks(2, lambda rank: read(rank, (2,), [(Shard(0),), (Shard(1),)]))
    for number in range(len(LAYOUTS)):
        loaded = {"x": torch.zeros(7, 10)}
        load_tensors(tmp_path / str(number) / "step-1", loaded)
        assert torch.equal(loaded["x"], whole)


WHOLE = {"offsets": [0, 0], "sizes": [2, 3], "start": 0}


class TestAnIndex:
    @pytest.fixture
    def checkpoint(self, tmp_path):
        return save(tmp_path, {"x": torch.arange(6.0).view(2, 3), "y": torch.arange(4)})

    @pytest.mark.parametrize(
        ("change", "fault"),
        [
            ({"dtype": "load"}, "'load'"),
            ({"dtype": "no_such_type"}, "no_such_type"),
            ({"size": [3, 3]}, "chunks of x"),
            ({"chunks": []}, "chunks of x"),
            ({"chunks": [WHOLE | {"file": "../x"}]}, "'../x'"),
            ({"chunks": [WHOLE | {"file": ".x"}]}, "'.x'"),
            ({"chunks": [{"offsets": [0, 0], "sizes": [2, 3]}]}, "KeyError: 'file'"),
            ({"chunks": 5}, "TypeError"),
        ],
    )
    def test_of_another_form_is_refused(self, checkpoint, change, fault):
        entries = json.loads((checkpoint / "index.json").read_text())
        entries["x"] |= change
        (checkpoint / "index.json").write_text(json.dumps(entries))
        with pytest.raises(CheckpointError, match=naming(checkpoint / "index.json", fault)):
            stored_tensors(checkpoint)

    @pytest.mark.parametrize("start", [33, 10**12, -1])
    def test_that_points_beyond_its_file_is_refused(self, checkpoint, start):
        entries = json.loads((checkpoint / "index.json").read_text())
        entries["x"]["chunks"][0]["start"] = start
        (checkpoint / "index.json").write_text(json.dumps(entries))
        with pytest.raises(CheckpointError, match=r"step-1\b.*rank 0: .*(__0_0\.distcp .*\bx\b|Invalid argument)"):
            load_tensors(checkpoint, {"x": torch.zeros(2, 3)})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "manifest.json: TypeError"),
        ("{}", "KeyError: 'format'"),
        ('{"format": 1, "files": {}}', "format 1; .* 2$"),
        ('{"format": 2, "files": {"a": {}}}', "manifest.json: KeyError: 'size'"),
        ('{"format": 2, "files": {"../a": {"size": 1, "sha256": ""}}}', "'../a'"),
        ('{"format": 2, "files": {"a/../../b": {"size": 1, "sha256": ""}}}', "'a/../../b'"),
        ('{"format": 2, "files": {"/b": {"size": 1, "sha256": ""}}}', "'/b'"),
        ('{"format": 2, "files": 7}', "manifest.json: AttributeError"),
    ],
)
def test_a_manifest_of_another_form_is_refused(tmp_path, text, fault):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=fault):
        verify(tmp_path, "full")


def test_all_faults_of_a_checkpoint_are_named(tmp_path):
    path = save(tmp_path, {"x": torch.randn(100)})
    (path / "index.json").unlink()
    (path / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=naming(path / "__0_0.distcp", "5 bytes", 400, path / "index.json")):
        verify(path, "sizes")


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path):
    path = save(tmp_path, {"x": torch.randn(100)})
    (path / "__0_0.distcp").unlink()
    (path / "__0_0.distcp").symlink_to("__0_0.distcp")
    with pytest.raises(CheckpointError, match=naming(path / "__0_0.distcp", os.strerror(errno.ELOOP))):
        verify(path, "sizes")


def test_what_is_not_a_tensor_is_refused_with_its_name(tmp_path):
    with pytest.raises(CheckpointError, match=naming("step 1", "weights")):
        save(tmp_path, {"weights": [1, 2]})


def test_ranks_share_out_the_files_and_agree(tmp_path, monkeypatch):
    whole = torch.randn(8, 4)

    def work(rank):
        mesh = init_device_mesh("cpu", (2,))
        checkpoints = Checkpoints(LocalStorage(tmp_path), Retention(), "full")
        for step in (1, 2):
            checkpoints.save(step, State({"x": distribute_tensor(whole, mesh, [Shard(0)])}, {}))
        if rank == 0:
            file = tmp_path / "step-2/__1_0.distcp"
            file.write_bytes(b"x" + file.read_bytes()[1:])
        torch.distributed.barrier()
        hashed = []
        original = storage._sha256
        monkeypatch.setattr(storage, "_sha256", lambda path: hashed.append(path.name) or original(path))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            path, found = checkpoints.newest()
        return path.name, found["step"], sorted(hashed), [str(warning.message) for warning in told]

    (first, _, hashed, told), (second, _, others, silence) = run_on_ranks(2, work)
    assert first == second == "step-1"
    assert sorted([*hashed, *others]) == sorted(2 * ["__0_0.distcp", "__1_0.distcp", "index.json"])
    assert len(told) == 1
    assert not lacks(told[0], "step-2/__1_0.distcp", "SHA-256")
    assert silence == []


def test_each_rank_writes_its_own_part_only(tmp_path):
    def work(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])
        save(tmp_path, {"x": DTensor.from_local(torch.full((4, 4), float(rank)), mesh, x.placements)})

    run_on_ranks(2, work)
    for rank in (0, 1):
        data = (tmp_path / f"step-1/__{rank}_0.distcp").read_bytes()
        assert torch.frombuffer(bytearray(data), dtype=torch.float32).unique().tolist() == [rank]


def counted(monkeypatch, where, name):
    """Lets calls of a function through, and returns the list that they are noted in."""
    calls, original = [], getattr(where, name)
    monkeypatch.setattr(where, name, lambda *arguments: calls.append(name) or original(*arguments))
    return calls


def test_only_rank_0_parses_the_index_of_a_run_that_continues_and_once(tmp_path, monkeypatch):
    def work(rank):
        Trainer(tiny_job(str(tmp_path), steps=2), echo=lambda text: None).run()
        parsed = counted(monkeypatch, tensors, "parse_index")
        Trainer(tiny_job(str(tmp_path), steps=3), echo=lambda text: None).run()
        return len(parsed)

    assert run_on_ranks(2, work) == [1, 0]


def test_a_rank_makes_objects_only_of_the_chunks_that_it_needs():
    rows = 10_000
    chunks = [{"offsets": [row, 0], "sizes": [1, 4], "file": f"__{row}_0.distcp", "start": 0} for row in range(rows)]
    parsed = tensors.parse_index(json.dumps({"x": {"dtype": "float32", "size": [rows, 4], "chunks": chunks}}))
    assert [read.file for read in parsed.reads("x", torch.empty(2, 4), (7, 0))] == ["__7_0.distcp", "__8_0.distcp"]


def test_saves_are_planned_once_while_the_tensors_stay_and_again_when_one_changes(tmp_path, monkeypatch):
    def work(rank):
        planned = counted(monkeypatch, TensorWriter, "_plan")
        mesh = init_device_mesh("cpu", (2,))
        checkpoints = Checkpoints(LocalStorage(tmp_path), Retention(keep=9), "full")
        own = DTensor.from_local(torch.full((2, 3), float(rank)), mesh, [Shard(0)])
        counts = []
        for step, grown in enumerate(({}, {}, {"y": torch.arange(3.0)}), 1):
            checkpoints.save(step, State({"x": own + step, **grown}, {}))
            counts.append(len(planned))
        loaded = {"x": torch.zeros(4, 3), "y": torch.zeros(3)}
        load_tensors(tmp_path / "step-3", loaded)
        second = {"x": torch.zeros(4, 3)}
        load_tensors(tmp_path / "step-2", second)
        return counts, loaded["x"][:, 0].tolist(), loaded["y"].tolist(), second["x"][:, 0].tolist()

    outcome = ([1, 1, 2], [3.0, 3.0, 4.0, 4.0], [0.0, 1.0, 2.0], [2.0, 2.0, 3.0, 3.0])
    assert run_on_ranks(2, work) == [outcome, outcome]


@pytest.mark.parametrize(("cores", "ranks", "count"), [(16, 1, 8), (16, 4, 4), (4, 8, 1), (1, 1, 1)])
def test_ranks_of_a_machine_share_its_cores_for_their_files(monkeypatch, cores, ranks, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert threads() == count
