"""Uploads to a real HTTP server, with faults on the way."""

from __future__ import annotations

import os
import threading
import time

import pytest
from proxy import Rule

from forge_core.contracts.errors import CheckpointError
from forge_plugin_checkpoints.objects.bucket import LEAST_RATE, Bucket
from forge_plugin_checkpoints.objects.storage import ObjectStorage
from forge_testing.refusals import naming

PART = 5 << 20
"""Bytes: the least that S3 takes."""


@pytest.fixture
def bucket(store):
    def make(**settings):
        options = {"endpoint_url": store.endpoint}
        keys = {"part": PART, "retries": 3, "backoff_s": 0.01, "timeout_s": 5.0, **settings}
        return Bucket(f"s3://{store.name}/run", options, **keys)

    return make


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(os.urandom(2 * PART + 1234))
    return path


@pytest.mark.parametrize("size", [0, 1, 1000, 2 * PART - 1, 2 * PART, 3 * PART + 17])
def test_files_come_back_as_they_were_in_one_piece_or_in_parts(bucket, store, proxy, tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    bucket().upload(path, "step-1/file")
    bucket().download("step-1/file", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes() == store.get("run/step-1/file")
    assert any("uploadId" in line for line in proxy.lines) == (size >= 2 * PART)
    # The ETag was enough: nothing was read back to be compared
    assert len([line for line in proxy.lines if line.startswith("GET") and "/file" in line]) == 1


@pytest.mark.parametrize(
    "rule",
    [
        Rule("PUT .*/large", "503", times=3),
        Rule("PUT .*partNumber=2", "reset", times=2, bytes=PART // 2),
        Rule("POST .*uploads", "reset", times=2, bytes=1),
        Rule("PUT .*partNumber=1", "delay", seconds=0.3),
        Rule("HEAD", "503", times=1),
    ],
)
def test_an_upload_that_is_disturbed_is_tried_again_and_leaves_nothing(bucket, store, proxy, large, rule):
    proxy.rules.append(rule)
    bucket().upload(large, "step-1/large")
    assert rule.hits
    assert store.get("run/step-1/large") == large.read_bytes()
    assert bucket().unfinished_uploads() == []


@pytest.mark.parametrize(("action", "count"), [("503", 4), ("reset", 4)])
def test_a_store_that_is_down_is_an_error_with_url_attempts_and_cause(bucket, proxy, store, large, action, count):
    proxy.rules.append(Rule("PUT", action))
    name = f"s3://{store.name}/run/step-1/large"
    with pytest.raises(CheckpointError, match=naming(name, f"{count} attempts")):
        bucket().upload(large, "step-1/large")
    assert store.contents() == []


@pytest.mark.parametrize("pattern", ["POST", "PUT .*partNumber"])
def test_a_store_that_never_answers_is_given_up(bucket, proxy, large, monkeypatch, pattern):
    monkeypatch.setattr("forge_plugin_checkpoints.objects.bucket.LEAST_RATE", 1 << 28)
    proxy.rules.append(Rule(pattern, "stall"))
    with pytest.raises(CheckpointError, match="2 attempts"):
        bucket(retries=1, timeout_s=0.3).upload(large, "step-1/large")


def test_a_file_in_one_piece_that_is_never_answered_is_tried_again(bucket, proxy, store, tmp_path):
    """The client's own limits cover connecting and reading: it waits for leave to send the body without one."""
    (tmp_path / "small").write_bytes(os.urandom(40_000))
    proxy.rules.append(Rule("PUT", "stall", times=1))
    began = time.monotonic()
    # A busy machine may be too slow for a further attempt as well
    bucket(retries=9, timeout_s=0.5).upload(tmp_path / "small", "step-1/small")
    assert time.monotonic() - began > 0.5
    assert store.get("run/step-1/small") == (tmp_path / "small").read_bytes()
    assert len([line for line in proxy.lines if line.startswith("PUT")]) >= 2


def test_a_slow_upload_that_moves_is_not_given_up(bucket, proxy, store, large, monkeypatch):
    """All parts together take longer than the limit, and none by itself."""
    monkeypatch.setattr("forge_plugin_checkpoints.objects.bucket.LEAST_RATE", 1 << 28)
    proxy.rules.append(Rule("PUT .*partNumber", "delay", seconds=1.2))
    bucket(retries=0, timeout_s=3.0, parallel=1).upload(large, "step-1/large")
    assert store.get("run/step-1/large") == large.read_bytes()


def test_attempts_come_at_growing_distance(bucket, proxy, large, monkeypatch):
    pauses = []
    monkeypatch.setattr("forge_plugin_checkpoints.objects.bucket.time.sleep", pauses.append)
    proxy.rules.append(Rule("POST", "503"))
    with pytest.raises(CheckpointError):
        bucket(retries=4, backoff_s=10.0).upload(large, "large")
    assert [
        round(longest / 2) <= pause <= longest for longest, pause in zip([10, 20, 40, 60], pauses, strict=True)
    ] == 4 * [True]


@pytest.mark.parametrize(("parallel", "threads", "at_once"), [(8, 1, 8), (8, 3, 2), (2, 4, 1)])
def test_parts_on_their_way_at_a_time_are_shared_among_files(bucket, large, monkeypatch, parallel, threads, at_once):
    ours, asked, limits = bucket(parallel=parallel, timeout_s=5.0), [], []
    put, call = ours._fs._put_file, ours._call

    async def watched(local, remote, chunksize=0, max_concurrency=0, **settings):
        asked.append((chunksize, max_concurrency))
        await put(local, remote, chunksize=chunksize, max_concurrency=max_concurrency, **settings)

    def limited(name, *arguments, limit_s=0, **settings):
        limits.extend([limit_s] * (name == "put_file"))
        return call(name, *arguments, limit_s=limit_s, **settings)

    monkeypatch.setattr(ours._fs, "_put_file", watched)
    monkeypatch.setattr(ours, "_call", limited)
    ours.upload(large, "large", threads=threads)
    assert asked == [(PART, at_once)]
    first_bytes = min(large.stat().st_size, PART * at_once)  # nothing moves until parts of so many have arrived
    assert limits == [pytest.approx(5.0 + first_bytes / LEAST_RATE)]


@pytest.mark.parametrize(("parallel", "items", "at_once"), [(3, 12, 3), (8, 2, 2), (0, 2, 1)])
def test_no_more_calls_than_wanted_are_made_at_a_time(bucket, parallel, items, at_once):
    lock, running, most = threading.Lock(), 0, 0
    together = threading.Barrier(at_once, timeout=60)

    def action(name):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1
        return name

    names = [str(number) for number in range(items)]
    assert bucket(parallel=parallel).in_parallel(action, names) == names
    assert most == at_once


def test_a_store_that_lost_bytes_is_noticed(bucket, store, large, monkeypatch):
    """The server says it has the object, of the same size, with other bytes."""
    ours = bucket(retries=0)
    put = ours._fs._put_file

    async def put_other(local, remote, **settings):
        await put(local, remote, **settings)
        store.put(remote.partition("/")[2], bytes(large.stat().st_size))

    monkeypatch.setattr(ours._fs, "_put_file", put_other)
    with pytest.raises(CheckpointError, match=naming("other bytes")):
        ours.upload(large, "step-1/large")


def test_etags_that_are_no_md5_cost_one_look_and_no_failure(bucket, proxy, large, monkeypatch):
    monkeypatch.setattr("forge_plugin_checkpoints.objects.bucket._stored_md5", lambda info: "0" * 32)
    ours = bucket()
    for name in ("one", "other"):
        ours.upload(large, name)
    assert len([line for line in proxy.lines if line.startswith("GET") and "/one" in line]) >= 1
    assert not [line for line in proxy.lines if line.startswith("GET") and "/other" in line]


def test_a_bucket_that_does_not_exist_is_refused_at_once(store):
    with pytest.raises(CheckpointError, match=naming("s3://no-such-bucket-here/run", "bucket")):
        Bucket("s3://no-such-bucket-here/run", {"endpoint_url": store.endpoint}).check_access()


def test_a_store_that_has_less_than_was_sent_is_noticed(tmp_path, monkeypatch):
    """Any store: not all have checksums."""
    (tmp_path / "local").write_bytes(b"bytes")
    ours = Bucket(f"file://{tmp_path}/bucket", {}, retries=0)
    ours.upload(tmp_path / "local", "step-1/file")
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (os.truncate(source, 3), replace(source, target)))
    with pytest.raises(CheckpointError, match=naming(f"file://{tmp_path}/bucket/step-1/file", "3 bytes", "not 5")):
        ours.upload(tmp_path / "local", "step-1/file")


def test_an_upload_to_a_bucket_that_has_gone_is_a_failed_save(tmp_path, monkeypatch):
    """S3 names a bucket that was deleted as it names an object that is not there."""
    (tmp_path / "local").write_bytes(b"bytes")
    ours = Bucket(f"file://{tmp_path}/bucket", {}, retries=0)

    def gone(*_, **__):
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(ours._fs, "put_file", gone)
    with pytest.raises(CheckpointError, match=naming(f"file://{tmp_path}/bucket/step-1/file", "bucket does not exist")):
        ours.upload(tmp_path / "local", "step-1/file")


def test_what_a_checkpoint_in_the_bucket_lacks_is_named(tmp_path):
    (tmp_path / "bucket/step-1").mkdir(parents=True)
    (tmp_path / "bucket/step-1/file").write_bytes(b"bytes")
    storage = ObjectStorage(Bucket(f"file://{tmp_path}/bucket", {}, retries=0), tmp_path / "cache")
    assert storage.size(1, "file") == 5
    with pytest.raises(FileNotFoundError, match="other"):
        storage.size(1, "other")
    with pytest.raises(CheckpointError, match=naming(f"file://{tmp_path}/bucket/step-1/manifest.json", "missing")):
        storage.fetch(1, ["manifest.json"])
